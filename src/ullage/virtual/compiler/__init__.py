"""`torch.compile` on the virtual GPU: PyTorch's compiler runs as it is, and the kernels that it writes are left out.

`install.py` puts the parts in place: Dynamo, Inductor and its trees of CUDA graphs, or the eager code without Triton.
"""
