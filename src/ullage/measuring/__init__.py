"""Runs on this machine's own GPU beside their estimates: what `ullage measure`, `evaluate`, `diff`, `contribute` do.

In come runs or a file of measured ones; out come lines of JSON, and errors of the estimates.
"""
