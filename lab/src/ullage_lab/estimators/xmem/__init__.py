"""xMem (Shi et al. 2025): three real training steps on the CPU, replayed on a model of the GPU allocator.

`child.py` trains under PyTorch's profiler in a process of its own; `replay.py` turns its trace into GPU requests.
"""
