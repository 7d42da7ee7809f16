"""The daemon and its decisions: it accepts jobs, places them, watches their attempts, and recovers from failures.

One process, one event loop; only this process writes to the database.
"""
