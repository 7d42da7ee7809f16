"""The daemon's jobs, attempts and events in SQLite, written before the daemon acts on them.

Only `job_store.py` changes them.
"""
