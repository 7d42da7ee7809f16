"""What the allocator counts, and the peaks of it."""

from __future__ import annotations

from typing import Final

from .block import Pool

# One row of memory_stats(): what is there now, the most there was, and all that was ever added.
Row = tuple[int, int, int]


class Tally:
    """A quantity that changes rarely: its current value, its peak and the sum of its increases.

    >>> tally = Tally(); tally.add(3); tally.add(-1); tally.row
    (2, 3, 3)
    """

    __slots__ = ("current", "peak", "total")

    def __init__(self) -> None:
        self.current = self.peak = self.total = 0

    def add(self, amount: int) -> None:
        """Change the value; a negative amount is a decrease."""
        self.current += amount
        if amount > 0:
            self.total += amount
            self.peak = max(self.peak, self.current)

    @property
    def row(self) -> Row:
        """Current, peak and total."""
        return self.current, self.peak, self.total


class Counters:
    """The counters of both pools together; those of each pool are in Pool.

    Plain integers, because malloc and free change them at every call.

    >>> counters = Counters(Pool("small_pool", 512), Pool("large_pool", 512))
    >>> counters.count_reserved(counters.pools[0], 2097152, segments=1); counters.peak_reserved
    2097152
    """

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
        self.reserved += change
        pool.reserved += change
        self.segments += segments
        pool.segments += segments
        if change > 0:
            self.num_device_alloc += 1
            pool.reserved_in += change
            pool.segments_in += segments
            self.peak_reserved = max(self.peak_reserved, self.reserved)
            pool.peak_reserved = max(pool.peak_reserved, pool.reserved)
            self.peak_segments = max(self.peak_segments, self.segments)
            pool.peak_segments = max(pool.peak_segments, pool.segments)
        else:
            self.num_device_free += 1

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

    def reset_peaks(self) -> None:
        """Set every peak to its current value."""
        self.peak_allocated = self.allocated
        self.peak_requested = self.requested
        self.peak_reserved = self.reserved
        self.peak_count = self.count
        self.peak_segments = self.segments
        self.peak_inactive_count = self.inactive_count
        self.peak_inactive_bytes = self.inactive_bytes
        for tally in (self.oversize_allocations, self.oversize_segments):
            tally.peak = tally.current
        for pool in self.pools:
            pool.peak_allocated = pool.allocated_in - pool.allocated_out
            pool.peak_requested = pool.requested_in - pool.requested_out
            pool.peak_count = pool.count_in - pool.count_out
            pool.peak_reserved = pool.reserved
            pool.peak_segments = pool.segments
            pool.peak_inactive_count = pool.inactive_count
            pool.peak_inactive_bytes = pool.inactive_bytes
