"""`CachingAllocator`: an exact model of PyTorch's CUDACachingAllocator.

`malloc` and `free` are written out in full, because a training run calls them hundreds of thousands of times. Rare
cases are separate: new segments and failed requests in the methods below, expandable segments in `expandable.py`, pools
of CUDA graphs in `private_pools.py`, reports in `statistics.py`. Callers report with `free_later` and `free_now` when
streams have finished.
"""

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from ullage.allocator import expandable, statistics
from ullage.allocator.blocks import (
    ADDRESS_BITS,
    ALLOC,
    FREE,
    FREE_COMPLETED,
    FREE_REQUESTED,
    IN_USE,
    MIN_BLOCK_SIZE,
    SEGMENT_ALLOC,
    SEGMENT_FREE,
    SMALL_SIZE,
    UNLIMITED,
    Block,
    FreeList,
    Pool,
    block_size,
    segment_size,
)
from ullage.allocator.config import AllocatorConfig
from ullage.allocator.private_pools import NO_POOL, STREAM_BITS, PoolId, PrivatePools, stream_of
from ullage.allocator.segments import Driver, Segments
from ullage.units import GIB, KIB, MIB


@dataclass(eq=False)
class OutOfMemory(RuntimeError):
    """Raised by `malloc` when PyTorch would raise torch.OutOfMemoryError. All numbers are bytes."""

    requested: int
    rounded: int  # size of the block that the request needs
    segment_size: int  # requested from the driver
    allowed: int | None  # the limit set by a memory fraction; None without one
    reserved: int
    allocated: int
    device_free: int
    device_total: int

    def __str__(self) -> str:
        return self.message()

    def message(self, device: int = 0, process: str = "") -> str:
        """Return PyTorch's message. ``process`` is the part about processes on the GPU, which needs NVML."""
        allowed = "" if self.allowed is None else f"{format_size(self.allowed)} allowed; "
        return (
            f"CUDA out of memory. Tried to allocate {format_size(self.segment_size)}. "
            f"GPU {device} has a total capacity of {format_size(self.device_total)} "
            f"of which {format_size(self.device_free)} is free. {process}{allowed}"
            f"Of the allocated memory {format_size(self.allocated)} is allocated by PyTorch, "
            f"and {format_size(self.reserved - self.allocated)} is reserved by PyTorch but unallocated. "
            "If reserved but unallocated memory is large try setting "
            "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation.  "
            "See documentation for Memory Management  "
            "(https://docs.pytorch.org/docs/stable/notes/cuda.html"
            "#optimizing-memory-usage-with-pytorch-cuda-alloc-conf)"
        )


def format_size(size: int) -> str:
    """Print bytes as PyTorch's messages do (c10's format_size)."""
    if size <= 1024:
        return f"{size} bytes"
    for unit, name in ((KIB, "KiB"), (MIB, "MiB")):
        if size <= unit * 1024:
            return f"{size / unit:.2f} {name}"
    return f"{size / GIB:.2f} GiB"


DEFAULT_CONFIG: Final = AllocatorConfig()


class CachingAllocator(Segments):
    """PyTorch's caching allocator for one device.

    ``capacity`` is the memory that the driver can still give (the card less the CUDA context), ``total_memory`` the
    card, to which a memory fraction applies. ``segment_address`` maps the size of a new segment to its address (below
    2**48); without it addresses imitate cudaMalloc's, see `AddressSpace`. ``driver`` provides every segment if
    processes share the card. ``on_event`` is called with (action, address, size), also for each segment or page of one.
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
            raise ValueError(f"capacity must be 0 to {total_memory} (the total memory), got {capacity}")
        grows = config.expandable_segments
        self._small: Final = Pool("small_pool", MIN_BLOCK_SIZE)
        self._large: Final = Pool(
            "large_pool", MIN_BLOCK_SIZE if grows else SMALL_SIZE + 1, UNLIMITED if grows else config.max_split_size
        )
        super().__init__(self._small, self._large, capacity, total_memory, config, segment_address, driver)
        self.private: Final = PrivatePools()
        self._diverted = self.private.underway
        self._rounds_to_512 = max(config.roundup_power2_divisions) <= 1
        self._max_split = config.max_split_size
        # PyTorch leaves expandable segments out of inactive_split: their free pages can always go.
        self._counts_inactive = not grows
        self.allowed: int | None = None
        self.collects_garbage = False
        self._plain_search = False
        self.set_memory_fraction(config.memory_fraction)

    def set_memory_fraction(self, fraction: float) -> None:
        """Limit reserved memory to a fraction of the card, as torch.cuda.set_per_process_memory_fraction()."""
        if not 0.0 <= fraction <= 1.0:
            raise ValueError(f"fraction must be from 0 to 1, got {fraction:g}")
        self.allowed = int(fraction * self.total_memory) if fraction < 1.0 else None
        self.collects_garbage = self.allowed is not None and self.config.garbage_collection_threshold > 0.0
        self._plain_search = not (
            self.collects_garbage or self.config.expandable_segments or self._max_split != UNLIMITED
        )

    def malloc(self, size: int, stream: int = 0) -> Block:
        """Allocate bytes for use on a stream, or raise OutOfMemory. As in PyTorch, 0 bytes are no allocation: address
        0."""
        if size < 0:
            raise ValueError(f"size must be at least 0, got {size}")
        if size == 0:
            return Block(0, 0, stream, 0)
        if self._diverted:
            stream = self.private.lane(stream)
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
                block = self._obtain(size, rounded, pool, free_list, stream)
        else:
            cached = self._take_cached(rounded, pool, free_list)
            block = cached or self._obtain(size, rounded, pool, free_list, stream)
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
        """Return a block to the cache, where it merges with free neighbours."""
        pool = block.pool
        if pool is None:
            return
        if block.state != IN_USE:
            raise ValueError(f"block must be in use, got {block!r}")
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

    def free_later(self, block: Block) -> None:
        """Count a block as free although another stream still uses it (`record_stream`)."""
        self._count_free(block, 1)

    def free_now(self, block: Block) -> None:
        self._count_free(block, -1)
        self.free(block)

    def _count_free(self, block: Block, times: int) -> None:
        pool = block.pool
        assert pool is not None
        pool.count_out += times
        pool.allocated_out += times * block.size
        pool.requested_out += times * block.requested
        self.count -= times
        self.allocated -= times * block.size
        self.requested -= times * block.requested

    def largest_cached_block(self) -> int:
        lists = [free_list for pool in (self._small, self._large) for free_list in pool.by_stream.values()]
        return max((block.size for free_list in lists for block in free_list.blocks[-1:]), default=0)

    def reset_accumulated_stats(self) -> None:
        """Reset all totals to zero, as torch.cuda.reset_accumulated_memory_stats()."""
        self.stats_at_reset = statistics.accumulated(self, self.config.max_split_size)

    def memory_stats(self) -> dict[str, int]:
        return statistics.memory_stats(self, self.config.max_split_size)

    def snapshot(self) -> list[dict[str, Any]]:
        segments = statistics.snapshot(self.heads.values(), expandable=self.config.expandable_segments)
        for segment in segments:
            lane = segment["stream"]
            segment["stream"], segment["segment_pool_id"] = stream_of(lane), self.private.pool_of(lane)
        return segments

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

    def _take_cached(self, rounded: int, pool: Pool, free_list: FreeList) -> Block | None:
        """Search the cache with all options: ages, expandable segments, blocks that must stay whole."""
        if self.collects_garbage:
            pool.searches += 1
        blocks = free_list.blocks
        index = free_list.first_at_least(rounded)
        if index == len(blocks):
            return None
        config = self.config
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

    def _obtain(self, size: int, rounded: int, pool: Pool, free_list: FreeList, stream: int) -> Block:
        """Get a block from the driver, if necessary after returning cached memory."""
        if self.collects_garbage:
            self._collect_garbage()
        wanted = segment_size(rounded, self.config.large_segment_size)
        block = self._grow(wanted, rounded, pool, free_list, stream)
        if block is None and self._release_oversize_blocks(free_list, rounded):
            block = self._grow(wanted, rounded, pool, free_list, stream)
        if block is None and not self._diverted:
            self.empty_cache()
            self.num_alloc_retries += 1
            block = self._grow(wanted, rounded, pool, free_list, stream)
        if block is None:
            self.num_ooms += 1
            own = self.allowed, self.reserved, self.allocated
            raise OutOfMemory(size, rounded, wanted, *own, self.free_on_card(), self.total_memory)
        return block

    def _grow(self, wanted: int, rounded: int, pool: Pool, free_list: FreeList, stream: int) -> Block | None:
        if self.allowed is not None and self.reserved + wanted > self.allowed:
            return None
        if self.config.expandable_segments:
            return expandable.allocate(self, rounded, pool, free_list, stream)
        if not self.can_take(wanted):
            return None
        block = self.new_segment(wanted, stream, pool, FREE)
        self.count_reserved(pool, wanted, segments=1)
        if wanted >= self.config.max_split_size:
            self.oversize_segments.add(1)
        if self.on_event is not None:
            self.on_event(SEGMENT_ALLOC, block.address, wanted)
        return block

    def release_segment(self, block: Block) -> None:
        """Return a wholly free segment to the driver (PyTorch's release_block)."""
        pool = block.pool
        assert pool is not None
        pool.by_stream[block.stream].remove(block)
        self.drop_segment(block)
        self.count_reserved(pool, -block.size, segments=-1)
        self.give_back(block.size)
        if block.size >= self.config.max_split_size:
            self.oversize_segments.add(-1)
        if self.on_event is not None:
            self.on_event(SEGMENT_FREE, block.address, block.size)

    def empty_cache(self, only: PoolId = NO_POOL) -> None:
        """Return all wholly free segments and pages to the driver, the large pool's first, or those of one pool.

        While a CUDA graph is captured only private pools without users give anything back.
        """
        self.num_sync_all_streams += 1
        for pool in reversed(self.pools):
            for block in pool.free_blocks():
                if not self.private.may_be_emptied(block.stream, only):
                    continue
                if self.config.expandable_segments:
                    expandable.unmap(self, block)
                elif not block.is_split:
                    self.release_segment(block)

    def _release_oversize_blocks(self, free_list: FreeList, rounded: int) -> bool:
        """Give the driver one unsplittable block that is large enough, or else the largest ones until their sum is.
        Return whether that was enough (PyTorch's release_available_cached_blocks)."""
        limit = self.config.max_split_size
        if limit == UNLIMITED or self.config.expandable_segments:
            # PyTorch skips the blocks of expandable segments here, and there are no others then.
            return False
        needed = max(rounded, limit)
        index = free_list.first_at_least(needed)
        if index < len(free_list.blocks):
            self.release_segment(free_list.blocks[index])
            return True
        released = 0
        while released < needed and free_list.blocks and free_list.blocks[-1].size >= limit:
            largest = free_list.blocks[-1]
            released += largest.size
            self.release_segment(largest)
        return released >= needed

    def _collect_garbage(self) -> None:
        """Return cached segments of the large pool to the driver until reserved memory is at most
        garbage_collection_threshold: in each round, those that have seen at least the average number of searches."""
        assert self.allowed is not None
        threshold = int(self.config.garbage_collection_threshold * self.allowed)
        # The blocks of expandable segments are never collected, and there are no others then.
        if self.reserved <= threshold or self.config.expandable_segments:
            return
        target = self.reserved - threshold
        large = self.pools[1]
        candidates = [block for block in large.free_blocks() if not block.is_split and not block.stream >> STREAM_BITS]
        reclaimed = 0
        while candidates and reclaimed < target:
            average_age = sum(large.searches - block.born for block in candidates) / len(candidates)
            old = [block for block in candidates if large.searches - block.born >= average_age]
            candidates = [block for block in candidates if large.searches - block.born < average_age]
            for block in old:
                reclaimed += block.size
                self.release_segment(block)
