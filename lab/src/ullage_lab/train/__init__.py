"""Fits estimators to measured rows, and evaluates them on rows outside the fit.

The input is a cleaned table or a measured file, the output a file of weights with a card that names its origin.
"""
