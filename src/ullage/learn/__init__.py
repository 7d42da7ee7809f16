"""Data sets for learned estimators: generated models, their measured memory and utilisation, one Parquet file.

Nothing is imported here: a process that measures forks hundreds of children and must stay small, and the machine that
measures needs none of the packages that the data set's file needs.
"""
