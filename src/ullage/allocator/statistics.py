"""`torch.cuda.memory_stats()` and `torch.cuda.memory_snapshot()`, computed from the allocator's counters."""

from collections.abc import Iterable
from itertools import groupby
from typing import Any, Final

from ullage.allocator.blocks import UNLIMITED, UNMAPPED, Block, Pool, blocks_from

# One row of memory_stats(): the current value, its peak, and the sum of its increases.
Row = tuple[int, int, int]


class Tally:
    """A quantity that changes rarely: its current value, its peak and the sum of its increases."""

    __slots__ = ("current", "peak", "total")

    def __init__(self) -> None:
        self.current = self.peak = self.total = 0

    def add(self, amount: int) -> None:
        self.current += amount
        if amount > 0:
            self.total += amount
            self.peak = max(self.peak, self.current)

    @property
    def row(self) -> Row:
        return self.current, self.peak, self.total


class Counters:
    """The counters of both pools together, as plain integers: malloc and free change them at every call."""

    def __init__(self, small: Pool, large: Pool) -> None:
        self.pools: Final = (small, large)
        self.allocated = self.peak_allocated = 0
        self.requested = self.peak_requested = 0
        self.reserved = self.peak_reserved = 0
        self.count = self.peak_count = 0
        self.segments = self.peak_segments = 0
        self.inactive_count = self.peak_inactive_count = 0
        self.inactive_bytes = self.peak_inactive_bytes = 0
        self.oversize_allocations = Tally()
        self.oversize_segments = Tally()
        self.num_alloc_retries = self.num_ooms = self.num_sync_all_streams = 0
        self.num_device_alloc = self.num_device_free = 0
        self.stats_at_reset: dict[str, int] = {}

    def count_reserved(self, pool: Pool, change: int, segments: int = 0) -> None:
        """Count memory taken from the driver or, negative, given back."""
        self.num_device_alloc += change > 0
        self.num_device_free += change <= 0
        pool.reserved_in += max(0, change)
        pool.segments_in += max(0, segments)
        for counted in (self, pool):
            counted.reserved += change
            counted.segments += segments
            counted.peak_reserved = max(counted.peak_reserved, counted.reserved)
            counted.peak_segments = max(counted.peak_segments, counted.segments)

    def count_inactive(self, pool: Pool, count: int, size: int) -> None:
        """Count a change of the free blocks that are only a part of their segment."""
        self.inactive_count += count
        pool.inactive_count += count
        self.inactive_bytes += size
        pool.inactive_bytes += size
        if count > 0:
            pool.inactive_count_in += count
            if self.inactive_count > self.peak_inactive_count:
                self.peak_inactive_count = self.inactive_count
            if pool.inactive_count > pool.peak_inactive_count:
                pool.peak_inactive_count = pool.inactive_count
        if size > 0:
            pool.inactive_bytes_in += size
            if self.inactive_bytes > self.peak_inactive_bytes:
                self.peak_inactive_bytes = self.inactive_bytes
            if pool.inactive_bytes > pool.peak_inactive_bytes:
                pool.peak_inactive_bytes = pool.inactive_bytes

    def reset_peak_stats(self) -> None:
        for one in (self, *self.pools):
            for counted in set(_ROWS.values()):
                setattr(one, f"peak_{counted}", getattr(one, counted))
        for tally in (self.oversize_allocations, self.oversize_segments):
            tally.peak = tally.current


def memory_stats(counters: Counters, max_split_size: int) -> dict[str, int]:
    """Return the flat dictionary of torch.cuda.memory_stats(), sorted by key as there."""
    stats = raw_stats(counters, max_split_size)
    for key, at_reset in counters.stats_at_reset.items():
        stats[key] -= at_reset
    return dict(sorted(stats.items()))


def accumulated(counters: Counters, max_split_size: int) -> dict[str, int]:
    """Return the current entries that reset_accumulated_memory_stats() sets to zero."""
    return {
        key: value
        for key, value in raw_stats(counters, max_split_size).items()
        if key.endswith((".allocated", ".freed")) or key.startswith("num_")
    }


def raw_stats(counters: Counters, max_split_size: int) -> dict[str, int]:
    """Return ``memory_stats``, but unsorted and counted from the allocator's creation."""
    stats: dict[str, int] = {}
    for name, (current, peak, total) in _rows(counters).items():
        stats[f"{name}.current"] = current
        stats[f"{name}.peak"] = peak
        stats[f"{name}.allocated"] = total
        stats[f"{name}.freed"] = total - current
    for name in ("alloc_retries", "ooms", "sync_all_streams", "device_alloc", "device_free"):
        stats[f"num_{name}"] = getattr(counters, f"num_{name}")
    # An allocation refused before cudaMalloc is tried: only with throw_on_cudamalloc_oom, not modelled.
    stats["num_oom_rejections"] = 0
    stats["max_split_size"] = -1 if max_split_size == UNLIMITED else max_split_size
    return stats


# Names in memory_stats(), and the attributes of `Counters` and `Pool`. Without record_stream a block is active exactly
# while it is allocated.
_ROWS = {
    "allocation": "count",
    "active": "count",
    "allocated_bytes": "allocated",
    "active_bytes": "allocated",
    "requested_bytes": "requested",
    "inactive_split": "inactive_count",
    "inactive_split_bytes": "inactive_bytes",
    "segment": "segments",
    "reserved_bytes": "reserved",
}


def _rows(counters: Counters) -> dict[str, Row]:
    rows = {name: getattr(counters, name).row for name in ("oversize_allocations", "oversize_segments")}
    for name, counted in _ROWS.items():
        totals = {pool.name: getattr(pool, f"{counted}_in") for pool in counters.pools}
        totals["all"] = sum(totals.values())
        for one, (part, total) in zip((*counters.pools, counters), totals.items(), strict=True):
            rows[f"{name}.{part}"] = getattr(one, counted), getattr(one, f"peak_{counted}"), total
    return rows


def snapshot(heads: Iterable[Block], *, expandable: bool) -> list[dict[str, Any]]:
    """Return all segments by address, each with its blocks; an expandable one as its contiguous mapped ranges."""
    segments = [
        _segment(list(blocks), expandable=expandable)
        for head in heads
        for mapped, blocks in groupby(blocks_from(head), key=lambda block: block.state != UNMAPPED)
        if mapped
    ]
    return sorted(segments, key=lambda segment: segment["address"])


def _segment(blocks: list[Block], *, expandable: bool) -> dict[str, Any]:
    head, in_use = blocks[0], [block for block in blocks if block.allocated]
    assert head.pool is not None
    allocated = sum(block.size for block in in_use)
    return {
        "address": head.address,
        "total_size": sum(block.size for block in blocks),
        "allocated_size": allocated,
        "active_size": allocated,
        "requested_size": sum(block.requested for block in in_use),
        "stream": head.stream,
        "segment_pool_id": (0, 0),
        "segment_type": head.pool.name.removesuffix("_pool"),
        "is_expandable": expandable,
        "blocks": [
            {
                "address": block.address,
                "size": block.size,
                "requested_size": block.requested,
                "state": "active_allocated" if block.allocated else "inactive",
            }
            for block in blocks
        ],
    }
