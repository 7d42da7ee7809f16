"""What the manager remembers: jobs, attempts and events, in SQLite, written before they are acted on.

Only `book.py` changes them.
"""
