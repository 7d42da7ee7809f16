"""Draw models, runs, operator calls and convolutions to measure.

In comes a seed and a count; out come lines of JSON. The same seed gives the same lines, a larger count more of them.
"""
