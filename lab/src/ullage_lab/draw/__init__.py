"""Draw models, runs, operator calls and convolutions to measure.

The input is a seed and a count, the output lines of JSON. The same seed gives the same lines, a larger count more.
"""
