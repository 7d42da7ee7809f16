"""cuDNN's choice of a plan: a table of measured calls for a kind of GPU, and trees for everything else.

Tables and trees are written by `ullage.measure.convolution_table` from calls that this project measured; they are read
at the first convolution. A table that is put beside them (`convolution_table*.npz`) serves the GPUs its header names.
"""

from __future__ import annotations

import hashlib
import json
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ullage.virtual.kernels.cudnn_workspaces import (
    ITEM_BYTES,
    Formula,
    Problem,
    Workspace,
    by_votes,
    product,
    round_up,
    terms,
)

DATA_FOLDER = Path(__file__).with_name("data")
TABLE, TREES = "convolution_table.npz", "convolution_trees.npz"
_MULTIPROCESSORS = 132  # of the GPU that was measured
HASH_BITS = 44  # a problem that was never measured is taken for one that was in 1 of 60 million cases

use_table = True  # set to False to see what the trees alone would say


class Table(NamedTuple):
    """Sorted hashes of problems and their workspaces; the header names the GPU, driver and libraries."""

    header: dict[str, Any]
    hashes: Any
    sizes: Any


class Trees(NamedTuple):
    """The trees of one direction, joined end to end in depth-first order; a leaf has feature -1."""

    roots: list[int]
    feature: memoryview
    threshold: memoryview
    right: memoryview  # a node's left child follows it; for a leaf, the place of its first vote
    ends: memoryview  # of the votes of a leaf
    labels: memoryview
    shares: memoryview
    formulas: list[Formula]


def hash_of(problem: Problem) -> int:
    """A hash that stays the same from run to run.

    >>> layer = Problem("f", (1, 3, 8, 8), (16, 3, 3, 3), (1, 16, 8, 8), (1, 1), (1, 1), (1, 1), 1, "f16", False)
    >>> 0 <= hash_of(layer) < 2**HASH_BITS
    True
    """
    text = repr(tuple(problem)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> (64 - HASH_BITS)


@cache
def tables(folder: Path) -> dict[tuple[tuple[int, ...], int], Path]:
    """The tables in a folder by compute capability and number of multiprocessors; only their headers are read."""
    found = {}
    for path in sorted(folder.glob("convolution_table*.npz")):
        with np.load(path) as file:
            header = json.loads(bytes(file["header"]).decode())
        found[tuple(header["compute_capability"]), header["multiprocessors"]] = path
    return found


@cache
def table(path: Path) -> Table:
    """Read a table of measured calls."""
    with np.load(path) as file:
        header = json.loads(bytes(file["header"]).decode())
        hashes = np.cumsum(file["steps"], dtype=np.uint64)
        sizes = np.zeros(len(hashes), dtype=np.uint64)
        sizes[file["nonzero"].view(bool)] = file["sizes"]
    return Table(header, hashes, sizes)


def measured(problem: Problem, capability: tuple[int, int] | None, multiprocessors: int | None) -> int | None:
    """The measured workspace of this very problem on this kind of GPU."""
    if not use_table or capability is None or multiprocessors is None:
        return None
    path = tables(DATA_FOLDER).get((tuple(capability), multiprocessors))
    if path is None:
        return None
    found, wanted = table(path), np.uint64(hash_of(problem))
    place = int(np.searchsorted(found.hashes, wanted))
    if place == len(found.hashes) or found.hashes[place] != wanted:
        return None
    return int(found.sizes[place])


def features(problem: Problem) -> list[int]:
    """Whole numbers that cuDNN's choice may turn on: sizes, alignment, and the matrix product that it amounts to."""
    source, out, weight, groups = problem.source, problem.out, problem.weight, problem.groups
    inner, outer = source[1] // groups, out[1] // groups
    pixels, out_pixels, taps = product(source[2:]), product(out[2:]), product(weight[2:])
    batch, item = source[0], ITEM_BYTES[problem.kind]
    rows, depth = batch * out_pixels, inner * taps
    tiles = -(-rows // 128) * -(-outer // 128) * groups
    filter_tiles = -(-outer // 128) * -(-depth // 128) * groups
    data_tiles = -(-batch * pixels // 128) * -(-inner // 128) * groups
    products = rows * outer * groups * depth
    source_bytes, out_bytes = batch * source[1] * pixels * item, batch * out[1] * out_pixels * item
    weight_bytes = outer * groups * depth * item
    unit = 16 // item
    inner_padded, outer_padded = round_up(inner, unit), round_up(outer, unit)
    plain = taps == 1 and problem.stride[-1] == 1 and problem.padding[-1] == 0  # a matrix product
    return [
        {"f32": 0, "f16": 1, "bf16": 2}[problem.kind],
        int(problem.channels_last),
        batch,
        inner,
        outer,
        groups,
        source[-2],
        source[-1],
        pixels,
        out_pixels,
        weight[-2],
        weight[-1],
        taps,
        problem.stride[-1],
        problem.padding[-1],
        problem.dilation[-1],
        len(source),
        inner % 8,
        outer % 8,
        min(out_pixels & -out_pixels, 16),
        min(inner & -inner, 256),
        min(outer & -outer, 256),
        rows,
        batch * pixels,
        depth,
        outer * taps,
        tiles,
        filter_tiles,
        data_tiles,
        source_bytes,
        out_bytes,
        weight_bytes,
        min(products >> 12, 2**31 - 1),
        1000 * inner // outer,
        100 * rows // (outer * groups),
        max(outer * groups, source[1]),
        min(outer * groups, source[1]),
        -(-rows // 256) * -(-outer // 128) * groups,
        -(-rows // 64) * -(-outer // 64) * groups,
        -(-batch * pixels // 64) * -(-inner // 64) * groups,
        -(-outer // 64) * -(-depth // 64) * groups,
        min(pixels & -pixels, 16),
        # What all channels, and all lengths of the matrices, are multiples of; what padding them to 16 bytes costs.
        _multiple(inner | outer),
        _multiple(inner | outer | pixels | out_pixels),
        1000 * inner_padded // inner,
        1000 * outer_padded // outer,
        1000 * inner_padded * outer_padded // (inner * outer),
        # How well tiles fill an H200, and products for each byte that is read or written.
        1000 * tiles // round_up(tiles, _MULTIPROCESSORS),
        products // (source_bytes + out_bytes + weight_bytes),
        products // source_bytes,
        products // out_bytes,
        int(plain),
        inner * outer,
        inner + outer,
        batch * source[-2],
        out[-1],
    ]


def _multiple(number: int) -> int:
    """The largest power of two, up to 16, of which the number is a multiple."""
    return min(number & -number, 16)


@cache
def trees(path: Path) -> dict[str, Trees]:
    """Read the trees of all directions."""
    if not path.exists():
        return {}
    found = {}
    with np.load(path) as file:
        for direction in "fdw":
            part = {name: file[f"{direction}_{name}"] for name in ("roots", "feature", "step", "labels", "shares")}
            leaf, step = part["feature"] < 0, part["step"]
            ends = np.cumsum(np.where(leaf, step, 0))
            right = np.where(leaf, ends - step, np.arange(len(step)) + step)
            threshold = np.zeros(len(step), dtype=np.int64)
            threshold[~leaf] = file[f"{direction}_thresholds"][file[f"{direction}_threshold"]]
            formulas = [Formula(*row) for row in file[f"{direction}_formulas"].tolist()]
            columns: dict[str, Any] = {"threshold": threshold, "right": right, "ends": ends}
            columns |= {name: part[name] for name in ("feature", "labels", "shares")}
            views: dict[str, Any] = {name: memoryview(column) for name, column in columns.items()}  # quick to index
            found[direction] = Trees(roots=part["roots"].tolist(), formulas=formulas, **views)
    return found


def votes(problem: Problem) -> list[tuple[Formula, float]]:
    """What the trees say of a problem: formulas, each with its shares of the measured calls in the leaves."""
    grown = trees(DATA_FOLDER / TREES).get(problem.direction)
    if grown is None:
        return []
    values = features(problem)
    feature, threshold, right = grown.feature, grown.threshold, grown.right
    found: dict[int, int] = {}
    for node in grown.roots:
        while (place := feature[node]) >= 0:
            node = node + 1 if values[place] <= threshold[node] else right[node]
        for vote in range(right[node], grown.ends[node]):
            label = grown.labels[vote]
            found[label] = found.get(label, 0) + grown.shares[vote]
    return [(grown.formulas[label], share / 255) for label, share in found.items()]


@lru_cache(maxsize=65536)
def workspace(problem: Problem, capability: tuple[int, int] | None, multiprocessors: int | None) -> Workspace:
    """The workspace of a problem: measured for this kind of GPU, or else what the trees say.

    Not covered: `torch.backends.cudnn.benchmark`, which tries plans and takes the fastest; double precision, which
    runs without tensor cores and is taken to need none.

    >>> layer = Problem("f", (8, 64, 8, 8), (64, 64, 3, 3), (8, 64, 8, 8), (1, 1), (1, 1), (1, 1), 1, "f16", False)
    >>> found = workspace(layer, (8, 0), 108)
    >>> 0 <= found.size <= found.larger
    True
    """
    if problem.kind not in ITEM_BYTES:
        return Workspace(0, 0)
    known = measured(problem, capability, multiprocessors)
    if known is not None:
        return Workspace(known, known)
    return by_votes(votes(problem), terms(problem))
