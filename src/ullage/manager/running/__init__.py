"""Processes of jobs: started, limited, found again and ended.

`supervisor.py` is a program that outlives the daemon. With `job_watch`, `output`, `process_tree` and `terminal` it
needs no installed packages.
"""
