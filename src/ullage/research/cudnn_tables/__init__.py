"""How the convolution workspaces that Ullage ships were made: layers are collected, measured on a GPU, and fitted.

Nothing here is needed for an estimate.
"""
