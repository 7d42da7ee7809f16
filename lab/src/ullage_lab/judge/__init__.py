"""The ranking of estimators over measured runs: run each in a separate process, score it, and show the results.

`ullage lab evaluate` and `ullage lab compare` are built on it.
"""
