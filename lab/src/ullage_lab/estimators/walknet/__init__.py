"""`walknet`: networks that classify memory from features of a walk through a training step on our allocator model.

The published GPUMemNet, without anything of ours, is in `gpumemnet/`.
"""
