"""The workspace of a cuDNN plan for a convolution, and the inputs of the trees that determine the rest.

A plan is an engine and its knobs: the tile of results that a block of threads computes, the number of blocks in a
cluster, the number of parts of a split sum. A network guesses the plan (`network.py`).

A plan's workspace is copies of tensors and a constant, selected by a small tree for each engine, and partial sums:

- A persistent kernel gives whole waves of tiles to the clusters of the GPU. The remaining tiles are split among all
  clusters, each of which keeps its part in single precision, and adds counters for a tree of additions.
- A sliced kernel keeps buffers of each tile, of filters all slices but one, and counters.
- A split kernel keeps each part of the filter's gradient, and a matrix product each part of its result.
- An indexed kernel keeps a table for each group that it works on: the place of each product's factor, or counters; and
  a filter's gradient in 16 bits in single precision, too.

A large tree for each engine decides the number of parts of a sum. cuDNN seems to have such trees, too: plain lengths
predict the number better than values derived from them.

These rules come from the cuDNN of an H200 alone.
"""

import tomllib
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from ullage.units import round_up
from ullage.virtual.cudnn.formulas import (
    DATA,
    FILTER,
    FORWARD,
    GROUPS_AT_ONCE,
    Lengths,
    packed_channels,
)
from ullage.virtual.releases import MEASURED_CUDNN

DATA_FOLDER = Path(__file__).with_name("data")

# Knobs, by cuDNN's numbers (cudnnBackendKnobType_t).
SPLIT_K, TILE, SPLIT_K_BUFFERS, TILE_K, SLICES, INDEX_MODE, WORKSPACE_KNOB = 0, 2, 12, 13, 17, 18, 25
CLUSTER_ROWS, CLUSTER_COLUMNS = 27, 28
_SEEN_KNOBS = (TILE, SPLIT_K_BUFFERS, TILE_K, INDEX_MODE, WORKSPACE_KNOB, CLUSTER_ROWS, CLUSTER_COLUMNS)


def figures_of(what: str) -> dict[str, Any]:
    """Return the figures of the measured cuDNN and card; another cuDNN or card has another file."""
    return tomllib.loads((DATA_FOLDER / f"{what}-cudnn{MEASURED_CUDNN}-sm_90.toml").read_text(encoding="utf-8"))


_ENGINES = figures_of("engines")


def _engines(kind: str) -> dict[str, tuple[int, ...]]:
    return {direction: tuple(engines) for direction, engines in _ENGINES[kind].items()}


PERSISTENT, SLICED, SPLIT, PRODUCT, INDEXED = map(_engines, ("persistent", "sliced", "split", "product", "indexed"))
_NOT_DETERMINISTIC, _WITHOUT_TENSOR_CORES = map(_engines, ("not_deterministic", "without_tensor_cores"))
_DEPTHWISE: int = _ENGINES["depthwise"]
_UNPADDED: list[int] = _ENGINES["unpadded"]
_TILES, _SLICED_TILES = (
    {int(number): (rows, columns) for number, (rows, columns) in _ENGINES[kind].items()}
    for kind in ("tiles", "sliced_tiles")
)
MULTIPROCESSORS: int = _ENGINES["multiprocessors"]
_CLUSTERS: dict[int, int] = {int(size): count for size, count in _ENGINES["clusters"].items()}
MOST_UNITS = 1 << 20  # units that a product keeps: a tree gives their number, plus this times the kind of unit
_DEPTH = 64  # of the products that a block adds at once
AS_MANY_AS_FIT = 1  # parts, as the trees name them; 0 is none


class EnginePlan(NamedTuple):
    """An engine of cuDNN with its knobs, but for the number of parts of a sum."""

    direction: str
    engine: int
    knobs: dict[int, int]

    def allowed(self, kind: str, tf32: bool = True, deterministic: bool = False) -> bool:
        """Check whether PyTorch accepts such a plan, see `CandidatePlan.allowed`."""
        if deterministic and self.engine in _NOT_DETERMINISTIC[self.direction]:
            return False
        return tf32 or kind != "f32" or self.engine in _WITHOUT_TENSOR_CORES[self.direction]

    @property
    def clusters(self) -> int:
        """The number of clusters of blocks that the GPU runs at once."""
        size = self.knobs.get(CLUSTER_ROWS, 1) * self.knobs.get(CLUSTER_COLUMNS, 1)
        return _CLUSTERS.get(size, MULTIPROCESSORS // size)


class Grid(NamedTuple):
    """A plan's division of a problem: `tiles` (of clusters, for a persistent kernel) of `tile_bytes`, in `steps` of
    products, and the number of `clusters` that run at once. For a product of matrices also the rows and columns of the
    result, the depth, and the numbers in 16 bytes (`unit`)."""

    tiles: int = 0
    steps: int = 0
    clusters: int = 1
    tile_bytes: int = 0
    rows: int = 0
    columns: int = 0
    depth: int = 0
    unit: int = 1

    @property
    def left(self) -> int:
        return self.tiles % self.clusters

    @property
    def most_parts(self) -> int:
        """The number of parts into which each remaining tile can be split."""
        return self.clusters // max(self.left, 1)


def matrix(direction: str, inner: Any, outer: Any, samples: Any) -> tuple[Any, Any, Any]:
    """Return the matrix product of a convolution of one tap: rows, columns and depth."""
    return {FORWARD: (samples, outer, inner), DATA: (samples, inner, outer), FILTER: (outer, inner, samples)}[direction]


# Units that a product keeps: pieces of 16 bytes, KiB, or parts of its result in single precision: as it is, with or
# without a constant, with rows or columns in multiples of 32, or in whole tiles.
PIECES, KIBS, RESULTS, BARE_RESULTS, TALL_RESULTS, WIDE_RESULTS, TILED_64, TILED_128 = range(8)
_MULTIPLES = {TALL_RESULTS: (32, 1), WIDE_RESULTS: (1, 32), TILED_64: (64, 64), TILED_128: (128, 128)}
AIMED = 8  # added to one of these: the number is how many parts were aimed at
PRODUCT_CONSTANT = 256


def result_bytes(unit: int, high: Any, across: Any) -> Any:
    """Return the bytes of one part of a product's result; also for columns."""
    rows, columns = _MULTIPLES.get(unit, (1, 1))
    return round_up(high, rows) * round_up(across, columns) * 4


def product_bytes(unit: int, count: Any, high: Any, across: Any) -> Any:
    """Return the bytes that a product of these rows and columns keeps; also for columns."""
    if unit in (PIECES, KIBS):
        return count * (16, 1024)[unit]
    constant = 0 if unit in (BARE_RESULTS, TILED_64, TILED_128) else PRODUCT_CONSTANT
    return round_up(count * result_bytes(unit, high, across), 16) + constant


def parts_aimed_at(count: Any, depth: Any, unit: Any) -> Any:
    """Return the actual parts of a sum of this depth for an intended number: all but the last are a multiple of 16
    bytes long, which is `unit` numbers. Also for columns."""
    return -(-depth // round_up(-(-depth // count), unit))


def grid(plan: EnginePlan, size: Lengths, alone: bool = True) -> Grid:
    """Return how a plan divides a problem into tiles; an empty grid if it keeps no partial sums."""
    direction, knobs = plan.direction, plan.knobs
    if plan.engine in PERSISTENT[direction]:
        rows, columns = _TILES.get(knobs[TILE], (0, 0))
        high, wide = knobs[CLUSTER_ROWS], knobs[CLUSTER_COLUMNS]
        if not rows:
            return Grid(clusters=plan.clusters)
        if direction == FILTER:
            down, across = -(-size.outer // rows), size.taps * -(-size.inner // columns)
            steps = -(-size.batch * size.out_pixels // _DEPTH)
        else:
            down, across = _tiles_of_result(direction, size, rows, columns)
            steps = size.taps * -(-(size.inner if direction == FORWARD else size.outer) // _DEPTH)
        tiles = -(-down // high) * -(-across // wide) * size.groups
        return Grid(tiles, steps, plan.clusters, rows * columns * 4 * high * wide)
    if plan.engine in PRODUCT[direction]:
        if not alone:  # a product for each sample, which no tree splits
            return Grid()
        high, across, depth = matrix(direction, size.inner, size.outer, size.batch * size.pixels)
        tiles = -(-high // 64) * -(-across // 64)
        return Grid(tiles, -(-depth // _DEPTH), MULTIPROCESSORS, 1, high, across, depth, size.unit)
    if plan.engine in INDEXED[direction]:
        factors = size.inner * size.taps
        table = 4 * factors if direction == FORWARD else 8 * -(-factors // 32) * -(-size.outer // 32)
        table = round_up(table, 16) if size.groups > 1 else table
        in_singles = 16 * (factors * size.outer * 4 // 16 + 1) if direction == FILTER and size.item == 2 else 0
        return Grid(min(size.groups, GROUPS_AT_ONCE), 0, 1, table + in_singles)
    steps = -(-size.batch * size.out_pixels // _DEPTH)
    if plan.engine == _DEPTHWISE and direction == FILTER:
        channels = 32 if knobs[TILE] == 3 and size.item == 4 else 64
        tile_bytes = 16 * size.threes * channels * size.item  # pieces of three by three become four by four
        return Grid(-(-size.groups // channels), steps, MULTIPROCESSORS, tile_bytes)
    if plan.engine in SLICED[direction]:
        rows, columns = _SLICED_TILES.get(knobs[TILE], (0, 0))
        return Grid(_sliced_tiles(plan, size, rows, columns), steps, MULTIPROCESSORS, rows * columns * 4)
    if plan.engine in SPLIT[direction]:
        tiles = -(-size.tall // 64) * -(-size.wide * size.taps // 64) * size.groups
        at_once = min(size.groups, GROUPS_AT_ONCE)
        return Grid(tiles, steps, MULTIPROCESSORS, at_once * size.wide * size.tall * size.taps * 4)
    return Grid()


def _tiles_of_result(direction: str, size: Lengths, rows: int, columns: int) -> tuple[int, int]:
    """Return the tiles of an output, or of the gradient of a source, down and across."""
    pixels, channels = (size.out_pixels, size.outer) if direction == FORWARD else (size.pixels, size.inner)
    return -(-size.batch * pixels // rows), -(-channels // columns)


def _sliced_tiles(plan: EnginePlan, size: Lengths, rows: int, columns: int) -> int:
    if not rows:
        return 0
    if plan.direction != FILTER:
        return int(prod(_tiles_of_result(plan.direction, size, rows, columns)) * size.groups)
    if size.groups > 1:  # packed groups: a tile has several small groups, for each tap
        common, channels = packed_channels(size.inner, size.outer, size.groups)
        if common < rows:
            return -(-channels // rows) * size.taps * max(1, rows // columns)
        return int(size.groups * -(-common // rows) * -(-common * size.taps // columns))
    inner = size.inner if plan.engine in _UNPADDED else size.wide
    return int(-(-size.outer // rows) * -(-inner * size.taps // columns))


def partial_bytes(plan: EnginePlan, cut: Grid, parts: int) -> int:
    if plan.engine in PRODUCT[plan.direction]:
        unit, count = divmod(parts, MOST_UNITS)
        return product_bytes(unit, count, cut.rows, cut.columns) if count else 0
    if plan.engine in SPLIT[plan.direction]:
        return parts * cut.tile_bytes
    if plan.engine in INDEXED[plan.direction]:
        return cut.tiles * cut.tile_bytes
    if plan.engine in SLICED[plan.direction]:
        counters = 4 * (parts + 1) if plan.engine != _DEPTHWISE else 4 * parts
        return cut.tiles * (parts * cut.tile_bytes + counters) if cut.tile_bytes else 0
    if parts < 2 or plan.engine not in PERSISTENT[plan.direction]:
        return 0
    blocks = cut.left * plan.knobs[CLUSTER_ROWS] * plan.knobs[CLUSTER_COLUMNS]
    return cut.left * parts * cut.tile_bytes + 4 * blocks * _additions(parts)


def parts_by(plan: EnginePlan, cut: Grid, named: int) -> int:
    """Return the parts of a sum by a tree's number: a sliced kernel without one has one buffer, a persistent kernel as
    many parts as the GPU has room for."""
    if plan.engine in PERSISTENT[plan.direction]:
        parts = cut.most_parts if named == AS_MANY_AS_FIT else named
        return parts if parts > 1 and 0 < cut.left * parts <= cut.clusters else 0
    if plan.engine in PRODUCT[plan.direction] and named >= AIMED * MOST_UNITS:
        kind, count = divmod(named - AIMED * MOST_UNITS, MOST_UNITS)
        return kind * MOST_UNITS + parts_aimed_at(count, cut.depth, cut.unit) if cut.rows else 0
    if plan.engine in SLICED[plan.direction] and not plan.knobs.get(SPLIT_K_BUFFERS, 1):
        return 1
    return named if cut.tile_bytes else 0


def _additions(parts: int) -> int:
    """Return the number of additions by which a tree adds the parts, two at a time."""
    if parts < 2:
        return 0
    half = -(-parts // 2)
    return half + _additions(half)


def product_inputs(size: Lengths, direction: str) -> list[Any]:
    """Return the inputs of the trees for a matrix product: lengths, tiles over the result, and divisors of the lengths.
    Also for columns."""
    inner, outer, samples = size.inner, size.outer, size.batch * size.pixels
    high, across, depth = matrix(direction, inner, outer, samples)
    tiles = [-(-high // rows) * -(-across // columns) for rows, columns in _PRODUCT_TILES]
    divisors = [number & -number for number in (inner, outer, samples)]
    work = high * across, high * across * depth, -(-depth // 32), -(-depth // 64)
    numbers = size.kind, size.last, size.batch, inner, outer, size.pixels, samples
    return [size.kind > 0, *numbers, *tiles, *divisors, *work]


_PRODUCT_TILES = ((64, 64), (128, 128), (128, 64), (64, 128), (256, 128), (128, 256), (32, 32))


def fallback(direction: str) -> EnginePlan:
    """Return the plan that PyTorch tries first if cuDNN's heuristics name none."""
    return EnginePlan(direction, 1, {TILE: 4})


def part_knobs(plan: EnginePlan) -> tuple[int, int]:
    return plan.knobs.get(TILE, -9), plan.knobs.get(WORKSPACE_KNOB, -9)


def tree_inputs(plan: EnginePlan, size: Lengths, cut: Grid, parts: int) -> list[int]:
    numbers = [size.last, size.kind, size.dims, size.wide > size.inner, size.tall > size.outer]
    numbers += [size.taps, size.pixels > 1, size.out_pixels > 1, size.groups, size.inner, size.outer, size.batch]
    numbers += [max(size.stride), max(size.dilation), max(size.padding)]
    numbers += [number & -number for number in (size.inner, size.outer, size.out_pixels, size.pixels)]
    numbers += [size.out_pixels, size.pixels, size.inner * size.groups, size.outer * size.groups, *size.filter]
    numbers += [cut.tiles > cut.clusters, cut.tiles, cut.left, cut.most_parts, cut.steps]
    numbers += [cut.steps // max(cut.most_parts, 1), cut.tiles // cut.clusters, cut.clusters, parts > 0]
    numbers += [size.source[2], size.source[1], size.out[2], size.inner - size.outer]
    numbers.append(max(size.inner, size.outer))
    return [int(number) for number in numbers] + [plan.knobs.get(knob, -9) for knob in _SEEN_KNOBS]
