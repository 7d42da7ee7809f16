"""`torch.compile` on the virtual GPU: the compiler runs as it is, its kernels are left out.

Empty on purpose: import its modules.
"""
