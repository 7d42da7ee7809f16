"""The daemon and its decisions: it takes jobs in, places them, follows their attempts, and recovers from failures.

One process, one event loop; only this process writes to the database.
"""
