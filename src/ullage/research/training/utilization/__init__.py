"""The rates behind `ullage.utilization`: what they are fitted to, the fit, and how good it is on families left out."""

from __future__ import annotations
