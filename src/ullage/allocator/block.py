"""Blocks, the sorted lists of free ones, and the two pools that hold them.

Two deviations from PyTorch's bookkeeping that change no result: a split hands out the object at the front
and makes a new one for the rest, and a merge keeps the object with the lower address. So the first block of a
segment stays one object for the segment's life, and a snapshot needs no set of blocks in use.
"""

from __future__ import annotations

from bisect import bisect_left

from .constants import ADDRESS_BITS, UNLIMITED

FREE, IN_USE, UNMAPPED = 0, 1, 2


class Block:
    """A piece of a segment: what ``malloc`` hands out and ``free`` takes back.

    After ``free`` the object belongs to the allocator again: its numbers may change at any later call.

    >>> Block(0, 1024, 0, 1).size
    1024
    """

    __slots__ = (
        "address",
        "born",
        "key",
        "next",
        "pool",
        "prev",
        "requested",
        "segment_id",
        "size",
        "state",
        "stream",
    )

    def __init__(
        self,
        address: int,
        size: int,
        stream: int,
        segment_id: int,
        pool: Pool | None = None,
        state: int = FREE,
    ) -> None:
        self.address = address
        self.size = size
        self.stream = stream
        self.segment_id = segment_id
        self.pool = pool
        self.state = state
        self.requested = 0
        self.prev: Block | None = None
        self.next: Block | None = None
        self.key = 0  # where a free block stands in its FreeList
        self.born = 0  # the pool's count of searches when the block became free: its age under collection

    @property
    def allocated(self) -> bool:
        """Whether the block is handed out.

        >>> Block(0, 1024, 0, 1).allocated
        False
        """
        return self.state == IN_USE

    @property
    def is_split(self) -> bool:
        """Whether the block is only a part of its segment.

        >>> Block(0, 1024, 0, 1).is_split
        False
        """
        return self.prev is not None or self.next is not None

    def __repr__(self) -> str:
        state = ("free", "in use", "unmapped")[self.state]
        return f"Block(address={self.address:#x}, size={self.size}, stream={self.stream}, {state})"


class FreeList:
    """The free blocks of one pool and stream, sorted by (size, address).

    >>> free = FreeList(); free.add(Block(4096, 1024, 0, 1)); free.add(Block(0, 512, 0, 1))
    >>> [block.size for block in free.blocks]
    [512, 1024]
    """

    __slots__ = ("blocks", "keys", "unmapped")

    def __init__(self) -> None:
        self.keys: list[int] = []
        self.blocks: list[Block] = []
        self.unmapped: list[Block] = []  # of expandable segments, sorted by address

    def add(self, block: Block) -> None:
        """Insert a free block."""
        block.key = key = block.size << ADDRESS_BITS | block.address
        index = bisect_left(self.keys, key)
        self.keys.insert(index, key)
        self.blocks.insert(index, block)

    def remove(self, block: Block) -> None:
        """Take a block out; it must not have changed since it was added."""
        index = bisect_left(self.keys, block.key)
        del self.keys[index]
        del self.blocks[index]

    def first_at_least(self, size: int) -> int:
        """The index of the best fit, or the length of the list where nothing fits."""
        return bisect_left(self.keys, size << ADDRESS_BITS)

    def add_unmapped(self, block: Block) -> None:
        """Insert a range of addresses without memory behind it."""
        addresses = [other.address for other in self.unmapped]
        self.unmapped.insert(bisect_left(addresses, block.address), block)


class Pool:
    """The small or the large pool: free blocks by stream, and everything that is counted by pool.

    Counts and bytes in use are kept as two running totals (in and out), their difference is what is in use.

    >>> Pool("small_pool", 512).free_list(0).blocks
    []
    """

    __slots__ = (
        "allocated_in",
        "allocated_out",
        "by_stream",
        "count_in",
        "count_out",
        "inactive_bytes",
        "inactive_bytes_in",
        "inactive_count",
        "inactive_count_in",
        "name",
        "peak_allocated",
        "peak_count",
        "peak_inactive_bytes",
        "peak_inactive_count",
        "peak_requested",
        "peak_reserved",
        "peak_segments",
        "requested_in",
        "requested_out",
        "reserved",
        "reserved_in",
        "searches",
        "segments",
        "segments_in",
        "smallest_remainder",
        "split_below",
    )

    def __init__(self, name: str, smallest_remainder: int, split_below: int = UNLIMITED) -> None:
        self.name = name
        self.smallest_remainder = smallest_remainder  # a smaller rest stays part of the block
        self.split_below = split_below  # a request of this size or more gets a whole block
        self.by_stream: dict[int, FreeList] = {}
        self.searches = 0
        self.count_in = self.count_out = self.peak_count = 0
        self.allocated_in = self.allocated_out = self.peak_allocated = 0
        self.requested_in = self.requested_out = self.peak_requested = 0
        self.inactive_count = self.inactive_count_in = self.peak_inactive_count = 0
        self.inactive_bytes = self.inactive_bytes_in = self.peak_inactive_bytes = 0
        self.segments = self.segments_in = self.peak_segments = 0
        self.reserved = self.reserved_in = self.peak_reserved = 0

    def free_list(self, stream: int) -> FreeList:
        """The list of a stream, made at its first use."""
        return self.by_stream.setdefault(stream, FreeList())

    def free_blocks(self) -> list[Block]:
        """All free blocks in PyTorch's order: by stream, size and address."""
        return [block for stream in sorted(self.by_stream) for block in self.by_stream[stream].blocks]
