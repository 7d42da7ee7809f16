"""Expandable segments: one range of addresses for each stream and pool, with memory mapped page by page: 2 MiB in the
small pool, 20 MiB (`large_segment_size`) in the large one."""

from ullage.allocator.blocks import (
    EXPANDABLE_EXTRA_DIVISOR,
    FREE,
    IN_USE,
    SEGMENT_ALLOC,
    SEGMENT_FREE,
    SMALL_BUFFER,
    UNMAPPED,
    Block,
    FreeList,
    Pool,
)
from ullage.allocator.segments import Segments
from ullage.units import round_up


def page_size(allocator: Segments, pool: Pool) -> int:
    return SMALL_BUFFER if pool is allocator.pools[0] else allocator.config.large_segment_size


def prefer_enclosed(blocks: list[Block], index: int) -> int:
    """Best fit with growth in mind: a block before unmapped addresses counts as large as it can grow."""
    while index + 1 < len(blocks) and _size_with_growth(blocks[index + 1]) < _size_with_growth(blocks[index]):
        index += 1
    return index


def _size_with_growth(block: Block) -> int:
    after = block.next
    return block.size + (after.size if after is not None and after.state == UNMAPPED else 0)


def allocate(allocator: Segments, size: int, pool: Pool, free_list: FreeList, stream: int) -> Block | None:
    """Map pages until there is a block of ``size`` bytes; return None if the driver has no more memory."""
    block = _find_room(allocator, size, pool, free_list, stream)
    if block.state == UNMAPPED:
        mapped = _map(allocator, block, min(block.size, size), pool, free_list)
        if mapped is None:
            return None
        block = mapped
    while block.size < size:
        after = block.next
        assert after is not None and after.state == UNMAPPED
        mapped = _map(allocator, after, min(size - block.size, after.size), pool, free_list)
        if mapped is None:
            return None
        block = mapped
    free_list.remove(block)
    return block


def _find_room(allocator: Segments, size: int, pool: Pool, free_list: FreeList, stream: int) -> Block:
    """Return the lowest run of free and unmapped blocks with room for ``size``, or a new range of addresses."""
    for unmapped in free_list.unmapped:
        before = unmapped.prev
        start = before if before is not None and before.state != IN_USE else unmapped
        room = 0
        block: Block | None = start
        while room < size and block is not None and block.state != IN_USE:
            room += block.size
            block = block.next
        if room >= size:
            return start
    total = allocator.total_memory
    span = round_up(total + total // EXPANDABLE_EXTRA_DIVISOR, page_size(allocator, pool))
    start = allocator.new_segment(span, stream, pool, UNMAPPED)
    free_list.add_unmapped(start)
    return start


def _map(allocator: Segments, block: Block, size: int, pool: Pool, free_list: FreeList) -> Block | None:
    """Map the first pages of an unmapped block; return the resulting free block, merged."""
    size = round_up(size, page_size(allocator, pool))
    if not allocator.can_take(size):
        return None
    free_list.unmapped.remove(block)
    address = block.address
    if size < block.size:
        free_list.add_unmapped(_cut(block, size))
    block.state = FREE
    before, after = block.prev, block.next
    if after is not None and after.state == FREE:
        free_list.remove(after)
        _absorb_next(block)
    if before is not None and before.state == FREE:
        free_list.remove(before)
        _absorb_next(before)
        block = before
    block.born = pool.searches
    free_list.add(block)
    allocator.count_reserved(pool, size)
    if allocator.on_event is not None:
        allocator.on_event(SEGMENT_ALLOC, address, size)
    return block


def unmap(allocator: Segments, block: Block) -> None:
    """Give back the pages that lie wholly inside a free block, and the range when nothing is left in it."""
    pool = block.pool
    assert pool is not None
    page = page_size(allocator, pool)
    base = allocator.heads[block.segment_id].address
    start = base + round_up(block.address - base, page)
    end = base + (block.address + block.size - base) // page * page
    if start >= end:
        return
    free_list = pool.by_stream[block.stream]
    free_list.remove(block)
    if start > block.address:
        front, block = block, _cut(block, start - block.address)
        front.born = pool.searches
        free_list.add(front)
    if end < block.address + block.size:
        rest = _cut(block, end - block.address)
        rest.born = pool.searches
        free_list.add(rest)
    block.state = UNMAPPED
    block = _merge_unmapped(block, free_list)
    allocator.count_reserved(pool, start - end)
    allocator.give_back(end - start)
    if allocator.on_event is not None:
        allocator.on_event(SEGMENT_FREE, start, end - start)
    if not block.is_split:
        free_list.unmapped.remove(block)
        allocator.drop_segment(block)


def _cut(block: Block, size: int) -> Block:
    """Cut a block after ``size`` bytes and return the rest, in the same state."""
    rest = Block(block.address + size, block.size - size, block.stream, block.segment_id, block.pool, block.state)
    rest.prev, rest.next = block, block.next
    if block.next is not None:
        block.next.prev = rest
    block.next, block.size = rest, size
    return rest


def _merge_unmapped(block: Block, free_list: FreeList) -> Block:
    before, after = block.prev, block.next
    if after is not None and after.state == UNMAPPED:
        free_list.unmapped.remove(after)
        _absorb_next(block)
    if before is not None and before.state == UNMAPPED:
        _absorb_next(before)
        return before
    free_list.add_unmapped(block)
    return block


def _absorb_next(block: Block) -> None:
    after = block.next
    assert after is not None
    block.size += after.size
    block.next = after.next
    if after.next is not None:
        after.next.prev = block
