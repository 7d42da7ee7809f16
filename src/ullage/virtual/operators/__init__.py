"""Operators that need more than a kernel rule: they copy data, share memory, depend on values, or are decomposed.

A rule that only says what a kernel allocates belongs in `virtual/kernels/`.
"""
