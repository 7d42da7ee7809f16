"""Which plan cuDNN names for a convolution, guessed by a network, and what such a plan takes.

A plan is an engine and its knobs: the tile of results that a block of threads computes, how many blocks form a cluster,
into how many parts a sum is split. The network was taught by cuDNN's own answers (`benchmarks/plan_network.py`). It
knows a problem by `network_inputs` and gives every plan a probability.

A plan's workspace is copies of tensors and a constant, which one it is decided by a small tree for each engine, and the
partial sums of the kinds below:

- A persistent kernel gives whole waves of tiles to the clusters of the GPU. The tiles that are left over are split
  among all clusters, each of which keeps its part in single precision; counters for a tree of additions come on top.
- A sliced kernel keeps all slices of a tile but one, and a counter for each slice.
- A split kernel keeps each part of the filter's gradient, and a matrix product each part of its result.

Into how many parts a sum is split is decided by a large tree for each engine. cuDNN seems to have such trees, too: they
find it from the lengths as they are, and the worse the more numbers are made of these.

Needs NumPy. Only the H200 was asked.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from ullage.errors import MissingPackage
from ullage.virtual.kernels.cudnn.formulas import (
    DATA,
    FILTER,
    FORWARD,
    GROUPS_AT_ONCE,
    ITEM_BYTES,
    ConvolutionProblem,
    packed_channels,
    product,
    round_up,
)

# Knobs, by cuDNN's numbers (cudnnBackendKnobType_t).
SPLIT_K, TILE, SPLIT_K_BUFFERS, TILE_K, SLICES, INDEX_MODE, WORKSPACE_KNOB = 0, 2, 12, 13, 17, 18, 25
CLUSTER_ROWS, CLUSTER_COLUMNS = 27, 28
_SEEN_KNOBS = (TILE, SPLIT_K_BUFFERS, TILE_K, INDEX_MODE, WORKSPACE_KNOB, CLUSTER_ROWS, CLUSTER_COLUMNS)

PERSISTENT = {FORWARD: (62, 67), DATA: (67, 71), FILTER: (65, 68)}  # engines by direction
SLICED = {FORWARD: (), DATA: (), FILTER: (10, 30, 39, 40)}
SPLIT = {FORWARD: (), DATA: (), FILTER: (33, 34, 49, 50)}
PRODUCT = {FORWARD: (58,), DATA: (63,), FILTER: (62,)}
_UNPADDED = (39, 40)  # sliced engines whose tiles count the channels as they are

# Rows and columns of a tile, by its number.
_TILES = {
    0: (128, 128), 1: (128, 64), 3: (256, 128), 4: (256, 64), 5: (64, 64), 6: (128, 256), 7: (64, 128), 9: (64, 256),
    16: (256, 32),
}  # fmt: skip
_SLICED_TILES = {
    3: (256, 128), 5: (64, 64), 8: (64, 32), 10: (64, 16), 11: (32, 16), 12: (32, 32), 14: (16, 64), 23: (32, 128),
}  # fmt: skip
_MULTIPROCESSORS = 132
_CLUSTERS = {1: 132, 2: 66, 3: 39, 4: 30, 5: 22, 6: 17, 7: 15, 8: 15, 12: 7, 14: 7, 16: 7}  # at once, by their size
_DEPTH = 64  # of the products that a block adds at once
DOUBT = 2.0  # scores divided by it are as sure as they are right, on problems that were held out of the training
_MOST_LIKELY = 12  # plans that are looked at
AS_MANY_AS_FIT = 1  # parts, as the trees name them; 0 is none


class EnginePlan(NamedTuple):
    """An engine of cuDNN with its knobs, but for the number of parts of a sum."""

    direction: str
    engine: int
    knobs: dict[int, int]

    @property
    def clusters(self) -> int:
        """How many clusters of blocks the GPU runs at once."""
        size = self.knobs.get(CLUSTER_ROWS, 1) * self.knobs.get(CLUSTER_COLUMNS, 1)
        return _CLUSTERS.get(size, _MULTIPROCESSORS // size)


class Grid(NamedTuple):
    """How a plan cuts a problem: `tiles` (of clusters, for a persistent kernel) of `tile_bytes`, in `steps` of
    products, and how many clusters run at once."""

    tiles: int = 0
    steps: int = 0
    clusters: int = 1
    tile_bytes: int = 0

    @property
    def left(self) -> int:
        """Tiles after the last whole wave."""
        return self.tiles % self.clusters

    @property
    def most_parts(self) -> int:
        """Into how many parts each tile that is left can be split."""
        return self.clusters // max(self.left, 1)


class Lengths(NamedTuple):
    """A problem in numbers: channels are those of a group, `wide` and `tall` are padded to 16 bytes."""

    batch: int
    inner: int
    outer: int
    groups: int
    pixels: int
    out_pixels: int
    taps: int
    wide: int
    tall: int
    item: int


def lengths(problem: ConvolutionProblem) -> Lengths:
    """The numbers of a problem.

    >>> sizes = (2, 8, 5, 5), (16, 8, 1, 1), (2, 16, 5, 5)
    >>> lengths(ConvolutionProblem("f", *sizes, (1, 1), (0, 0), (1, 1), 1, "f16", False)).out_pixels
    25
    """
    groups, item = problem.groups, ITEM_BYTES[problem.kind]
    inner, outer, unit = problem.source[1] // groups, problem.out[1] // groups, 16 // item
    pixels, out_pixels, taps = (product(size[2:]) for size in (problem.source, problem.out, problem.weight))
    wide, tall = round_up(inner, unit), round_up(outer, unit)
    return Lengths(problem.source[0], inner, outer, groups, pixels, out_pixels, taps, wide, tall, item)


def matrix(direction: str, size: Lengths) -> tuple[int, int, int]:
    """The product of matrices that a convolution of one tap amounts to: rows, columns and depth."""
    samples = size.batch * size.pixels
    return {
        FORWARD: (samples, size.outer, size.inner),
        DATA: (samples, size.inner, size.outer),
        FILTER: (size.outer, size.inner, samples),
    }[direction]


def grid(plan: EnginePlan, size: Lengths, alone: bool = True) -> Grid:
    """How a plan cuts a problem into tiles; an empty grid if it keeps no partial sums.

    >>> sizes = (8, 64, 8, 8), (64, 64, 3, 3), (8, 64, 8, 8)
    >>> problem = ConvolutionProblem("f", *sizes, (1, 1), (1, 1), (1, 1), 1, "f16", True)
    >>> grid(EnginePlan("f", 67, {TILE: 0, CLUSTER_ROWS: 2, CLUSTER_COLUMNS: 1}), lengths(problem))
    Grid(tiles=2, steps=9, clusters=66, tile_bytes=131072)
    """
    direction, knobs = plan.direction, plan.knobs
    if plan.engine in PERSISTENT[direction]:
        rows, columns = _TILES.get(knobs[TILE], (0, 0))
        high, wide = knobs[CLUSTER_ROWS], knobs[CLUSTER_COLUMNS]
        if not rows:
            return Grid(clusters=plan.clusters)
        if direction == FILTER:
            down, across = -(-size.outer // rows), size.taps * -(-size.inner // columns)
            steps = -(-size.batch * size.out_pixels // _DEPTH)
        elif direction == FORWARD:
            down, across = -(-size.batch * size.out_pixels // rows), -(-size.outer // columns)
            steps = size.taps * -(-size.inner // _DEPTH)
        else:
            down, across = -(-size.batch * size.pixels // rows), -(-size.inner // columns)
            steps = size.taps * -(-size.outer // _DEPTH)
        tiles = -(-down // high) * -(-across // wide) * size.groups
        return Grid(tiles, steps, plan.clusters, rows * columns * 4 * high * wide)
    if plan.engine in PRODUCT[direction]:
        if not alone:  # a product for each sample, which no tree splits
            return Grid()
        high, across, depth = matrix(direction, size)
        return Grid(-(-high // 64) * -(-across // 64), -(-depth // _DEPTH), _MULTIPROCESSORS, high * across * 4)
    steps = -(-size.batch * size.out_pixels // _DEPTH)
    if plan.engine in SLICED[direction]:
        rows, columns = _SLICED_TILES.get(knobs[TILE], (0, 0))
        if size.groups > 1:
            return Grid(_packed_tiles(size, rows, columns), steps, _MULTIPROCESSORS, rows * columns * 4)
        inner = size.inner if plan.engine in _UNPADDED else size.wide
        tiles = -(-size.outer // max(rows, 1)) * -(-inner * size.taps // max(columns, 1)) * size.groups
        return Grid(tiles, steps, _MULTIPROCESSORS, rows * columns * 4)
    if plan.engine in SPLIT[direction]:
        tiles = -(-size.tall // 64) * -(-size.wide * size.taps // 64) * size.groups
        at_once = min(size.groups, GROUPS_AT_ONCE)
        return Grid(tiles, steps, _MULTIPROCESSORS, at_once * size.wide * size.tall * size.taps * 4)
    return Grid()


def _packed_tiles(size: Lengths, rows: int, columns: int) -> int:
    """Tiles of the filter's gradient of packed groups: a tile has several small groups, for each tap."""
    common, channels = packed_channels(size.inner, size.outer, size.groups)
    if not rows:
        return 0
    if common < rows:
        return -(-channels // rows) * size.taps * max(1, rows // columns)
    return size.groups * -(-common // rows) * -(-common * size.taps // columns)


def partial_bytes(plan: EnginePlan, cut: Grid, parts: int) -> int:
    """Bytes of the partial sums of a plan, and of their counters.

    >>> partial_bytes(EnginePlan("w", 49, {}), Grid(1, 1, 132, 512), 118)
    60416
    """
    if plan.engine in SPLIT[plan.direction] + PRODUCT[plan.direction]:
        return parts * cut.tile_bytes
    if parts < 2:
        return 0
    if plan.engine in PERSISTENT[plan.direction]:
        blocks = cut.left * plan.knobs[CLUSTER_ROWS] * plan.knobs[CLUSTER_COLUMNS]
        return cut.left * parts * cut.tile_bytes + 4 * blocks * _additions(parts)
    return cut.tiles * ((parts - 1) * cut.tile_bytes + 4 * parts) if cut.tile_bytes else 0


def parts_by(plan: EnginePlan, cut: Grid, named: int) -> int:
    """The parts of a sum by the number that a tree names: a sliced kernel without buffers has two, and a persistent
    one as many as the GPU has room for.

    >>> parts_by(EnginePlan("f", 62, {}), Grid(tiles=5, clusters=17), AS_MANY_AS_FIT)
    3
    """
    if plan.engine in PERSISTENT[plan.direction]:
        parts = cut.most_parts if named == AS_MANY_AS_FIT else named
        return parts if parts > 1 and 0 < cut.left * parts <= cut.clusters else 0
    if plan.engine in SLICED[plan.direction] and not plan.knobs.get(SPLIT_K_BUFFERS, 1):
        return 2
    return named if cut.tile_bytes else 0


def _additions(parts: int) -> int:
    """The additions by which a tree adds so many parts, two at a time.

    >>> _additions(4), _additions(5)
    (3, 6)
    """
    count = 0
    while parts > 1:
        parts = -(-parts // 2)
        count += parts
    return count


def part_inputs(row: Sequence[Any], direction: str, product_of_matrices: bool) -> list[Any]:
    """What the trees are told that split a sum: a row, and of a product of matrices their lengths and how tiles cover
    the result. Like `network_inputs` it takes columns, too."""
    if not product_of_matrices:
        return list(row)
    kind, last, batch, inner, outer = row[1:6]
    pixels = row[7] * row[8] * row[9]
    samples = batch * pixels
    high, across = {FORWARD: (samples, outer), DATA: (samples, inner), FILTER: (outer, inner)}[direction]
    tiles = [-(-high // rows) * -(-across // columns) for rows, columns in _PRODUCT_TILES]
    divisors = [number & -number for number in (inner, outer, samples)]
    work = high * across * {FORWARD: inner, DATA: outer, FILTER: samples}[direction]
    return [kind > 0, kind, last, batch, inner, outer, pixels, samples, *tiles, *divisors, high * across, work]


def part_knobs(plan: EnginePlan) -> tuple[int, int]:
    """The knobs that the trees are told, too."""
    return plan.knobs.get(TILE, -9), plan.knobs.get(WORKSPACE_KNOB, -9)


_PRODUCT_TILES = ((64, 64), (128, 128), (128, 64), (64, 128), (256, 128), (128, 256), (32, 32))


def tree_inputs(problem: ConvolutionProblem, plan: EnginePlan, size: Lengths, cut: Grid, parts: int) -> list[int]:
    """What the trees of an engine are told: whole numbers."""
    flat = len(problem.weight) == 4
    filter_lengths = ((1,) if flat else ()) + problem.weight[2:]
    dims = 3 if not flat else 1 if problem.source[2] == problem.weight[2] == 1 else 2
    numbers = [
        problem.channels_last, ("f32", "f16", "bf16").index(problem.kind), dims, size.wide > size.inner,
        size.tall > size.outer, size.taps, size.pixels > 1, size.out_pixels > 1, size.groups, size.inner, size.outer,
        size.batch, max(problem.stride), max(problem.dilation), max(problem.padding), size.inner & -size.inner,
        size.outer & -size.outer, size.out_pixels & -size.out_pixels, size.pixels & -size.pixels, size.out_pixels,
        size.pixels, size.inner * size.groups, size.outer * size.groups, *filter_lengths, cut.tiles > cut.clusters,
        cut.tiles, cut.left, cut.most_parts, cut.steps, cut.steps // max(cut.most_parts, 1), cut.tiles // cut.clusters,
        cut.clusters, parts > 0, problem.source[-1], problem.source[-2], problem.out[-1], size.inner - size.outer,
        max(size.inner, size.outer),
    ]  # fmt: skip
    return [int(number) for number in numbers] + [plan.knobs.get(knob, -9) for knob in _SEEN_KNOBS]


_TILE_SHAPES = (
    (256, 128), (128, 256), (128, 128), (256, 64), (64, 256), (128, 64), (64, 128), (64, 64), (128, 32), (32, 128),
    (64, 32), (32, 32),
)  # fmt: skip


ROW_KINDS = ("f32", "f16", "bf16")


def row_of(problem: ConvolutionProblem) -> list[int]:
    """A problem as a row of whole numbers: dimensions, type, channels last, batch, channels and outputs of a group,
    groups; then three each of: source, filter, stride, padding, dilation.

    >>> sizes = (2, 8, 5, 5), (16, 8, 1, 1), (2, 16, 5, 5)
    >>> row_of(ConvolutionProblem("f", *sizes, (1, 1), (0, 0), (1, 1), 1, "f16", False))[:10]
    [2, 1, 0, 2, 8, 16, 1, 1, 5, 5]
    """
    flat, groups = len(problem.source) == 4, problem.groups
    one, none = ((1,), (0,)) if flat else ((), ())
    source, taps = one + problem.source[2:], one + problem.weight[2:]
    dims = 3 if not flat else 1 if source[1] == taps[1] == 1 else 2
    head = dims, ROW_KINDS.index(problem.kind), int(problem.channels_last), problem.source[0]
    channels = problem.source[1] // groups, problem.out[1] // groups, groups
    settings = one + problem.stride + none + problem.padding + one + problem.dilation
    return [*head, *channels, *source, *taps, *settings]


def log2_or_zero(number: float) -> float:
    """The logarithm of a number from 1 up, else 0."""
    return math.log2(number) if number > 1 else 0.0


def network_inputs(
    row: Sequence[Any], direction: str, log2: Callable[[Any], Any] = log2_or_zero, least: Callable[..., Any] = min
) -> list[Any]:
    """What the network is told of a row: logarithms of lengths, their divisors, how tiles fill the GPU.

    With columns of many rows and NumPy's functions it gives columns. It uses operators alone that have both.
    """
    dims, kind, last, batch, inner, outer, groups = row[:7]
    s, k, t, p, d = (row[7 + 3 * i : 10 + 3 * i] for i in range(5))
    each = range(3)
    o = [(s[i] + 2 * p[i] - d[i] * (k[i] - 1) - 1) // t[i] + 1 for i in each]
    item = 4 - 2 * (kind > 0)
    unit = 16 // item
    pixels, out_pixels, taps = (lengths[0] * lengths[1] * lengths[2] for lengths in (s, o, k))
    wide, tall = round_up(inner, unit), round_up(outer, unit)
    found: list[Any] = []

    def logs(*values: Any) -> None:
        found.extend(log2(value) for value in values)

    def equal(value: Any, *numbers: int) -> None:
        found.extend(value == number for number in numbers)

    def multiples(value: Any, *units: int) -> None:
        found.extend(value % unit == 0 for unit in units)

    def every(flags: list[Any]) -> Any:
        return flags[0] & flags[1] & flags[2]

    logs(batch, inner, outer, groups, *s, *k, *o, *t, *d, *(length + 1 for length in p))
    equal(kind, 0, 1, 2)
    found.append(last)
    equal(dims, 1, 2, 3)
    equal(k[1], 1, 2, 3, 4, 5, 7)
    equal(k[2], 1, 2, 3, 4, 5, 7)
    equal(k[0], 1, 3)
    equal(t[2], 1, 2, 3, 4)
    unstrided, undilated = every([t[i] == 1 for i in each]), every([d[i] == 1 for i in each])
    unpadded, same = every([p[i] == 0 for i in each]), every([p[i] == d[i] * (k[i] - 1) // 2 for i in each])
    found += [unstrided, undilated, same, unpadded, (taps == 1) & unstrided & unpadded]
    found += [every([t[i] == k[i] for i in each]), s[1] == s[2], k[1] == k[2]]
    for channels in (inner, outer, groups):
        multiples(channels, 2, 4, 8, 16, 32, 64, 128)
        equal(channels, 1, 2, 3, 4)
    logs(wide / inner, tall / outer)
    for number in (pixels, out_pixels, batch, batch * out_pixels):
        multiples(number, 2, 4, 8, 16, 32)
    for number in (s[2], o[2]):
        multiples(number, 2, 4, 8)
    turned = last == 0
    source_copied = (wide > inner) | (turned & (pixels > 1) & (inner * groups > 1))
    out_copied = (tall > outer) | (turned & (out_pixels > 1) & (outer * groups > 1))
    found += [source_copied, out_copied, (wide > inner) | (tall > outer) | (turned & (taps > 1) & (inner > 1))]
    source, out = batch * groups * inner * pixels, batch * groups * outer * out_pixels
    weight = groups * inner * outer * taps
    logs(source * item, out * item, weight * item, pixels, out_pixels, taps, inner * groups, outer * groups)
    logs(1 + (source // inner * wide * source_copied + out // outer * tall * out_copied) * item)
    high, across, depth = {
        FORWARD: (batch * out_pixels, outer, inner * taps),
        DATA: (batch * pixels, inner, outer * taps),
        FILTER: (outer, inner * taps, batch * out_pixels),
    }[direction]
    work = 1.0 * high * across * depth * groups
    logs(high, across, depth, work, -(-depth // 32), -(-depth // 64))
    per_byte = work / ((source + out + weight) * item)
    found.append(log2(per_byte) - log2(1 / per_byte))
    multiples(depth, 8, 16, 32, 64)
    multiples(across, 8, 16, 32, 64)
    for unit in (32, 64, 128, 256):
        found += [high / round_up(high, unit), across / round_up(across, unit)]
    for rows, columns in _TILE_SHAPES:
        tiles = -(-high // rows) * -(-across // columns) * groups
        found += [log2(tiles), tiles / round_up(tiles, _MULTIPROCESSORS), least(tiles / _MULTIPROCESSORS, 6)]
    return found


class PlanNetwork:
    """The network of one direction. Its weights are stored in 4 bits (between hidden layers) and 8 bits."""

    def __init__(self, values: dict[str, Any], np: Any, direction: str) -> None:
        self._np = np
        self.mean, self.scale = values["mean"], 1 / values["std"]
        layers = int(values["layers"])
        self.layers = [(_from_bytes(values, "first", np), values["first_bias"])]
        self.layers += [(_from_half_bytes(values, f"layer{n}", np), values[f"layer{n}_bias"]) for n in range(layers)]
        self.head = _from_bytes(values, "head", np), values["head_bias"]
        listed = json.loads(bytes(values["plans"]).decode())
        self.listed = [EnginePlan(direction, engine, {int(k): v for k, v in knobs}) for engine, knobs in listed]

    def plans(self, problem: ConvolutionProblem, least: float) -> list[tuple[EnginePlan, float]]:
        """The plans with a share of this at `least`, the likeliest first."""
        np = self._np
        inputs = network_inputs(row_of(problem), problem.direction)
        hidden = (np.array(inputs, dtype=np.float32) - self.mean) * self.scale
        for number, (weights, bias) in enumerate(self.layers):
            added = np.maximum(_times(weights, hidden) + bias, 0)
            hidden = added if number == 0 else hidden + added
        scores = (_times(self.head[0], hidden) + self.head[1]) / DOUBT
        shares = np.exp(scores - scores.max())
        shares /= shares.sum()
        order = np.argsort(-shares)[:_MOST_LIKELY].tolist()
        return [
            (self.listed[place], float(shares[place])) for place in order if shares[place] >= least or place == order[0]
        ]


def _times(weights: Any, vector: Any) -> Any:
    """A matrix times a vector, row by row: for the whole, BLAS would start threads, which wait for each other where all
    cores are busy."""
    return (weights[:, None] @ vector)[:, 0]


def _from_bytes(values: dict[str, Any], name: str, np: Any) -> Any:
    return values[name].astype(np.float32) * values[f"{name}_scale"][:, None].astype(np.float32)


GROUP = 16  # weights that share a scale


def _from_half_bytes(values: dict[str, Any], name: str, np: Any) -> Any:
    packed = values[name]
    weights = np.empty((packed.shape[0], 2 * packed.shape[1]), dtype=np.float32)
    weights[:, 0::2] = (packed & 15).astype(np.float32) - 8
    weights[:, 1::2] = (packed >> 4).astype(np.float32) - 8
    scales = values[f"{name}_scale"].astype(np.float32)
    return (weights.reshape(len(weights), -1, GROUP) * scales[:, :, None]).reshape(weights.shape)


def needed_numpy() -> Any:
    """NumPy, which the Python that runs a script may not have; without convolutions it needs none."""
    try:
        import numpy
    except ModuleNotFoundError:
        raise MissingPackage("numpy", "estimates of convolutions") from None
    return numpy


@cache
def network(path: Path, direction: str) -> PlanNetwork | None:
    """The network of a direction in a file; `None` if there is no such file."""
    if not path.exists():
        return None
    np = needed_numpy()
    with np.load(path) as file:
        prefix = f"{direction}_"
        values = {name.removeprefix(prefix): file[name] for name in file if name.startswith(prefix)}
    return PlanNetwork(values, np, direction)
