"""On how many GPUs, and spread how, a job fits, and what is fastest (`ullage.plan`).

`asking.py` estimates the rows, and `result.py` has the table of them.
"""
