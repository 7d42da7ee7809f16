"""`torch.compile` on the virtual GPU: PyTorch's compiler runs unchanged, its generated kernels are skipped.

`install.py` installs the parts: Dynamo, Inductor and its trees of CUDA graphs, or the eager code without Triton.
"""
