"""Running workloads on a real GPU and comparing what they took with their estimates.

`ullage measure`, `ullage evaluate` and `ullage diff` are built on it.
"""
