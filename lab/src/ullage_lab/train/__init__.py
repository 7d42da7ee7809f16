"""Fits estimators to measured rows, and says how good they are on rows that the fit never saw.

In comes a cleaned table or a measured file; out comes a file of weights with a card that says where it is from.
"""
