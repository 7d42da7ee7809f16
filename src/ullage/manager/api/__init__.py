"""The two ways to reach the daemon: its Unix socket and its REST API.

Both accept the same orders; see `manager/core/orders.py`.
"""
