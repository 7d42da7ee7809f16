"""Convolutions: which library runs them, which copies PyTorch makes, and how large cuDNN's workspace is.

`data/` holds workspaces that were measured on an H200, and decision trees that were fitted to them.
"""
