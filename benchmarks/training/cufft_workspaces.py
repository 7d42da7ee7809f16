"""Records cuFFT's workspaces of plans for transforms drawn at random; needs a GPU.

    python benchmarks/training/cufft_workspaces.py --seconds 60 --seed 1 --out cufft_h200.csv.gz
    python benchmarks/training/cufft_workspaces.py --lengths 1/2 --out lengths_h200.csv.gz

The second asks for every length of which no rule is known whether cuFFT has a kernel without a workspace (`1/2`: the
first of two parts).

A line a plan: kind (c2c, r2c, c2r), type (s, d or h), batch, stride and distance of the input, bytes, lengths. Plans
are made as aten/src/ATen/native/cuda/CuFFTPlanCache.h makes them: the output lies in one piece. Nothing is transformed.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import gzip
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

REAL, COMPLEX = {"s": 0, "d": 1, "h": 2}, {"s": 4, "d": 5, "h": 6}  # library_types.h, cudaDataType


def library() -> ctypes.CDLL:
    """cuFFT, as PyTorch has loaded it."""
    torch.fft.fft(torch.zeros(8, device="cuda"))
    maps = Path("/proc/self/maps").read_text().split()
    return ctypes.CDLL(next(word for word in maps if "libcufft.so" in word))


def workspace(cufft: ctypes.CDLL, kind: str, dtype: str, sizes: list[int], batch: int, stride: int, dist: int) -> int:
    """Bytes of the workspace of one plan; below zero an error."""
    plan, size = ctypes.c_int(), ctypes.c_size_t()
    if status := cufft.cufftCreate(ctypes.byref(plan)):
        return -int(status)
    cufft.cufftSetAutoAllocation(plan, 0)
    rank, Sizes = len(sizes), ctypes.c_longlong * len(sizes)
    itype = REAL[dtype] if kind == "r2c" else COMPLEX[dtype]
    otype = REAL[dtype] if kind == "c2r" else COMPLEX[dtype]
    number = ctypes.c_longlong
    if stride == 1 and dist == 0:  # in one piece
        layout: tuple[object, ...] = (None, number(1), number(1), itype, None, number(1), number(1), otype)
    else:
        last_in = sizes[-1] // 2 + 1 if kind == "c2r" else sizes[-1]
        last_out = sizes[-1] // 2 + 1 if kind == "r2c" else sizes[-1]
        inside, outside = Sizes(*sizes[:-1], last_in), Sizes(*sizes[:-1], last_out)
        far = last_out
        for length in sizes[:-1]:
            far *= length
        layout = (inside, number(stride), number(dist), itype, outside, number(1), number(far), otype)
    status = cufft.cufftXtMakePlanMany(
        plan, rank, Sizes(*sizes), *layout, number(batch), ctypes.byref(size), COMPLEX[dtype]
    )
    cufft.cufftDestroy(plan)
    return -int(status) if status else size.value


def _length(chance: random.Random, largest: int) -> int:
    how = chance.random()
    if how < 0.3:  # products of small primes
        length = 1
        while True:
            factor = chance.choice([2, 2, 2, 2, 3, 3, 5, 7])
            if length * factor > largest or (length > 4 and chance.random() < 0.12):
                return length
            length *= factor
    if how < 0.45:
        return 1 << chance.randint(0, largest.bit_length() - 1)
    if how < 0.6:
        return min(largest, max(1, round(2 ** chance.uniform(0, largest.bit_length()) / 10) * 10))
    if how < 0.7:
        return chance.randint(1, min(largest, 600))
    return min(largest, max(1, int(2 ** chance.uniform(0, largest.bit_length()))))


def draw(chance: random.Random) -> tuple[str, str, list[int], int, int, int]:
    """A transform: lengths that people use, and any others."""
    rank = chance.choice([1, 1, 1, 1, 2, 2, 2, 3])
    sizes = [_length(chance, (1 << 20, 4096, 256)[rank - 1]) for _ in range(rank)]
    total = 1
    for length in sizes:
        total *= length
    room = max(1, (1 << 26) // total)
    batch = min(
        room, chance.choice([1, 1, 2, 3, 8, 64, 1000, int(2 ** chance.uniform(0, 14)), int(2 ** chance.uniform(0, 14))])
    )
    kind, dtype = chance.choice(["c2c", "r2c", "c2r"]), chance.choice("sssssd")
    stride, dist = 1, 0
    if rank == 1 and chance.random() < 0.25:
        stride, dist = chance.choice(
            [(batch, 1), (1, sizes[0] + chance.choice([1, 2, sizes[0]])), (chance.randint(1, 64), 1)]
        )
    return kind, dtype, sizes, batch, stride, dist


def _largest_factor(number: int) -> int:
    largest, factor = 1, 2
    while factor * factor <= number:
        while number % factor == 0:
            largest, number = factor, number // factor
        factor += 1
    return max(largest, number)


def lengths() -> list[tuple[str, str, list[int], int, int, int]]:
    """Transforms of one dimension of every length of which no rule is known, four of each."""
    transforms: list[tuple[str, str, list[int], int, int, int]] = []
    for length in range(1, 65537):
        factor = _largest_factor(length)
        if factor > 127 or (factor > 7 and length > 16384):
            continue
        for dtype in "sd":
            if factor <= 7 or length <= 16384:
                transforms.append(("c2c", dtype, [length], 4, 1, 0))
            if factor <= 7 or length <= 8192:
                transforms.append(("c2c", dtype, [length], 4, 4, 1))
            if factor <= 7 or length <= 4096:
                transforms.append(("r2c", dtype, [length], 4, 1, 0))
                transforms.append(("c2r", dtype, [length], 4, 1, 0))
    return transforms


def _needing_nothing(known: dict[int, bool]) -> list[int]:
    """The lengths that need no workspace; one that was not asked for does what most of its neighbours do."""
    votes: dict[tuple[int, int], list[bool]] = {}
    for length, nothing in known.items():
        votes.setdefault(_family(length), []).append(nothing)

    def answer(length: int) -> bool:
        alike = votes.get(_family(length), [])
        return known.get(length, sum(alike) * 2 > len(alike))

    return [length for length in range(1, 65537) if answer(length)]


@functools.cache
def _family(length: int) -> tuple[int, int]:
    factor = _largest_factor(length)
    return next(limit for limit in (7, 31, 127, 1 << 30) if factor <= limit), length.bit_length()


def write_table(files: list[Path], out: Path) -> None:
    """Write the lengths of single transforms that need no workspace: the table of `virtual/operators/cufft.py`."""
    by_name: dict[str, dict[int, bool]] = {}
    for file in files:
        for line in gzip.decompress(file.read_bytes()).decode().splitlines():
            kind, dtype, _, stride, _, size, *sizes = line.strip().split(",")
            if len(sizes) == 1:
                strided = stride != "1"
                name = f"{'strided' if strided else kind}_{dtype}"
                if not strided or kind == "c2c":
                    known = by_name.setdefault(name, {})
                    known[int(sizes[0])] = size == "0" and known.get(int(sizes[0]), True)
    lists = {name: _needing_nothing(known) for name, known in by_name.items()}
    np.savez_compressed(out, **{name: np.array(values, dtype=np.int32) for name, values in lists.items()})
    print({name: len(values) for name, values in lists.items()})


def main() -> None:
    """Query cuFFT for the given time."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--lengths", metavar="PART/PARTS")
    parser.add_argument("--out", type=Path, default=Path("cufft_h200.csv.gz"))
    parser.add_argument("--table", type=Path, nargs="+", help="write the table from such files, without a GPU")
    given = parser.parse_args()
    if given.table:
        write_table(given.table, given.out)
        return
    cufft, chance = library(), random.Random(given.seed)
    end, count = time.monotonic() + given.seconds, 0
    drawn: Iterator[Any] = iter(lambda: draw(chance), None)
    if given.lengths:
        part, parts = map(int, given.lengths.split("/"))
        drawn = iter(lengths()[part - 1 :: parts])
    with gzip.open(given.out, "wt") as file:
        for kind, dtype, sizes, batch, stride, dist in drawn:
            if time.monotonic() > end:
                break
            size = workspace(cufft, kind, dtype, sizes, batch, stride, dist)
            file.write(",".join(map(str, [kind, dtype, batch, stride, dist, size, *sizes])) + "\n")
            count += 1
            if count % 200 == 0:
                file.flush()
    print(f"{count} plans", flush=True)


if __name__ == "__main__":
    main()
