"""Starts, limits, finds and ends the processes of jobs.

`supervisor.py` is a program that outlives the daemon. With `job_watch`, `output`, `process_tree` and `terminal` it
needs no installed packages.
"""
