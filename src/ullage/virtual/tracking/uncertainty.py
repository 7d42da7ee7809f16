"""The same run with every doubtful choice on the larger side: how much it would reserve.

Which kernel a library takes is not always known, and a larger workspace can move everything after it. So the requests
of a run are repeated on an allocator of their own, each doubtful one with the largest size that is not unlikely.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ullage.allocator import AllocatorConfig, CachingAllocator
from ullage.virtual.memory import WITHOUT_LIMIT, DeviceMemory
from ullage.virtual.state import GPUState

GUESSED, AUTOCAST = "a convolution's workspace was guessed", "autocast lets casts go in the order of their addresses"
SPREAD_SHARE = 40  # a fortieth of the reserved memory, by which runs move for either reason (docs/accuracy.md)
SURPRISES = 2  # wrong guesses that a bound allows for, of the size of the least sure one


def largest_reserved(memory: DeviceMemory, config: AllocatorConfig) -> int:
    """The peak of the reserved memory if every doubtful request were as large as it could be.

    >>> memory = DeviceMemory(CachingAllocator(1 << 30))
    >>> memory.doubts.append((0, 64 << 20)); memory.give_back(memory.take(2 << 20))
    >>> largest_reserved(memory, AllocatorConfig()) >> 20
    64
    """
    if not memory.doubts:
        return 0
    allocator = CachingAllocator(WITHOUT_LIMIT, config)
    blocks: list[Any] = []
    doubts = iter(memory.doubts)
    place, larger = next(doubts)
    for index, number in enumerate(memory.requests):
        while place == index:
            if number > 0 and number <= larger:
                number = larger
            else:
                allocator.free(allocator.malloc(larger))
            place, larger = next(doubts, (-1, 0))
        if number > 0:
            blocks.append(allocator.malloc(number))
        else:
            allocator.free(blocks[number])
            blocks[number] = None
    return allocator.peak_reserved


def watch_autocast(gpu: GPUState) -> Callable[[], None]:
    """Note when autocast is used for the GPU: two runs of the same job then differ; returns what ends it."""
    autocast: Any = torch.amp.autocast_mode.autocast
    enter = autocast.__enter__

    def __enter__(self: Any) -> Any:
        if self.device == "cuda" and self._enabled:
            gpu.unsure.add(AUTOCAST)
        return enter(self)

    autocast.__enter__ = __enter__

    def restore() -> None:
        autocast.__enter__ = enter

    return restore
