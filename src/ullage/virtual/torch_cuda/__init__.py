"""What `torch.cuda` and related APIs answer while a virtual GPU is in use: one module for each part of the API.

`install.py` puts all of them in place. What kernels ask of the allocator is in `virtual/operators/`.
"""
