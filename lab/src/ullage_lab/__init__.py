"""Data sets, measurements, trainings and rankings: the research tools of Ullage.

It draws models and calls, measures them on a GPU, cleans the rows, trains estimators of the literature on them, and
judges these. `ullage lab` is its command line, and `ullage` uses its estimators if it is installed.
"""
