"""`torch.cuda` and related APIs while a virtual GPU is in use: one module for each part of the API.

`install.py` installs all of them. Allocator requests of kernels are in `virtual/operators/`.
"""
