"""Measuring, comparing and training estimators: what a researcher needs and an estimate does not.

The packages of `ullage[research]` are needed here and nowhere else.
"""
