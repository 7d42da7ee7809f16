"""The size of cuFFT's workspace. cuFFT is closed source: the rules come from 90,000 of its plans on an H200.

A transform of one dimension needs no workspace if cuFFT has a kernel for its length (`data/cufft_lengths.npz`), else
room for its data once more. Lengths with a prime factor above 127 use Bluestein's algorithm: in one kernel if they are
short, else in two buffers of the next length of the form 2^a 3^b 5^c that holds the convolution. Real transforms of
even length run as complex ones of half the length, those of odd length in pairs. The largest workspace of several
dimensions serves all (`benchmarks/training/cufft_workspaces.py`).
"""

import functools
import math
import zipfile
from array import array
from collections.abc import Sequence
from pathlib import Path

from ullage.units import ceil_div

TABLE = Path(__file__).parent / "data" / "cufft_lengths.npz"
LARGEST_FACTOR = 127  # that is not left to Bluestein's algorithm
_BY_BATCH = {"c2c": 32768, "r2c": 65536, "c2r": 65536}  # one kernel only if that keeps the GPU busy
_SINGLE, _DOUBLE = "s", "d"


@functools.cache
def _without_workspace(kind: str, precision: str) -> frozenset[int]:
    with zipfile.ZipFile(TABLE) as table:  # a script's Python may have no NumPy
        data = table.read(f"{kind}_{precision}.npy")
    return frozenset(array("i", data[10 + int.from_bytes(data[8:10], "little") :]))


@functools.cache
def largest_factor(number: int) -> int:
    largest, factor = 1, 2
    while factor * factor <= number:
        while number % factor == 0:
            largest, number = factor, number // factor
        factor += 1
    return max(largest, number)


@functools.cache
def _bluestein(length: int, longest: int) -> int:
    """Return the numbers in the two buffers: products of 2, 3 and 5 that hold the convolution."""
    least = 2 * length - 1
    if longest < length <= 2 * longest and longest == 2048:  # in double precision
        return 2 * 8192
    best, twos = 1 << least.bit_length(), 1
    while twos < best:
        threes = twos
        while threes < best:
            fives = threes
            while fives < least:
                fives *= 5
            best = min(best, fives)
            threes *= 3
        twos *= 2
    return 2 * best


def _longest(precision: str) -> int:
    """Return the longest transform that Bluestein's algorithm computes in one kernel."""
    return 2048 if precision == _DOUBLE else 4096


def complex_numbers(length: int, precision: str, strided: bool, batch: int) -> int:
    """Return the numbers in the workspace of one complex transform."""
    if largest_factor(length) > LARGEST_FACTOR:
        longest = _longest(precision)
        return 0 if length <= longest else _bluestein(length, longest)
    kind = "strided" if strided else "c2c"
    if length == _BY_BATCH["c2c"] and not strided and precision == _SINGLE:
        return 0 if batch > LARGEST_FACTOR else length
    return 0 if length in _without_workspace(kind, precision) else length


def _real_numbers(kind: str, length: int, precision: str, batch: int, others: int) -> int:
    """Return the complex numbers in the workspace of real transforms, `others` of them in each of a batch."""
    by_bluestein = largest_factor(length) > LARGEST_FACTOR
    if not by_bluestein and length in _without_workspace(kind, precision):
        return 0
    longest = _longest(precision)
    if length % 2:
        again = _bluestein(length, longest) if by_bluestein and length > longest else length
        return ceil_div(batch, 2) * others * (length + again)
    half, again = length // 2, 0
    if by_bluestein and half > longest // 2:
        again = _bluestein(half, longest) if half > longest else half
    return batch * others * (half + 1 + again)


def workspace(kind: str, precision: str, lengths: Sequence[int], batch: int, strided: bool) -> int:
    """Return the complex numbers in a workspace, by "c2c", "r2c" or "c2r", by "s" or "d", and by lengths."""
    *outer, last = lengths
    others = math.prod(outer)
    if kind == "c2c":
        total = batch * others * last
        most = complex_numbers(last, precision, strided, batch * others) * batch * others
    else:
        total = batch * others * (last // 2 + 1)
        most = _real_numbers(kind, last, precision, batch, others)
    for length in outer:
        if length > 1:
            most = max(most, complex_numbers(length, precision, True, total // length) * (total // length))
    return most
