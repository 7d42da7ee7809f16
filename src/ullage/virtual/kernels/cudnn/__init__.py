"""Convolutions: which library runs them, which copies PyTorch makes, and how much workspace cuDNN takes.

`data/` holds the workspaces that were measured on an H200 and the trees that were fitted to them.
"""
