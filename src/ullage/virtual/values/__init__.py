"""Known values of tensors without data: small tensors, drawn numbers and assumed answers.

Nothing here changes what a kernel allocates, except through a value that the program reads.
"""
