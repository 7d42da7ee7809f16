"""The manager's jobs, attempts and events in SQLite, written before the manager acts on them.

Only `job_store.py` changes them.
"""
