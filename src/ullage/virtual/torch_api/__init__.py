"""What `torch.cuda` and its neighbours answer while a virtual GPU is in use: one module for each part of PyTorch's API.

`install.py` puts all of them in place. What a kernel asks of the allocator is not here; see `virtual/kernels/`.
"""
