"""Processes of jobs: how they are started, limited, found again and ended.

`supervisor.py` runs as a program of its own and outlives the daemon.
"""
