"""`torch.cuda` and related APIs while a virtual GPU is in use: one module for each part, which `install.py` installs."""
