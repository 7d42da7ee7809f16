"""The answer to "how much memory will this take?": the estimate itself, its report, and what follows from it.

`ullage.estimate` is in `asking.py`; `estimators/` has every method that it can use, `scripts/` follows a script.
"""
