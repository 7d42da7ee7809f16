"""The numbers of GPUs and the parallelism with which a job fits, and the fastest combination (`ullage.plan`).

`asking.py` estimates the rows, and `result.py` has the table of them.
"""
