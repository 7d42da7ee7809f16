"""Whether a recorded run would survive with less memory: its requests, made anew on an allocator of that size."""

from __future__ import annotations

from .block import Block
from .caching import CachingAllocator
from .constants import ALLOC, FREE_COMPLETED, SEGMENT_FREE
from .out_of_memory import OutOfMemory
from .replay import History


def survives(history: History, cap: int) -> bool:
    """Whether the requests of a history can all be served with `cap` bytes of segments.

    As on the card, cached segments are given back and the request is tried again before it fails, so a run may survive
    a cap below what it reserved without one.

    >>> one = History([3, 0], [0, 0], [20 * 2**20, 5 * 2**20])
    >>> survives(one, 20 * 2**20), survives(one, 19 * 2**20)
    (True, False)

    Not covered: a program that itself does something else when memory is short.
    """
    if cap <= 0:
        return ALLOC not in history.action
    allocator = CachingAllocator(cap, history.config)
    live: dict[int, Block] = {}
    emptied = False
    try:
        for action, address, size in zip(history.action, history.addr, history.size, strict=True):
            if action == ALLOC:
                live[address] = allocator.malloc(size)
            elif action == FREE_COMPLETED:
                block = live.pop(address, None)
                if block is not None:
                    allocator.free(block)
            elif action == SEGMENT_FREE and not emptied:
                allocator.empty_cache()  # a run of them is one call
            emptied = action == SEGMENT_FREE
    except OutOfMemory:
        return False
    return True
