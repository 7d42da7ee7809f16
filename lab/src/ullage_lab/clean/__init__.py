"""Measured files become one table: joined, checked, with the columns that estimators learn from.

The family of a model is decided here, and which families are kept for testing.
"""
