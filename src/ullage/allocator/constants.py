"""The constants of PyTorch's CUDA caching allocator, each once, with the file that defines it.

The names in PyTorch are given beside each; versions 2.6 to 2.13 agree on all of them.
"""

from typing import Final

KIB: Final = 1024
MIB: Final = 1024 * KIB
GIB: Final = 1024 * MIB

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
# Not PyTorch's: where imitated addresses begin, downwards; real ones lie near 0x7f0000000000
HIGHEST_ADDRESS: Final = 1 << 47

# The actions of allocator histories, numbered as in recorded ones (PyTorch names them, see TraceEntry)
ALLOC: Final = 0
FREE_REQUESTED: Final = 1
FREE_COMPLETED: Final = 2
SEGMENT_ALLOC: Final = 3
SEGMENT_FREE: Final = 4
