"""The forms of traces, one module each: `own` is the project's, the others are those of public traces.

A module has `NAME`, `TITLE`, `FILES` (what such files are called in a folder), `recognises` (whether a file begins like
one) and `read`; `ullage.manager.simulation.reading` knows them all. `files` opens files and reads tables with errors
that name the line.
"""

from __future__ import annotations
