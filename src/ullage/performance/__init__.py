"""How fast and how busy: what a training step does, operator by operator.

A step is followed on the virtual GPU; nothing here needs a GPU.
"""
