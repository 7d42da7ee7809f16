"""What the manager remembers: jobs, attempts and events, in SQLite, written before they are acted on.

Only `job_store.py` changes them.
"""
