"""What cuFFT says that its plans need as a workspace, for transforms drawn at random; needs a GPU.

    python benchmarks/cufft_workspaces.py --seconds 60 --seed 1 --out cufft_h200.csv.gz

A line a plan: kind (c2c, r2c, c2r), type (s, d or h), batch, stride and distance of the input, bytes, lengths. Plans
are made as aten/src/ATen/native/cuda/CuFFTPlanCache.h makes them: the output lies in one piece. Nothing is transformed.
"""

from __future__ import annotations

import argparse
import ctypes
import gzip
import random
import time
from pathlib import Path

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


def main() -> None:
    """Ask for as long as was said."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("cufft_h200.csv.gz"))
    given = parser.parse_args()
    cufft, chance = library(), random.Random(given.seed)
    end, count = time.monotonic() + given.seconds, 0
    with gzip.open(given.out, "wt") as file:
        while time.monotonic() < end:
            kind, dtype, sizes, batch, stride, dist = draw(chance)
            size = workspace(cufft, kind, dtype, sizes, batch, stride, dist)
            file.write(",".join(map(str, [kind, dtype, batch, stride, dist, size, *sizes])) + "\n")
            count += 1
            if count % 200 == 0:
                file.flush()
    print(f"{count} plans", flush=True)


if __name__ == "__main__":
    main()
