"""Estimators of the literature, and one of ours that needs no GPU model: a module or a folder each.

`ullage estimate --estimator NAME` finds them by the entry points of this package.
"""
