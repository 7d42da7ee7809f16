"""Draws what is worth measuring: models, runs, operator calls, convolutions.

In comes a seed and a count; out come lines of JSON. The same seed gives the same lines, a larger count more of them.
"""
