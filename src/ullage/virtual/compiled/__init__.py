"""`torch.compile` on the virtual GPU: PyTorch's compiler runs as it is, and the kernels that it writes are left out."""
