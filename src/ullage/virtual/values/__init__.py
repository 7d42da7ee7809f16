"""Known values of tensors without data: small tensors, drawn numbers and assumed answers."""
