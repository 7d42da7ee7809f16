"""Division and rounding of whole numbers, as kernels do it. The first two take columns of NumPy, too."""

from __future__ import annotations

INT_MAX = 2**31 - 1  # the largest number of 32 bits


def ceil_div(number: int, divisor: int) -> int:
    return -(-number // divisor)


def round_up(number: int, unit: int) -> int:
    return -(-number // unit) * unit


def last_power_of_two(number: int) -> int:
    """The largest power of two that is not larger (at least 1)."""
    return 1 << (max(number, 1).bit_length() - 1)
