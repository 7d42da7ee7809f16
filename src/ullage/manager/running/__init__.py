"""Processes of jobs: how they are started, limited, found again and ended.

`supervisor.py` runs as a program of its own and outlives the daemon. It runs without installed packages, and so do the
parts that it is made of: `job_watch`, `output`, `process_tree` and `terminal`.
"""
