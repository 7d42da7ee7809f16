"""How the daemon is reached: its Unix socket and its REST API.

Both take the same orders; see `manager/core/orders.py`.
"""
