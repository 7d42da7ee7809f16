"""Convolutions: the library that runs them, the copies that PyTorch makes, and the size of cuDNN's workspace.

`data/` holds workspaces that were measured on an H200, and decision trees that were fitted to them.
"""
