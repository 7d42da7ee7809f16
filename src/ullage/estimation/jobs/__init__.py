"""Estimates of jobs that were submitted, from their command lines.

The manager asks; `child.py` runs in a process of the user who submitted the job, `command.py` finds script and Python.
"""
