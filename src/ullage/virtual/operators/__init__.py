"""Operators that need more than a kernel rule: they move data, share memory, or are taken apart as a CUDA build does
it.

A rule that only says what a kernel allocates belongs in `virtual/kernels/`.
"""
