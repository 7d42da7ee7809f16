"""Runs as HTML pages that need no network: tables and plots, light and dark.

`runs` compares single runs, `sweeps` means over seeds; `plots` has what both draw with.
"""

from __future__ import annotations
