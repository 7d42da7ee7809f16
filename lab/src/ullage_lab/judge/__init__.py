"""The ranking of estimators over measured runs: each is asked in a process of its own, judged, and shown.

`ullage lab evaluate` and `ullage lab compare` are built on it.
"""
