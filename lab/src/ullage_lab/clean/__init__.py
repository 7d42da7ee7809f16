"""Joins and checks measured files, and makes one table with the columns that estimators learn from.

This decides the family of a model, and which families are kept for testing.
"""
