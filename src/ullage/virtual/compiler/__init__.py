"""`torch.compile` on the virtual GPU: PyTorch's compiler runs unchanged, its generated kernels are skipped."""
