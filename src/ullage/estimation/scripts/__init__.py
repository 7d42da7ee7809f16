"""Estimate a training script as it is: it runs in a child process on a virtual GPU until its memory has settled.

`parent.py` starts the process and `child.py` runs in it.
"""
