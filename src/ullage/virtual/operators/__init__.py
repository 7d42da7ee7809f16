"""Operators by subject: the allocator requests of their kernels, and handlers for those that need more than a rule.

A handler copies data, shares memory, depends on values or decomposes an operator. `call/dispatch.py` imports them all.
"""
