"""Observation of a run: origins of requests, steps, repetition, and missing packages.

Nothing here changes what a run allocates.
"""
