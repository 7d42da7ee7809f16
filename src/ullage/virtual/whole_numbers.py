"""Division and rounding of whole numbers, as kernels do it. The first two take columns of NumPy, too."""

from __future__ import annotations

INT_MAX = 2**31 - 1  # the largest number of 32 bits


def ceil_div(number: int, divisor: int) -> int:
    """The quotient, rounded up.

    >>> ceil_div(7, 2)
    4
    """
    return -(-number // divisor)


def round_up(number: int, unit: int) -> int:
    """The next multiple.

    >>> round_up(13, 8)
    16
    """
    return -(-number // unit) * unit


def last_power_of_two(number: int) -> int:
    """The largest power of two that is not larger (at least 1).

    >>> last_power_of_two(48)
    32
    """
    return 1 << (max(number, 1).bit_length() - 1)
