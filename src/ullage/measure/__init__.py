"""The same workloads on a real GPU."""
