"""Runs on this machine's GPU, compared with their estimates: `ullage measure`, `evaluate`, `diff`, `contribute`.

The input is runs or a file of measured runs; the output is lines of JSON, and errors of the estimates.
"""
