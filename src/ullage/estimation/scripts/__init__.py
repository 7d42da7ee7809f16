"""Estimating an unmodified training script: it runs in a child process on a virtual GPU and is followed until it
settles.

`parent.py` starts the process, `child.py` is what runs in it.
"""
