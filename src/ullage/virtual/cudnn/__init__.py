"""Convolutions: which library runs them, which copies PyTorch makes, and how large cuDNN's workspace is."""
