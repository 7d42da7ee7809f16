"""Estimators of the literature, and one of ours without a GPU model, each in a module or a folder.

`ullage estimate --estimator NAME` finds them by the entry points of this package.
"""
