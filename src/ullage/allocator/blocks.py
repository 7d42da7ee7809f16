"""Blocks of the allocator, the pools of free blocks, PyTorch's constants, and the addresses of segments.

Unlike in PyTorch, a split returns the object at the front, and a merge keeps the one with the lower address: so the
first block of a segment stays the same object, and a snapshot needs no set of blocks in use.
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from typing import Final

from ullage.units import MIB, round_up

# Constants of PyTorch's CUDA caching allocator, each with its name there. PyTorch 2.6 to 2.13 agree on all of them.

# c10/core/AllocatorConfig.h (before 2.9: c10/cuda/CUDACachingAllocator.cpp)
MIN_BLOCK_SIZE: Final = 512  # kMinBlockSize: every size is a multiple of it
SMALL_SIZE: Final = 1 * MIB  # kSmallSize: the largest request that the small pool serves
SMALL_BUFFER: Final = 2 * MIB  # kSmallBuffer: a segment of the small pool
LARGE_BUFFER: Final = 20 * MIB  # kLargeBuffer, since 2.10 large_segment_size_: a segment shared by requests
MIN_LARGE_ALLOC: Final = 10 * MIB  # kMinLargeAlloc: from here on a request gets a segment of its own
ROUND_LARGE: Final = 2 * MIB  # kRoundLarge: such a segment is a multiple of it

# c10/core/AllocatorConfig.cpp: roundup_power2_divisions is a table over powers of two, 1 MiB to 64 GiB
ROUNDUP_INTERVALS: Final = 16  # kRoundUpPowerOfTwoIntervals
ROUNDUP_START: Final = 1 * MIB  # kRoundUpPowerOfTwoStart

# c10/core/AllocatorConfig.h: std::numeric_limits<size_t>::max(), "any block may be split"
UNLIMITED: Final = 2**64 - 1

# c10/cuda/CUDACachingAllocator.cpp, ExpandableSegment: address space reserved is 1 1/8 of the card's memory
EXPANDABLE_EXTRA_DIVISOR: Final = 8

# Not PyTorch's: cudaMalloc hands out address space in units of 32 MiB (seen on an H200, driver 580.159)
ADDRESS_UNIT: Final = 32 * MIB
# Not PyTorch's: CUDA's unified addresses fit in 48 bits, so (size, address) packs into one integer key
ADDRESS_BITS: Final = 48
# Not PyTorch's: the highest imitated address; real ones are near 0x7f0000000000
HIGHEST_ADDRESS: Final = 1 << 47

# Not PyTorch's: bytes of a card "without limit". Addresses have 47 bits, and expandable segments set aside several
# times the card
NO_LIMIT: Final = 1 << 44

# The actions of allocator histories, numbered as in recorded ones (PyTorch names them, see TraceEntry)
ALLOC: Final = 0
FREE_REQUESTED: Final = 1
FREE_COMPLETED: Final = 2
SEGMENT_ALLOC: Final = 3
SEGMENT_FREE: Final = 4


FREE, IN_USE, UNMAPPED = 0, 1, 2


class Block:
    """A piece of a segment. After ``free`` it belongs to the allocator again: its numbers may change at any call."""

    __slots__ = (
        "address",
        "size",
        "stream",
        "segment_id",
        "pool",
        "state",
        "requested",
        "prev",
        "next",
        "key",
        "born",
    )

    def __init__(
        self, address: int, size: int, stream: int, segment_id: int, pool: "Pool | None" = None, state: int = FREE
    ) -> None:
        self.address, self.size, self.stream, self.segment_id = address, size, stream, segment_id
        self.pool, self.state = pool, state
        self.requested = 0
        self.prev: Block | None = None
        self.next: Block | None = None
        self.key = 0  # the sort key of a free block in its FreeList
        self.born = 0  # the pool's count of searches when the block became free: its age under collection

    @property
    def allocated(self) -> bool:
        return self.state == IN_USE

    @property
    def is_split(self) -> bool:
        """Return whether the block is only a part of its segment."""
        return self.prev is not None or self.next is not None

    def __repr__(self) -> str:
        state = ("free", "in use", "unmapped")[self.state]
        return f"Block(address={self.address:#x}, size={self.size}, stream={self.stream}, {state})"


class FreeList:
    """The free blocks of one pool and stream, sorted by (size, address)."""

    __slots__ = ("blocks", "keys", "unmapped")

    def __init__(self) -> None:
        self.keys: list[int] = []
        self.blocks: list[Block] = []
        self.unmapped: list[Block] = []  # of expandable segments, sorted by address

    def add(self, block: Block) -> None:
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
        """Return the index of the best fit; the length of the list if nothing fits."""
        return bisect_left(self.keys, size << ADDRESS_BITS)

    def add_unmapped(self, block: Block) -> None:
        addresses = [other.address for other in self.unmapped]
        self.unmapped.insert(bisect_left(addresses, block.address), block)


class Pool:
    """The small or the large pool: free blocks by stream, and counts, some as totals of additions and removals."""

    def __init__(self, name: str, smallest_remainder: int, split_below: int = UNLIMITED) -> None:
        self.name = name
        self.smallest_remainder = smallest_remainder  # a smaller remainder stays part of the block
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

    @property
    def count(self) -> int:
        return self.count_in - self.count_out

    @property
    def allocated(self) -> int:
        return self.allocated_in - self.allocated_out

    @property
    def requested(self) -> int:
        return self.requested_in - self.requested_out

    def free_list(self, stream: int) -> FreeList:
        return self.by_stream.setdefault(stream, FreeList())

    def free_blocks(self) -> list[Block]:
        """Return all free blocks in PyTorch's order: by stream, size and address."""
        return [block for stream in sorted(self.by_stream) for block in self.by_stream[stream].blocks]


def blocks_from(head: Block | None) -> Iterator[Block]:
    while head is not None:
        yield head
        head = head.next


# The bytes of a request's block, and of a new segment.

_FIRST_INTERVAL = ROUNDUP_START.bit_length() - 1


def block_size(size: int, divisions: Sequence[int]) -> int:
    """Return the size of the block that serves a request (PyTorch's round_size)."""
    if size < MIN_BLOCK_SIZE:
        return MIN_BLOCK_SIZE
    interval = min(max(size.bit_length() - 1 - _FIRST_INTERVAL, 0), ROUNDUP_INTERVALS - 1)
    parts = divisions[interval]
    if parts > 1 and size > MIN_BLOCK_SIZE * parts:
        # The step is at least 512 here, so that the result stays a multiple of 512.
        step = (1 << (size.bit_length() - 1)) // parts
        return round_up(size, step)
    return round_up(size, MIN_BLOCK_SIZE)


def segment_size(block: int, large_segment_size: int) -> int:
    """Return the size of the segment that the driver provides for a block (PyTorch's get_allocation_size)."""
    if block <= SMALL_SIZE:
        return SMALL_BUFFER
    if block < MIN_LARGE_ALLOC:
        return large_segment_size
    return round_up(block, ROUND_LARGE)


# The places of cudaMalloc's segments: a deterministic imitation.
#
# Addresses matter because best fit breaks ties between free blocks of one size by address. The rule was read
# off 27,291 segments in 243 histories recorded on one H200 (driver 580.159, PyTorch 2.11): the driver takes
# address space in units of 32 MiB, each new piece below the one before; a segment lies at the beginning of its
# piece, and the rest of the piece serves later segments that fit, newest piece first.
#
# The requests of those histories were replayed with addresses by different rules. The table has the histories in
# which all segments have the recorded sizes in the recorded order, and the worst error of peak reserved memory:
#
# rule                                                  segments equal   worst error
# this one                                              237 of 243       0.5%
# as this one, the rest served oldest piece first   211              3.3%
# as this one, best fit among the rests              207              3.3%
# each segment directly below the last                  209              4.4%
# each segment directly above the last                  160              17.3%
#
# Peak reserved memory is equal in the same 237. The others differ when libraries (cuBLAS, cuDNN, kernels as
# they load) take addresses too, which no history shows. No history returns segments, so the reuse of addresses
# is a guess: a wholly free piece is forgotten, and a new piece takes the highest room that fits it.

Span = tuple[int, int]  # begin and length


class AddressSpace:
    def __init__(self, top: int = HIGHEST_ADDRESS) -> None:
        self._pieces: dict[int, int] = {}  # the length of each by its begin
        self._gaps: dict[int, list[Span]] = {}  # the room left in each piece, oldest piece first
        self._holes: list[Span] = [(0, top)]  # room for new pieces, sorted

    def place(self, size: int) -> int:
        for piece in reversed(self._gaps):
            gaps = self._gaps[piece]
            for index, (start, length) in enumerate(gaps):
                if length >= size:
                    gaps[index : index + 1] = [(start + size, length - size)] if length > size else []
                    if not gaps:
                        del self._gaps[piece]
                    return start
        return self._new_piece(size)

    def release(self, address: int, size: int) -> None:
        piece = max(start for start in self._pieces if start <= address)
        gaps = _merged([*self._gaps.get(piece, []), (address, size)])
        if gaps == [(piece, self._pieces[piece])]:
            self._gaps.pop(piece, None)
            self._holes = _merged([*self._holes, (piece, self._pieces.pop(piece))])
        else:
            self._gaps[piece] = gaps

    def _new_piece(self, size: int) -> int:
        total = round_up(size, ADDRESS_UNIT)
        for index in reversed(range(len(self._holes))):
            start, length = self._holes[index]
            if length >= total:
                self._holes[index : index + 1] = [(start, length - total)] if length > total else []
                piece = start + length - total
                self._pieces[piece] = total
                if total > size:
                    self._gaps[piece] = [(piece + size, total - size)]
                return piece
        raise ValueError(f"a segment of {size} bytes needs more addresses than are left")


def _merged(spans: list[Span]) -> list[Span]:
    """Sort spans and join those that touch."""
    result: list[Span] = []
    for start, length in sorted(spans):
        if result and sum(result[-1]) == start:
            result[-1] = (result[-1][0], result[-1][1] + length)
        else:
            result.append((start, length))
    return result
