"""Runs on this machine's GPU, compared with their estimates: `ullage measure`, `evaluate`, `diff`, `contribute`.

In come runs or a file of measured ones; out come lines of JSON, and errors of the estimates.
"""
