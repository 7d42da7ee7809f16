"""An exact model of PyTorch's CUDA caching allocator: its requests to the GPU, and their order. Standard library only.

>>> from ullage.allocator import AllocatorConfig, CachingAllocator
>>> gpu = CachingAllocator(80 * 2**30, AllocatorConfig.parse("max_split_size_mb:128"))
>>> block = gpu.malloc(100 * 2**20)
>>> gpu.free(block)
>>> gpu.peak_allocated, gpu.peak_reserved
(104857600, 104857600)
"""

from ullage.allocator.blocks import NO_LIMIT, Block
from ullage.allocator.caching import CachingAllocator, OutOfMemory, format_size
from ullage.allocator.checkpoints import PoolState, checkpoint, restore
from ullage.allocator.config import AllocatorConfig, AllocatorConfigError
from ullage.allocator.private_pools import PoolId
from ullage.allocator.request_log import History, RequestLog

__all__ = [
    "NO_LIMIT",
    "AllocatorConfig",
    "AllocatorConfigError",
    "Block",
    "CachingAllocator",
    "History",
    "OutOfMemory",
    "PoolId",
    "PoolState",
    "format_size",
    "RequestLog",
    "checkpoint",
    "restore",
]
