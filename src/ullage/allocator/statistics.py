"""What torch.cuda.memory_stats() and torch.cuda.memory_snapshot() say, from the allocator's counters."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, TypedDict

from .block import IN_USE, UNMAPPED, Block, Pool
from .constants import UNLIMITED
from .counters import Row

if TYPE_CHECKING:
    from .caching import CachingAllocator


class BlockInfo(TypedDict):
    """A block in a snapshot, with the keys of torch.cuda.memory_snapshot()."""

    address: int
    size: int
    requested_size: int
    state: str


class SegmentInfo(TypedDict):
    """A segment in a snapshot, with the keys of torch.cuda.memory_snapshot()."""

    address: int
    total_size: int
    allocated_size: int
    active_size: int
    requested_size: int
    stream: int
    segment_type: str
    is_expandable: bool
    blocks: list[BlockInfo]


def memory_stats(allocator: CachingAllocator) -> dict[str, int]:
    """The flat dictionary of torch.cuda.memory_stats(), sorted by key as there.

    >>> from ullage.allocator import CachingAllocator
    >>> memory_stats(CachingAllocator(2**30))["max_split_size"]
    -1
    """
    stats = raw_stats(allocator)
    for key, at_reset in allocator.stats_at_reset.items():
        stats[key] -= at_reset
    return dict(sorted(stats.items()))


def accumulated(allocator: CachingAllocator) -> dict[str, int]:
    """The entries that reset_accumulated_memory_stats() sets to zero, as they are now.

    >>> from ullage.allocator import CachingAllocator
    >>> accumulated(CachingAllocator(2**30))["num_ooms"]
    0
    """
    return {
        key: value
        for key, value in raw_stats(allocator).items()
        if key.endswith((".allocated", ".freed")) or key.startswith("num_")
    }


def raw_stats(allocator: CachingAllocator) -> dict[str, int]:
    """Like ``memory_stats``, but counted from the allocator's beginning and in no order."""
    stats: dict[str, int] = {}
    for name, (current, peak, total) in _rows(allocator):
        stats[f"{name}.current"] = current
        stats[f"{name}.peak"] = peak
        stats[f"{name}.allocated"] = total
        stats[f"{name}.freed"] = total - current
    stats["num_alloc_retries"] = allocator.num_alloc_retries
    stats["num_ooms"] = allocator.num_ooms
    stats["num_sync_all_streams"] = allocator.num_sync_all_streams
    stats["num_device_alloc"] = allocator.num_device_alloc
    stats["num_device_free"] = allocator.num_device_free
    # An allocation refused before cudaMalloc is tried: only with throw_on_cudamalloc_oom, not modelled.
    stats["num_oom_rejections"] = 0
    limit = allocator.config.max_split_size
    stats["max_split_size"] = -1 if limit == UNLIMITED else limit
    return stats


def _rows(allocator: CachingAllocator) -> Iterator[tuple[str, Row]]:
    pools = allocator.pools
    everything = _rows_of_all(allocator)
    for index, pool in enumerate(pools):
        for name, row in _rows_of_pool(pool).items():
            yield f"{name}.{pool.name}", row
            total = row[2] if index == 0 else everything[name][2] + row[2]
            everything[name] = (*everything[name][:2], total)
    for name, row in everything.items():
        yield f"{name}.all", row
    yield "oversize_allocations", allocator.oversize_allocations.row
    yield "oversize_segments", allocator.oversize_segments.row


def _rows_of_pool(pool: Pool) -> dict[str, Row]:
    count = (pool.count_in - pool.count_out, pool.peak_count, pool.count_in)
    in_use = (pool.allocated_in - pool.allocated_out, pool.peak_allocated, pool.allocated_in)
    # Without record_stream a block is active exactly while it is allocated.
    return {
        "allocation": count,
        "active": count,
        "allocated_bytes": in_use,
        "active_bytes": in_use,
        "requested_bytes": (pool.requested_in - pool.requested_out, pool.peak_requested, pool.requested_in),
        "inactive_split": (pool.inactive_count, pool.peak_inactive_count, pool.inactive_count_in),
        "inactive_split_bytes": (pool.inactive_bytes, pool.peak_inactive_bytes, pool.inactive_bytes_in),
        "segment": (pool.segments, pool.peak_segments, pool.segments_in),
        "reserved_bytes": (pool.reserved, pool.peak_reserved, pool.reserved_in),
    }


def _rows_of_all(allocator: CachingAllocator) -> dict[str, Row]:
    """Both pools together: current values and peaks; the totals are the sums over the pools."""
    count = (allocator.count, allocator.peak_count, 0)
    in_use = (allocator.allocated, allocator.peak_allocated, 0)
    return {
        "allocation": count,
        "active": count,
        "allocated_bytes": in_use,
        "active_bytes": in_use,
        "requested_bytes": (allocator.requested, allocator.peak_requested, 0),
        "inactive_split": (allocator.inactive_count, allocator.peak_inactive_count, 0),
        "inactive_split_bytes": (allocator.inactive_bytes, allocator.peak_inactive_bytes, 0),
        "segment": (allocator.segments, allocator.peak_segments, 0),
        "reserved_bytes": (allocator.reserved, allocator.peak_reserved, 0),
    }


def snapshot(allocator: CachingAllocator) -> list[SegmentInfo]:
    """All segments by address, each with its blocks; an expandable one as its contiguous mapped ranges.

    >>> from ullage.allocator import CachingAllocator
    >>> snapshot(CachingAllocator(2**30))
    []
    """
    segments: list[SegmentInfo] = []
    for head in allocator.heads.values():
        current: SegmentInfo | None = None
        block: Block | None = head
        while block is not None:
            if block.state == UNMAPPED:
                current = None
            else:
                if current is None:
                    current = _empty_segment(block, expandable=allocator.config.expandable_segments)
                    segments.append(current)
                _append_block(current, block)
            block = block.next
    return sorted(segments, key=lambda segment: segment["address"])


def _empty_segment(head: Block, *, expandable: bool) -> SegmentInfo:
    assert head.pool is not None
    return {
        "address": head.address,
        "total_size": 0,
        "allocated_size": 0,
        "active_size": 0,
        "requested_size": 0,
        "stream": head.stream,
        "segment_type": head.pool.name.removesuffix("_pool"),
        "is_expandable": expandable,
        "blocks": [],
    }


def _append_block(segment: SegmentInfo, block: Block) -> None:
    in_use = block.state == IN_USE
    segment["total_size"] += block.size
    if in_use:
        segment["allocated_size"] += block.size
        segment["active_size"] += block.size
        segment["requested_size"] += block.requested
    segment["blocks"].append(
        {
            "address": block.address,
            "size": block.size,
            "requested_size": block.requested,
            "state": "active_allocated" if in_use else "inactive",
        }
    )
