"""Estimates of jobs and their reports, and answers that need several estimates: the largest batch, plans, advice.

`ullage.estimate` is in `asking.py`; `estimators/` has every method that it can use, `scripts/` follows a script.
"""
