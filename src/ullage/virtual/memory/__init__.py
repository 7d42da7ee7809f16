"""Memory of the virtual GPU: tensors and what libraries take beside them, and when a dead one may be used again.

Every request goes to `ullage.allocator`. Large tensors of the CPU get memory when they are first touched.
"""
