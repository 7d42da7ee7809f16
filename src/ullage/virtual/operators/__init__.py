"""Operators by subject: what their kernels ask of the allocator, and handlers of those that need more than a rule.

A handler copies data, shares memory, depends on values or takes an operator apart. `call/dispatch.py` imports them all.
"""
