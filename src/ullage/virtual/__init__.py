"""The virtual GPU: any training code runs on "cuda" without a GPU, and its memory is counted."""

from ullage.virtual.gpu import VirtualGPU, current, virtual_gpu

__all__ = ["VirtualGPU", "current", "virtual_gpu"]
