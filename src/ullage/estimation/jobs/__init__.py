"""Estimates of jobs that were submitted, from their command lines.

The daemon requests them; `child.py` runs in a process of the job's user, `command.py` finds script and Python.
"""
