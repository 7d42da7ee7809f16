"""Memory of the virtual GPU: tensors, libraries, and reuse of freed memory.

Every request goes to `ullage.allocator`. Large CPU tensors get memory when they are first used.
"""
