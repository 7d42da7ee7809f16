"""The ranking of estimators over measured runs: each is asked in a process of its own, judged, and shown.

`ullage evaluate --estimators` is built on it.
"""
