"""Values that are known although the GPU has no data: small tensors, drawn numbers, and answers that are assumed.

Nothing here changes what a kernel allocates, except through a value that the program reads.
"""
