"""Data sets, measurements, trainings and rankings: the research tools of Ullage.

Models and calls are drawn, measured on a GPU and cleaned; estimators of the literature are trained on the rows
and judged. `ullage lab` is its command line, and `ullage` uses its estimators where it is installed.
"""
