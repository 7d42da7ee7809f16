"""Data sets for learned estimators: networks are drawn, measured on a GPU, and cleaned into one Parquet file.

Nothing is imported here: a process that measures forks hundreds of children and has to stay small.
"""
