"""Finding memory where the plain search finds none: options of the cache, new segments, failure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from . import expandable, release
from .block import FREE, Block, FreeList, Pool
from .constants import SEGMENT_ALLOC
from .driver import can_take, free_on_card
from .out_of_memory import OutOfMemory
from .rounding import segment_size

if TYPE_CHECKING:
    from .caching import CachingAllocator


def take_cached(allocator: CachingAllocator, rounded: int, pool: Pool, free_list: FreeList) -> Block | None:
    """Search the cache with all options: ages, expandable segments, blocks that must stay whole.

    >>> from ullage.allocator import CachingAllocator
    >>> gpu = CachingAllocator(2**30); take_cached(gpu, 512, gpu.pools[0], gpu.pools[0].free_list(0))
    """
    if allocator.collects_garbage:
        pool.searches += 1
    blocks = free_list.blocks
    index = free_list.first_at_least(rounded)
    if index == len(blocks):
        return None
    config = allocator.config
    if config.expandable_segments:
        index = expandable.prefer_enclosed(blocks, index)
    block = blocks[index]
    if rounded < config.max_split_size:
        if block.size >= config.max_split_size:
            return None
    elif block.size >= rounded + config.max_non_split_rounding:
        return None
    del free_list.keys[index]
    del blocks[index]
    return block


def obtain(allocator: CachingAllocator, size: int, rounded: int, pool: Pool, free_list: FreeList, stream: int) -> Block:
    """Get a block from the driver, at need after giving cached memory back.

    >>> from ullage.allocator import CachingAllocator
    >>> gpu = CachingAllocator(2**30)
    >>> obtain(gpu, 1, 512, gpu.pools[0], gpu.pools[0].free_list(0), 0).size
    2097152
    """
    if allocator.collects_garbage:
        release.collect_garbage(allocator)
    wanted = segment_size(rounded, allocator.config.large_segment_size)
    block = _grow(allocator, wanted, rounded, pool, free_list, stream)
    if block is None and release.release_oversize_blocks(allocator, free_list, rounded):
        block = _grow(allocator, wanted, rounded, pool, free_list, stream)
    if block is None:
        release.release_cached_blocks(allocator)
        allocator.num_alloc_retries += 1
        block = _grow(allocator, wanted, rounded, pool, free_list, stream)
    if block is None:
        allocator.num_ooms += 1
        raise OutOfMemory(
            requested=size,
            rounded=rounded,
            segment_size=wanted,
            allowed=allocator.allowed,
            reserved=allocator.reserved,
            allocated=allocator.allocated,
            device_free=free_on_card(allocator),
            device_total=allocator.total_memory,
        )
    return block


def _grow(
    allocator: CachingAllocator, wanted: int, rounded: int, pool: Pool, free_list: FreeList, stream: int
) -> Block | None:
    if allocator.allowed is not None and allocator.reserved + wanted > allocator.allowed:
        return None
    if allocator.config.expandable_segments:
        return expandable.allocate(allocator, rounded, pool, free_list, stream)
    if not can_take(allocator, wanted):
        return None
    block = new_segment(allocator, wanted, stream, pool, FREE)
    allocator.count_reserved(pool, wanted, segments=1)
    if wanted >= allocator.config.max_split_size:
        allocator.oversize_segments.add(1)
    if allocator.on_event is not None:
        allocator.on_event(SEGMENT_ALLOC, block.address, wanted)
    return block


def new_segment(allocator: CachingAllocator, size: int, stream: int, pool: Pool, state: int) -> Block:
    """Give a new segment an address and an id; nothing is counted yet.

    >>> from ullage.allocator import CachingAllocator
    >>> gpu = CachingAllocator(2**30); new_segment(gpu, 2097152, 0, gpu.pools[0], FREE).segment_id
    1
    """
    place = allocator.segment_address
    address = allocator.addresses.place(size) if place is None else place(size)
    head = Block(address, size, stream, allocator.next_segment_id, pool, state)
    allocator.heads[head.segment_id] = head
    allocator.next_segment_id += 1
    return head


def drop_segment(allocator: CachingAllocator, head: Block) -> None:
    """Forget a segment and let its addresses be used again.

    >>> from ullage.allocator import CachingAllocator
    >>> gpu = CachingAllocator(2**30); drop_segment(gpu, new_segment(gpu, 2097152, 0, gpu.pools[0], FREE))
    >>> gpu.heads
    {}
    """
    del allocator.heads[head.segment_id]
    if allocator.segment_address is None:
        allocator.addresses.release(head.address, head.size)
