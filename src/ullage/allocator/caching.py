"""An exact model of PyTorch's CUDACachingAllocator: what is asked of it, what it takes from the driver.

``malloc`` and ``free`` are the whole of the common case and are written out in full, because a training run
calls them hundreds of thousands of times. What happens seldom lives beside: new segments and failures in
segments.py, giving memory back in release.py, expandable segments in expandable.py, reports in statistics.py.

Not modelled: record_stream (a freed block is free at once), CUDA graphs and private pools.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from typing import Final

from . import release, segments, statistics
from .addresses import AddressSpace
from .block import FREE, IN_USE, Block, FreeList, Pool
from .config import AllocatorConfig
from .constants import (
    ADDRESS_BITS,
    ALLOC,
    FREE_COMPLETED,
    FREE_REQUESTED,
    MIN_BLOCK_SIZE,
    SMALL_SIZE,
    UNLIMITED,
)
from .counters import Counters
from .driver import Driver
from .rounding import block_size

DEFAULT_CONFIG: Final = AllocatorConfig()


class CachingAllocator(Counters):
    """PyTorch's caching allocator for one device.

    ``capacity`` is what the driver can still give (the card less the CUDA context), ``total_memory`` the
    card, of which a memory fraction is a fraction. ``segment_address`` maps the size of a new segment to its
    address (below 2**48); without it addresses imitate cudaMalloc's, see addresses.py. ``driver`` is asked for
    every segment too, where the card is shared with others. The attribute ``on_event`` is called with
    (action, address, size) for every allocation, free and segment; mapped and unmapped
    pages of expandable segments are reported as segments.

    >>> gpu = CachingAllocator(capacity=2**30)
    >>> block = gpu.malloc(3_000_000)
    >>> gpu.allocated, gpu.reserved
    (3000320, 20971520)
    >>> gpu.free(block); gpu.empty_cache(); gpu.reserved
    0
    """

    def __init__(
        self,
        capacity: int,
        config: AllocatorConfig = DEFAULT_CONFIG,
        *,
        segment_address: Callable[[int], int] | None = None,
        total_memory: int | None = None,
        driver: Driver | None = None,
    ) -> None:
        total_memory = capacity if total_memory is None else total_memory
        if not 0 <= capacity <= total_memory:
            raise ValueError(f"a capacity of 0 to {total_memory} (the total memory) is needed, not {capacity}")
        grows = config.expandable_segments
        self._small: Final = Pool("small_pool", MIN_BLOCK_SIZE)
        self._large: Final = Pool(
            "large_pool",
            MIN_BLOCK_SIZE if grows else SMALL_SIZE + 1,
            UNLIMITED if grows else config.max_split_size,
        )
        super().__init__(self._small, self._large)
        self.capacity = capacity  # shrinks when something else on the card takes memory
        self.total_memory: Final = total_memory
        self.config: Final = config
        self.on_event: Callable[[int, int, int], None] | None = None
        self.heads: dict[int, Block] = {}  # by segment id, the block at the lowest address
        self.next_segment_id = 1
        self.addresses = AddressSpace()
        self.segment_address = segment_address
        self.driver = driver
        self._rounds_to_512 = max(config.roundup_power2_divisions) <= 1
        self._max_split = config.max_split_size
        # PyTorch leaves expandable segments out of inactive_split: their free pages can always go.
        self._counts_inactive = not grows
        self.allowed: int | None = None
        self.collects_garbage = False
        self._plain_search = False
        self.set_memory_fraction(config.memory_fraction)

    def set_memory_fraction(self, fraction: float) -> None:
        """Limit what is reserved to a fraction of the card, as torch.cuda.set_per_process_memory_fraction().

        >>> gpu = CachingAllocator(2**30); gpu.set_memory_fraction(0.5); gpu.allowed
        536870912
        """
        if not 0.0 <= fraction <= 1.0:
            raise ValueError(f"a fraction in [0, 1] is needed, not {fraction:g}")
        self.allowed = int(fraction * self.total_memory) if fraction < 1.0 else None
        self.collects_garbage = self.allowed is not None and self.config.garbage_collection_threshold > 0.0
        self._plain_search = not (
            self.collects_garbage or self.config.expandable_segments or self._max_split != UNLIMITED
        )

    def malloc(self, size: int, stream: int = 0) -> Block:
        """Allocate ``size`` bytes for use on ``stream``, or raise OutOfMemory.

        As in PyTorch, 0 bytes are no allocation: nothing is counted and the block has address 0 and size 0.

        >>> CachingAllocator(2**30).malloc(1).size
        512
        """
        if size <= 0:
            return _no_block(size, stream)
        divisions = self.config.roundup_power2_divisions
        rounded = (size + 511) & -512 if self._rounds_to_512 else block_size(size, divisions)
        pool = self._small if rounded <= SMALL_SIZE else self._large
        free_list = pool.by_stream.get(stream)
        if free_list is None:
            free_list = pool.free_list(stream)
        if self._plain_search:
            keys = free_list.keys
            index = bisect_left(keys, rounded << ADDRESS_BITS)
            if index < len(keys):
                del keys[index]
                block = free_list.blocks.pop(index)
            else:
                block = segments.obtain(self, size, rounded, pool, free_list, stream)
        else:
            cached = segments.take_cached(self, rounded, pool, free_list)
            block = cached or segments.obtain(self, size, rounded, pool, free_list, stream)
        rest = block.size - rounded
        if rest >= pool.smallest_remainder and rounded < pool.split_below:
            self._split(block, rounded, rest, pool, free_list)
        else:
            rounded = block.size
            if self._counts_inactive and (block.prev is not None or block.next is not None):
                self.inactive_count -= 1
                pool.inactive_count -= 1
                self.inactive_bytes -= rounded
                pool.inactive_bytes -= rounded
        block.state = IN_USE
        block.requested = size

        pool.count_in = total = pool.count_in + 1
        if total - pool.count_out > pool.peak_count:
            pool.peak_count = total - pool.count_out
        pool.allocated_in = total = pool.allocated_in + rounded
        if total - pool.allocated_out > pool.peak_allocated:
            pool.peak_allocated = total - pool.allocated_out
        pool.requested_in = total = pool.requested_in + size
        if total - pool.requested_out > pool.peak_requested:
            pool.peak_requested = total - pool.requested_out
        self.count = total = self.count + 1
        if total > self.peak_count:
            self.peak_count = total
        self.allocated = total = self.allocated + rounded
        if total > self.peak_allocated:
            self.peak_allocated = total
        self.requested = total = self.requested + size
        if total > self.peak_requested:
            self.peak_requested = total
        if rounded >= self._max_split:
            self.oversize_allocations.add(1)
        if self.on_event is not None:
            self.on_event(ALLOC, block.address, size)
        return block

    def free(self, block: Block) -> None:
        """Give a block back to the cache, where it merges with free neighbours.

        >>> gpu = CachingAllocator(2**30); gpu.free(gpu.malloc(512)); gpu.allocated, gpu.reserved
        (0, 2097152)
        """
        pool = block.pool
        if pool is None:
            return
        if block.state != IN_USE:
            raise ValueError(f"a block in use is needed, not {block!r}")
        size = block.size
        if self.on_event is not None:
            self.on_event(FREE_REQUESTED, block.address, block.requested)
            self.on_event(FREE_COMPLETED, block.address, block.requested)
        if size >= self._max_split:
            self.oversize_allocations.add(-1)
        pool.count_out += 1
        pool.allocated_out += size
        pool.requested_out += block.requested
        self.count -= 1
        self.allocated -= size
        self.requested -= block.requested

        free_list = pool.by_stream[block.stream]
        keys = free_list.keys
        blocks = free_list.blocks
        more_split = 1
        more_split_bytes = size
        block.state = FREE
        before = block.prev
        after = block.next
        if after is not None and after.state == FREE:
            index = bisect_left(keys, after.key)
            del keys[index]
            del blocks[index]
            size += after.size
            after = block.next = after.next
            if after is not None:
                after.prev = block
            more_split = 0
        if before is not None and before.state == FREE:
            index = bisect_left(keys, before.key)
            del keys[index]
            del blocks[index]
            size += before.size
            before.next = after
            if after is not None:
                after.prev = before
            block = before
            before = block.prev
            more_split -= 1
        block.size = size
        block.born = pool.searches
        block.key = key = size << ADDRESS_BITS | block.address
        index = bisect_left(keys, key)
        keys.insert(index, key)
        blocks.insert(index, block)
        if before is None and after is None:
            more_split -= 1
            more_split_bytes -= size
        if self._counts_inactive and (more_split or more_split_bytes):
            self.count_inactive(pool, more_split, more_split_bytes)

    def empty_cache(self) -> None:
        """Give every wholly free segment (and every wholly free page) back to the driver.

        >>> gpu = CachingAllocator(2**30); gpu.free(gpu.malloc(512)); gpu.empty_cache(); gpu.reserved
        0
        """
        release.release_cached_blocks(self)

    def reset_peak_stats(self) -> None:
        """Let all peaks start anew from the current values, as torch.cuda.reset_peak_memory_stats().

        >>> gpu = CachingAllocator(2**30); gpu.free(gpu.malloc(512)); gpu.reset_peak_stats()
        >>> gpu.peak_allocated
        0
        """
        self.reset_peaks()

    def reset_accumulated_stats(self) -> None:
        """Let all totals start anew from zero, as torch.cuda.reset_accumulated_memory_stats().

        >>> gpu = CachingAllocator(2**30); block = gpu.malloc(512); gpu.reset_accumulated_stats()
        >>> gpu.memory_stats()["allocation.all.allocated"]
        0
        """
        self.stats_at_reset = statistics.accumulated(self)

    def memory_stats(self) -> dict[str, int]:
        """What torch.cuda.memory_stats() says, key for key.

        >>> gpu = CachingAllocator(2**30); block = gpu.malloc(700)
        >>> gpu.memory_stats()["requested_bytes.all.current"]
        700
        """
        return statistics.memory_stats(self)

    def snapshot(self) -> list[statistics.SegmentInfo]:
        """What torch.cuda.memory_snapshot() says of segments and blocks, without stack traces.

        >>> gpu = CachingAllocator(2**30); block = gpu.malloc(700)
        >>> [(b["size"], b["state"]) for b in gpu.snapshot()[0]["blocks"]]
        [(1024, 'active_allocated'), (2096128, 'inactive')]
        """
        return statistics.snapshot(self)

    def _split(self, block: Block, rounded: int, rest: int, pool: Pool, free_list: FreeList) -> None:
        after = block.next
        remainder = Block(block.address + rounded, rest, block.stream, block.segment_id, pool)
        remainder.prev = block
        remainder.next = after
        remainder.born = pool.searches
        if after is not None:
            after.prev = remainder
        block.next = remainder
        block.size = rounded
        free_list.add(remainder)
        if not self._counts_inactive:
            return
        if after is not None or block.prev is not None:
            self.inactive_bytes -= rounded
            pool.inactive_bytes -= rounded
        else:
            self.count_inactive(pool, 1, rest)


def _no_block(size: int, stream: int) -> Block:
    if size < 0:
        raise ValueError(f"a size of at least 0 is needed, not {size}")
    return Block(0, 0, stream, 0)
