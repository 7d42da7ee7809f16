"""`fast`: a closed formula over a job's totals, corrected by regression trees, with a bound.

In comes a configuration, out come reserved memory and the bound; nothing is measured and no layer is run.
"""
