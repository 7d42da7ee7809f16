"""How many bytes a request takes: of a block, and of a new segment."""

from __future__ import annotations

from collections.abc import Sequence

from .constants import (
    MIN_BLOCK_SIZE,
    MIN_LARGE_ALLOC,
    ROUND_LARGE,
    ROUNDUP_INTERVALS,
    ROUNDUP_START,
    SMALL_BUFFER,
    SMALL_SIZE,
)

_FIRST_INTERVAL = ROUNDUP_START.bit_length() - 1


def round_up(size: int, multiple: int) -> int:
    """Round up to a multiple.

    >>> round_up(1000, 512)
    1024
    """
    return -(-size // multiple) * multiple


def block_size(size: int, divisions: Sequence[int]) -> int:
    """The size of the block that serves a request (PyTorch's round_size).

    >>> block_size(1, (0,) * 16), block_size(5 * 2**20, (4,) * 16), block_size(9 * 2**20, (4,) * 16)
    (512, 5242880, 10485760)
    """
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
    """The size of the segment that is taken from the driver for a block (PyTorch's get_allocation_size).

    >>> segment_size(512, 20 * 2**20), segment_size(2**21, 20 * 2**20), segment_size(11 * 2**20, 20 * 2**20)
    (2097152, 20971520, 12582912)
    """
    if block <= SMALL_SIZE:
        return SMALL_BUFFER
    if block < MIN_LARGE_ALLOC:
        return large_segment_size
    return round_up(block, ROUND_LARGE)
