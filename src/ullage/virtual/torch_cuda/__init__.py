"""`torch.cuda` and related APIs while a virtual GPU is in use: one module for each part; `install.py` installs all."""
