"""`fast`: a closed formula over a job's totals, corrected by regression trees, with a bound.

The input is a configuration, the output reserved memory and the bound; nothing is measured and no layer runs.
"""
