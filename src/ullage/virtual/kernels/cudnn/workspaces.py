"""cuDNN's part of a convolution: how many bytes of workspace the plan that it chooses takes.

cuDNN is closed. What is written here was found by laying formulas beside measured calls (`ullage.research`): almost
every workspace is a sum of copies in another layout (NHWC for NCHW tensors, channels padded to what a tensor core
reads at once), partial results of a split sum, and a constant. Which sum it is, is cuDNN's choice of an engine: a table
of measured calls knows it for one kind of GPU, trees that were grown on the same measurements guess it for the rest
(`cudnn_choice.py`).

Everything was measured on Hopper. Other generations have other engines: the copies are the same kind of sum there, the
constants and the choice need not be, until their owner measures them and builds a table (`ullage.research`).
"""

from __future__ import annotations

import hashlib
import json
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

FORWARD, DATA, FILTER = "f", "d", "w"
ITEM_BYTES = {"f32": 4, "f16": 2, "bf16": 2}

# How a tensor is padded: not taken at all; as it is; channels to 16 bytes; channels of a group, of input and output
# alike, to 32 elements. The filters of a depthwise convolution are also padded to 64 channels.
NONE, PLAIN, PADDED, WIDE, SIXTY_FOUR = range(5)

_RUNNER_UP = 0.02  # share of the votes from which another size counts as possible


class Problem(NamedTuple):
    """A convolution as cuDNN sees it: a transposed one is the data gradient of the one it transposes."""

    direction: str
    source: tuple[int, ...]
    weight: tuple[int, ...]
    out: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    kind: str
    channels_last: bool


class Workspace(NamedTuple):
    """Bytes of the likeliest plan, and of the largest one that is not unlikely; guessed, or measured?

    `surprise` tells how much trust a guess deserves: bytes of copies of all its tensors, times the share of the votes
    against it. cuDNN sometimes takes what no measured call of the kind has taken.
    """

    size: int
    larger: int
    guessed: bool = False
    surprise: int = 0


class Formula(NamedTuple):
    """A workspace as a sum: copies of the tensors, partial results in single precision, constants."""

    source: int  # a padding
    out: int
    weight: int
    partial: int
    partials: int  # how many; a negative number counts them by the sample
    constant: int
    per_group: int


class Terms(NamedTuple):
    """Bytes of what a workspace is made of; a tuple has a place for each padding."""

    source: tuple[int, ...]
    out: tuple[int, ...]
    weight: tuple[int, ...]
    partial: tuple[int, ...]  # one partial result: the tensor that is computed, in single precision
    batch: int
    groups: int


def round_up(number: int, unit: int) -> int:
    """The next multiple.

    >>> round_up(13, 8)
    16
    """
    return -(-number // unit) * unit


def product(lengths: tuple[int, ...]) -> int:
    """How many elements.

    >>> product((2, 3))
    6
    """
    count = 1
    for length in lengths:
        count *= length
    return count


def terms(problem: Problem) -> Terms:
    """What a workspace for this problem can be made of.

    >>> layer = Problem("f", (1, 3, 8, 8), (16, 3, 3, 3), (1, 16, 8, 8), (1, 1), (1, 1), (1, 1), 1, "f16", False)
    >>> terms(layer).source
    (0, 384, 1024)
    """
    groups, item = problem.groups, ITEM_BYTES[problem.kind]
    inner, outer = problem.source[1] // groups, problem.out[1] // groups
    rows = problem.source[0] * product(problem.source[2:]) * item
    out_rows = problem.out[0] * product(problem.out[2:]) * item
    taps = product(problem.weight[2:]) * item
    unit = 16 // item
    common = round_up(max(inner, outer), 32)
    channels = [(inner, outer), (round_up(inner, unit), round_up(outer, unit))]
    if groups > 1:
        channels.append((common, common))
    source = (0, *(rows * groups * width for width, _ in channels))
    out = (0, *(out_rows * groups * width for _, width in channels))
    weight = (0, *(taps * groups * width * height for width, height in channels))
    computed = {FORWARD: out, DATA: source, FILTER: weight}[problem.direction]
    partial = [size // item * 4 for size in computed]
    if problem.direction == FILTER and groups > 1:
        partial.append(round_up(groups * outer, 64) * inner * taps // item * 4)
    return Terms(source, out, weight, tuple(partial), problem.source[0], groups)


def evaluate(formula: Formula, parts: Terms) -> int:
    """Bytes by a formula; a padding that a problem does not know is the last one it knows.

    >>> evaluate(Formula(PLAIN, PLAIN, NONE, NONE, 0, 16, 0), Terms((0, 100), (0, 50), (0, 9), (0, 36), 2, 1))
    166
    """
    count = formula.partials if formula.partials >= 0 else -formula.partials * parts.batch
    size = formula.constant + formula.per_group * parts.groups + count * _padded(parts.partial, formula.partial)
    size += _padded(parts.source, formula.source)
    return size + _padded(parts.out, formula.out) + _padded(parts.weight, formula.weight)


def _padded(sizes: tuple[int, ...], padding: int) -> int:
    return sizes[min(padding, len(sizes) - 1)]


def by_votes(votes: list[tuple[Formula, float]], parts: Terms) -> Workspace:
    """The size with the most votes; different formulas may give the same size.

    >>> copies, nothing = Formula(PLAIN, PLAIN, NONE, NONE, 0, 0, 0), Formula(NONE, NONE, NONE, NONE, 0, 0, 0)
    >>> by_votes([(copies, 3.0), (nothing, 1.0)], Terms((0, 100), (0, 50), (0, 10), (0, 36), 2, 1))
    Workspace(size=150, larger=150, guessed=True, surprise=40)
    >>> by_votes([(copies, 2.0), (nothing, 98.0)], Terms((0, 100), (0, 50), (0, 10), (0, 36), 2, 1)).larger
    150
    """
    shares: dict[int, float] = {}
    for formula, weight in votes:
        size = evaluate(formula, parts)
        shares[size] = shares.get(size, 0.0) + weight
    if not shares:
        return Workspace(0, 0)
    size = max(shares, key=lambda candidate: (shares[candidate], candidate))
    total = sum(shares.values())
    largest = max(size, *(other for other, share in shares.items() if share >= _RUNNER_UP * total))
    copies = sum(_padded(sizes, PADDED) for sizes in (parts.source, parts.out, parts.weight))
    return Workspace(size, largest, guessed=True, surprise=int(copies * (1 - shares[size] / total)))


# cuDNN's choice of a plan: a table of measured calls for a kind of GPU, and trees for everything else.
#
# Tables and trees are written by `ullage.research.cudnn_tables.table` from calls that this project measured; they are
# read at the first convolution. A table that is put beside them (`convolution_table*.npz`) serves the GPUs its header
# names.

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
