"""Networks that measured files name: those of `ullage lab draw`, and those drawn for tests.

A row names the factory and its arguments, so a factory here keeps its name and what it builds.
"""
