"""Giving memory back to the driver: on request, on failure, and by garbage collection."""

from __future__ import annotations

from typing import TYPE_CHECKING

from . import expandable, segments
from .block import Block, FreeList
from .constants import SEGMENT_FREE, UNLIMITED
from .driver import give_back

if TYPE_CHECKING:
    from .caching import CachingAllocator


def release_segment(allocator: CachingAllocator, block: Block) -> None:
    """Give a wholly free segment back (PyTorch's release_block).

    >>> from ullage.allocator import CachingAllocator
    >>> gpu = CachingAllocator(2**30); block = gpu.malloc(2**25); gpu.free(block); release_segment(gpu, block)
    >>> gpu.reserved
    0
    """
    pool = block.pool
    assert pool is not None
    pool.by_stream[block.stream].remove(block)
    segments.drop_segment(allocator, block)
    allocator.count_reserved(pool, -block.size, segments=-1)
    give_back(allocator, block.size)
    if block.size >= allocator.config.max_split_size:
        allocator.oversize_segments.add(-1)
    if allocator.on_event is not None:
        allocator.on_event(SEGMENT_FREE, block.address, block.size)


def release_cached_blocks(allocator: CachingAllocator) -> None:
    """Give back all wholly free segments and pages, the large pool's first.

    >>> from ullage.allocator import CachingAllocator
    >>> gpu = CachingAllocator(2**30); gpu.free(gpu.malloc(1)); release_cached_blocks(gpu); gpu.reserved
    0
    """
    allocator.num_sync_all_streams += 1
    for pool in reversed(allocator.pools):
        for block in pool.free_blocks():
            if allocator.config.expandable_segments:
                expandable.unmap(allocator, block)
            elif not block.is_split:
                release_segment(allocator, block)


def release_oversize_blocks(allocator: CachingAllocator, free_list: FreeList, rounded: int) -> bool:
    """With max_split_size: give back as few unsplittable blocks as serve the request.

    One that is large enough, or else the largest ones until their sum is (PyTorch's
    release_available_cached_blocks). Returns whether enough came back.

    >>> from ullage.allocator import CachingAllocator
    >>> gpu = CachingAllocator(2**30); release_oversize_blocks(gpu, gpu.pools[1].free_list(0), 2**25)
    False
    """
    limit = allocator.config.max_split_size
    if limit == UNLIMITED or allocator.config.expandable_segments:
        # PyTorch skips the blocks of expandable segments here, and there are no others then.
        return False
    needed = max(rounded, limit)
    index = free_list.first_at_least(needed)
    if index < len(free_list.blocks):
        release_segment(allocator, free_list.blocks[index])
        return True
    released = 0
    while released < needed and free_list.blocks and free_list.blocks[-1].size >= limit:
        largest = free_list.blocks[-1]
        released += largest.size
        release_segment(allocator, largest)
    return released >= needed


def collect_garbage(allocator: CachingAllocator) -> None:
    """Above garbage_collection_threshold: give back cached segments of the large pool, the oldest first.

    A block's age is the number of searches of the pool since the block became free. Each round gives back
    what is at least as old as the average, until reserved memory is under the threshold.

    >>> from ullage.allocator import CachingAllocator
    >>> gpu = CachingAllocator(2**30); gpu.set_memory_fraction(0.5); collect_garbage(gpu)
    """
    assert allocator.allowed is not None
    threshold = int(allocator.config.garbage_collection_threshold * allocator.allowed)
    if allocator.reserved <= threshold:
        return
    target = allocator.reserved - threshold
    large = allocator.pools[1]
    # The blocks of expandable segments are never collected, and there are no others then.
    candidates = [block for block in large.free_blocks() if not block.is_split]
    if allocator.config.expandable_segments:
        return
    reclaimed = 0
    while candidates and reclaimed < target:
        average_age = sum(large.searches - block.born for block in candidates) / len(candidates)
        kept: list[Block] = []
        for block in candidates:
            age = large.searches - block.born
            if age >= average_age:
                reclaimed += block.size
                release_segment(allocator, block)
            else:
                kept.append(block)
        candidates = kept
