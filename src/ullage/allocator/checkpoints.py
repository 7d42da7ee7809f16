"""Checkpoints of a private pool, as CUDA graph trees need them: replaying a graph allocates nothing, so before the next
one is recorded, the pool is put back into the state after the last recorded graph on the path."""

from typing import NamedTuple

from ullage.allocator.blocks import SMALL_SIZE, Block, FreeList, blocks_from
from ullage.allocator.caching import CachingAllocator
from ullage.allocator.private_pools import PoolId


class PoolState(NamedTuple):
    """A checkpoint of a private pool: by segment id, the size of each block and whether it is in use."""

    pool: PoolId
    segments: dict[int, list[tuple[int, bool]]]


class Restored(NamedTuple):
    """The result of restoring a checkpoint: the freed addresses, and the blocks in use now."""

    freed: list[int]
    in_use: list[Block]


def checkpoint(allocator: CachingAllocator, pool: PoolId) -> PoolState:
    """Return the state of a private pool (PyTorch's getCheckpointState)."""
    segments = {
        head.segment_id: [(block.size, block.allocated) for block in blocks_from(head)]
        for head in _heads(allocator, pool)
    }
    return PoolState(pool, segments)


def restore(allocator: CachingAllocator, state: PoolState) -> Restored:
    """Free a pool's blocks, then allocate again those that a checkpoint had in use (PyTorch's setCheckpointPoolState).

    Not covered: expandable segments.
    """
    freed = []
    for head in _heads(allocator, state.pool):
        for block in [block for block in blocks_from(head) if block.allocated]:
            freed.append(block.address)
            allocator.free(block)
    in_use: list[Block] = []
    for segment_id, blocks in state.segments.items():
        in_use += _take_as(allocator, allocator.heads[segment_id], blocks)
    return Restored(freed, in_use)


def _take_as(allocator: CachingAllocator, whole: Block, blocks: list[tuple[int, bool]]) -> list[Block]:
    """Allocate a wholly free segment in the pieces of a checkpoint, then free those that were free."""
    pool, lane = whole.pool, whole.stream
    assert pool is not None
    others = pool.by_stream[lane]
    others.remove(whole)
    alone = pool.by_stream[lane] = FreeList()
    alone.add(whole)
    in_use: list[Block] = []
    spare: list[Block] = []
    for size, used in blocks:
        # A free block of the small pool may be larger than any request that it serves.
        most = SMALL_SIZE if pool is allocator.pools[0] and not used else size
        for start in range(0, size, most):
            (in_use if used else spare).append(allocator.malloc(min(most, size - start), lane))
    for block in spare:
        allocator.free(block)
    for block in alone.blocks:
        others.add(block)
    pool.by_stream[lane] = others
    return in_use


def _heads(allocator: CachingAllocator, pool: PoolId) -> list[Block]:
    return [head for head in allocator.heads.values() if allocator.private.pool_of(head.stream) == pool]
