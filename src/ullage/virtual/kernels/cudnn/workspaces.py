"""The workspace that cuDNN takes for a convolution, looked up or guessed.

cuDNN is closed source. Formulas were fitted to measured calls (`ullage.research.cudnn_tables`): almost every
workspace is a sum of copies in another layout (NHWC for NCHW tensors, channels padded for tensor cores), partial
results of a split sum, and a constant. Which formula applies depends on the engine that cuDNN chooses. A table of
measured calls has the answer for one kind of GPU; decision trees, grown on the same measurements, guess it for all
other calls.

Everything was measured on an H200. On other generations the copies are of the same kind, but constants and choices
may differ until somebody measures them. A table for another GPU (`convolution_table*.npz`) put into `data/` serves
the GPUs that its header names.
"""

from __future__ import annotations

import hashlib
import json
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from ullage.errors import MissingPackage

FORWARD, DATA, FILTER = "f", "d", "w"
ITEM_BYTES = {"f32": 4, "f16": 2, "bf16": 2}

# How a tensor is padded: not taken at all; as it is; channels to 16 bytes; channels of a group, of input and output
# alike, to 32 elements. The filters of a depthwise convolution are also padded to 64 channels.
NONE, PLAIN, PADDED, WIDE, SIXTY_FOUR = range(5)

_RUNNER_UP = 0.02  # share of the votes from which another size counts as possible
# A guess on which all trees agree can fail too: of 145 such calls that nothing was fitted on, 139 were exact. A bound
# allows for twice this share of the copies, which was enough for all of them (tests/virtual/test_convolutions.py).
_LEAST_DOUBT = 0.02


class ConvolutionProblem(NamedTuple):
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
    """Bytes of a workspace: its likeliest `size`, and the `larger` one that is not unlikely.

    `guessed` is false for a size that was measured. `surprise` says how far a guess may fail beyond that: bytes of
    copies of all its tensors, times the share of the votes against it.
    """

    size: int
    larger: int
    guessed: bool = False
    surprise: int = 0


class Trial(NamedTuple):
    """What `torch.backends.cudnn.benchmark` tries at the first call of a problem.

    `sizes` are the workspaces of cuDNN's plans, the largest first; that one may also be `larger`. `winner` is the
    workspace of the plan that proves to be the fastest.
    """

    sizes: tuple[int, ...]
    larger: int
    winner: Workspace
    guessed: bool = True


TIMES_AN_OCTAVE = 16


class Formula(NamedTuple):
    """A workspace as a sum: copies of the tensors, partial results in single precision, constants."""

    source: int  # a padding
    out: int
    weight: int
    partial: int
    partials: int  # how many; a negative number counts them by the sample
    constant: int
    per_group: int
    transform: int = 0  # 1: Fourier transforms of all tensors, see `transform_bytes`
    times: int = 0  # the padded copies of all tensors times 2 ** (times / TIMES_AN_OCTAVE), unless it is 0


class Terms(NamedTuple):
    """Bytes of what a workspace is made of; a tuple has a place for each padding."""

    source: tuple[int, ...]
    out: tuple[int, ...]
    weight: tuple[int, ...]
    partial: tuple[int, ...]  # one partial result: the tensor that is computed, in single precision
    batch: int
    groups: int
    transform: int = 0


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


def terms(problem: ConvolutionProblem) -> Terms:
    """What a workspace for this problem can be made of.

    >>> sizes = (1, 3, 8, 8), (16, 3, 3, 3), (1, 16, 8, 8)
    >>> layer = ConvolutionProblem("f", *sizes, (1, 1), (1, 1), (1, 1), 1, "f16", False)
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
    return Terms(source, out, weight, tuple(partial), problem.source[0], groups, transform_bytes(problem))


_TILE = 32  # lengths of the Fourier transforms by which a data gradient is computed
_TILE_BYTES = _TILE * (_TILE // 2 + 1) * 8
_LEAST_TRANSFORM, _LONGEST_TRANSFORM = 16, 256
_GROUPS_AT_ONCE = 8


def transform_bytes(problem: ConvolutionProblem) -> int:
    """The workspace of cuDNN's plans by Fourier transforms, by far the largest that `cudnn.benchmark` tries.

    Forward and filter gradient transform whole images, of the next power of two in length, twice each: once in either
    layout. Data gradients go tile by tile. A strided one is that of a filter with more channels. With channels last,
    and for groups, tensors are copied first.

    >>> sizes = (64, 1344, 14, 14), (2520, 1344, 1, 1), (64, 2520, 14, 14)
    >>> transform_bytes(ConvolutionProblem("f", *sizes, (1, 1), (0, 0), (1, 1), 1, "f32", False))
    8015099904
    """
    if len(problem.source) != 4:
        return 0
    groups = problem.groups
    batch, channels, height, width = problem.source
    inner, outer = channels // groups, problem.out[1] // groups
    rows, columns = problem.weight[2:]
    item = ITEM_BYTES.get(problem.kind, 8)
    source = batch * inner * height * width * item
    out = batch * outer * product(problem.out[2:]) * item
    weight = inner * outer * rows * columns * item
    copies = source + out + 16 + (weight if rows * columns > 1 else 0)
    through, kept, written = batch * inner, inner * outer, batch * outer
    if problem.direction == DATA:
        step = problem.stride[0]
        if step > 1:
            source_height, source_width = -(-height // step), -(-width // step)
            rows, columns = (
                _reach(length, padding, step) for length, padding in zip((rows, columns), problem.padding, strict=True)
            )
            through, kept = step * step * through, step * step * kept
            tall, wide = problem.out[2:] if rows % 2 else (source_height + rows - 1, source_width + columns - 1)
            copies = through * source_height * source_width + written * tall * wide + kept * rows * columns
            copies = copies * item + 16
            height, width = source_height, source_width
        if max(rows, columns) > _TILE:
            return 0
        tiles = min(2, -(-height // (_TILE + 1 - rows)) * -(-width // (_TILE + 1 - columns)))
        size = _TILE_BYTES * (tiles * through + kept + tiles * written)
        if step > 1:
            return (size + copies) * min(groups, _GROUPS_AT_ONCE)
    else:
        length = _LEAST_TRANSFORM
        while length < max(height + 2 * problem.padding[0], width + 2 * problem.padding[1]):
            length *= 2
        both = 2 * length * (length // 2 + 1) * 8
        if problem.direction == FORWARD:
            size = both * max(through + kept, written) + round_up(weight, 16)
        else:
            size = both * max(through + written, kept) + round_up(out, 16)
    if groups > 1:
        return (size + source + out + 16) * min(groups, _GROUPS_AT_ONCE)
    return size + copies if problem.channels_last else size


def transforms(problem: ConvolutionProblem) -> bool:
    """Whether cuDNN has plans by Fourier transforms for such a problem at all; which it names is another question.

    >>> sizes = (1, 3, 8, 8), (16, 3, 3, 3), (1, 16, 8, 8)
    >>> transforms(ConvolutionProblem("f", *sizes, (1, 1), (1, 1), (1, 1), 1, "bf16", False))
    False
    """
    if len(problem.source) != 4 or problem.kind not in ("f32", "f16"):
        return False
    if problem.direction == DATA:
        return max(problem.weight[2:]) > 2 and max(problem.dilation) == 1
    lengths = (length + 2 * padding for length, padding in zip(problem.source[2:], problem.padding, strict=True))
    if problem.stride != (1, 1) or max(lengths) > _LONGEST_TRANSFORM:
        return False
    return problem.direction == FORWARD or problem.kind == "f32"


def _reach(length: int, padding: int, step: int) -> int:
    """Taps of a filter along one dimension once a stride has become channels.

    >>> _reach(4, 1, 2), _reach(3, 1, 2)
    (3, 2)
    """
    return (step - 1 + padding) // step + (length - 1 - padding) // step + 1


def evaluate(formula: Formula, parts: Terms) -> int:
    """Bytes by a formula; a padding that a problem does not know is the last one it knows.

    >>> evaluate(Formula(PLAIN, PLAIN, NONE, NONE, 0, 16, 0), Terms((0, 100), (0, 50), (0, 9), (0, 36), 2, 1))
    166
    """
    count = formula.partials if formula.partials >= 0 else -formula.partials * parts.batch
    size = formula.constant + formula.per_group * parts.groups + count * _padded(parts.partial, formula.partial)
    size += _padded(parts.source, formula.source) + formula.transform * parts.transform
    if formula.times:
        size += int(all_copies(parts) * 2 ** (formula.times / TIMES_AN_OCTAVE))
    return size + _padded(parts.out, formula.out) + _padded(parts.weight, formula.weight)


def all_copies(parts: Terms) -> int:
    """Bytes of copies of all tensors, channels padded to 16 bytes."""
    return sum(_padded(sizes, PADDED) for sizes in (parts.source, parts.out, parts.weight))


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
        return Workspace(0, 0, guessed=True)
    size = max(shares, key=lambda candidate: (shares[candidate], candidate))
    total = sum(shares.values())
    largest = max(size, *(other for other, share in shares.items() if share >= _RUNNER_UP * total))
    copies = all_copies(parts)
    against = max(1 - shares[size] / total, _LEAST_DOUBT)
    return Workspace(size, largest, guessed=True, surprise=int(copies * against))


# The table and the trees. `ullage convolutions fit` writes them; they are read at the first convolution.

DATA_FOLDER = Path(__file__).with_name("data")
TABLE, TREES = "convolution_table.npz", "convolution_trees.npz"
TRIAL_TABLE, TRIAL_TREES = "trial_table.npz", "trial_trees.npz"
OTHERS, TRANSFORM = "o", "t"  # the largest plan without Fourier transforms, and whether there is one with them
_MULTIPROCESSORS = 132  # of the GPU that was measured
# 1 in 17.7 million problems that were never measured is taken for one of the 996,558 in the table.
HASH_BITS = 44


use_table = True  # False: the trees alone answer, as a benchmark on models that were never measured needs it


class WorkspaceTable(NamedTuple):
    """Sorted hashes of problems and their workspaces; the header names the GPU, driver and libraries."""

    header: dict[str, Any]
    hashes: Any
    sizes: Any


class WorkspaceTrees(NamedTuple):
    """The trees of one direction, joined end to end in depth-first order; a leaf has feature -1."""

    roots: list[int]
    feature: memoryview
    threshold: memoryview
    right: memoryview  # a node's left child follows it; for a leaf, the place of its first vote
    ends: memoryview  # of the votes of a leaf
    labels: memoryview
    shares: memoryview
    formulas: list[Formula]


def hash_of(problem: ConvolutionProblem) -> int:
    """A hash that stays the same from run to run.

    >>> sizes = (1, 3, 8, 8), (16, 3, 3, 3), (1, 16, 8, 8)
    >>> layer = ConvolutionProblem("f", *sizes, (1, 1), (1, 1), (1, 1), 1, "f16", False)
    >>> 0 <= hash_of(layer) < 2**HASH_BITS
    True
    """
    text = repr(tuple(problem)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> (64 - HASH_BITS)


def _numpy() -> Any:
    """NumPy, which the Python that runs a script may not have; without convolutions it needs none."""
    try:
        import numpy
    except ModuleNotFoundError:
        raise MissingPackage("numpy", "estimates of convolutions") from None
    return numpy


@cache
def tables(folder: Path, kind: str = "convolution") -> dict[tuple[tuple[int, ...], int], Path]:
    """The tables in a folder by compute capability and number of multiprocessors; only their headers are read."""
    found, np = {}, _numpy()
    for path in sorted(folder.glob(f"{kind}_table*.npz")):
        with np.load(path) as file:
            header = json.loads(bytes(file["header"]).decode())
        found[tuple(header["compute_capability"]), header["multiprocessors"]] = path
    return found


@cache
def table(path: Path) -> WorkspaceTable:
    """Read a table of measured calls."""
    np = _numpy()
    with np.load(path) as file:
        header = json.loads(bytes(file["header"]).decode())
        hashes = np.cumsum(file["steps"], dtype=np.uint64)
        sizes = np.zeros(len(hashes), dtype=np.uint64)
        sizes[file["nonzero"].view(bool)] = file["sizes"]
    return WorkspaceTable(header, hashes, sizes)


def measured(
    problem: ConvolutionProblem,
    capability: tuple[int, int] | None,
    multiprocessors: int | None,
    kind: str = "convolution",
) -> int | None:
    """The measured workspace of this very problem on this kind of GPU; of `kind` "trial", the largest plan's."""
    if not use_table or capability is None or multiprocessors is None:
        return None
    path = tables(DATA_FOLDER, kind).get((tuple(capability), multiprocessors))
    if path is None:
        return None
    found, wanted = table(path), _numpy().uint64(hash_of(problem))
    place = int(found.hashes.searchsorted(wanted))
    if place == len(found.hashes) or found.hashes[place] != wanted:
        return None
    return int(found.sizes[place])


class ProblemFeatures(NamedTuple):
    """Whole numbers that cuDNN's choice may turn on: sizes, alignment, and the matrix product that a call amounts to.

    WorkspaceTrees name a feature by its place, so names may change and places may not.
    """

    type: int  # 0 for f32, 1 for f16, 2 for bf16
    channels_last: int
    batch: int
    group_inputs: int  # channels of a group
    group_outputs: int
    groups: int
    source_height: int
    source_width: int
    source_pixels: int
    out_pixels: int
    filter_height: int
    filter_width: int
    filter_taps: int  # elements of the filter in one channel
    stride: int
    padding: int
    dilation: int
    dimensions: int
    group_inputs_mod_8: int
    group_outputs_mod_8: int
    out_pixels_alignment: int
    group_inputs_alignment: int
    group_outputs_alignment: int
    out_rows: int  # rows of the output as a matrix
    source_rows: int
    depth: int  # of the matrix product that the forward pass amounts to
    data_depth: int  # and the data gradient
    forward_tiles_128: int  # tiles of 128 by 128 that cover the result
    filter_tiles_128: int
    data_tiles_128: int
    source_bytes: int
    out_bytes: int
    weight_bytes: int
    products_in_4096s: int  # multiplications
    inputs_per_1000_outputs: int
    rows_per_100_outputs: int
    most_channels: int
    fewest_channels: int
    forward_tiles_256_by_128: int
    forward_tiles_64: int
    data_tiles_64: int
    filter_tiles_64: int
    source_pixels_alignment: int  # the largest power of two that divides it, up to 16 (channels: 256)
    channels_alignment: int  # what both numbers of channels are multiples of, up to 16
    all_lengths_alignment: int  # and all lengths of the matrices too
    padded_inputs_per_1000: int  # what padding to 16 bytes costs
    padded_outputs_per_1000: int
    padded_weight_per_1000: int
    tiles_filled_per_1000: int  # how well tiles fill an H200
    products_per_byte: int
    products_per_source_byte: int
    products_per_out_byte: int
    is_matrix_product: int  # a filter of one tap, without stride and padding
    group_inputs_times_outputs: int
    group_inputs_plus_outputs: int
    batch_times_height: int
    out_width: int
    transform_kib: int  # by Fourier transforms, see `transform_bytes`
    transform_per_100_copies: int


def features(problem: ConvolutionProblem) -> ProblemFeatures:
    """The features of a problem."""
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
    transform = transform_bytes(problem)
    plain = taps == 1 and problem.stride[-1] == 1 and problem.padding[-1] == 0  # a matrix product
    return ProblemFeatures(
        type={"f32": 0, "f16": 1, "bf16": 2}[problem.kind],
        channels_last=int(problem.channels_last),
        batch=batch,
        group_inputs=inner,
        group_outputs=outer,
        groups=groups,
        source_height=source[-2],
        source_width=source[-1],
        source_pixels=pixels,
        out_pixels=out_pixels,
        filter_height=weight[-2],
        filter_width=weight[-1],
        filter_taps=taps,
        stride=problem.stride[-1],
        padding=problem.padding[-1],
        dilation=problem.dilation[-1],
        dimensions=len(source),
        group_inputs_mod_8=inner % 8,
        group_outputs_mod_8=outer % 8,
        out_pixels_alignment=min(out_pixels & -out_pixels, 16),
        group_inputs_alignment=min(inner & -inner, 256),
        group_outputs_alignment=min(outer & -outer, 256),
        out_rows=rows,
        source_rows=batch * pixels,
        depth=depth,
        data_depth=outer * taps,
        forward_tiles_128=tiles,
        filter_tiles_128=filter_tiles,
        data_tiles_128=data_tiles,
        source_bytes=source_bytes,
        out_bytes=out_bytes,
        weight_bytes=weight_bytes,
        products_in_4096s=min(products >> 12, 2**31 - 1),
        inputs_per_1000_outputs=1000 * inner // outer,
        rows_per_100_outputs=100 * rows // (outer * groups),
        most_channels=max(outer * groups, source[1]),
        fewest_channels=min(outer * groups, source[1]),
        forward_tiles_256_by_128=-(-rows // 256) * -(-outer // 128) * groups,
        forward_tiles_64=-(-rows // 64) * -(-outer // 64) * groups,
        data_tiles_64=-(-batch * pixels // 64) * -(-inner // 64) * groups,
        filter_tiles_64=-(-outer // 64) * -(-depth // 64) * groups,
        source_pixels_alignment=min(pixels & -pixels, 16),
        channels_alignment=_multiple(inner | outer),
        all_lengths_alignment=_multiple(inner | outer | pixels | out_pixels),
        padded_inputs_per_1000=1000 * inner_padded // inner,
        padded_outputs_per_1000=1000 * outer_padded // outer,
        padded_weight_per_1000=1000 * inner_padded * outer_padded // (inner * outer),
        tiles_filled_per_1000=1000 * tiles // round_up(tiles, _MULTIPROCESSORS),
        products_per_byte=products // (source_bytes + out_bytes + weight_bytes),
        products_per_source_byte=products // source_bytes,
        products_per_out_byte=products // out_bytes,
        is_matrix_product=int(plain),
        group_inputs_times_outputs=inner * outer,
        group_inputs_plus_outputs=inner + outer,
        batch_times_height=batch * source[-2],
        out_width=out[-1],
        transform_kib=transform >> 10,
        transform_per_100_copies=100 * transform // (source_bytes + out_bytes + weight_bytes),
    )


def _multiple(number: int) -> int:
    """The largest power of two, up to 16, of which the number is a multiple."""
    return min(number & -number, 16)


@cache
def trees(path: Path) -> dict[str, WorkspaceTrees]:
    """Read the trees in a file, by what they are for: a direction, and for trials one of their two questions."""
    if not path.exists():
        return {}
    found, np = {}, _numpy()
    with np.load(path) as file:
        for direction in [name.removesuffix("_roots") for name in file if name.endswith("_roots")]:
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
            found[direction] = WorkspaceTrees(roots=part["roots"].tolist(), formulas=formulas, **views)
    return found


def votes(problem: ConvolutionProblem, file: str = TREES, question: str = "") -> list[tuple[Formula, float]]:
    """What the trees say of a problem: formulas, each with its shares of the measured calls in the leaves."""
    grown = trees(DATA_FOLDER / file).get(problem.direction + question)
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
def workspace(
    problem: ConvolutionProblem, capability: tuple[int, int] | None, multiprocessors: int | None
) -> Workspace:
    """The workspace of a problem: measured for this kind of GPU, or else what the trees say.

    Not covered: double precision, which runs without tensor cores and is taken to need none.

    >>> sizes = (8, 64, 8, 8), (64, 64, 3, 3), (8, 64, 8, 8)
    >>> layer = ConvolutionProblem("f", *sizes, (1, 1), (1, 1), (1, 1), 1, "f16", False)
    >>> found = workspace(layer, (8, 0), 108)
    >>> 0 <= found.size <= found.larger
    True
    """
    if problem.kind not in ITEM_BYTES:
        # Double precision was not measured. A bound allows for copies of all tensors.
        tensors = sum(map(product, (problem.source, problem.weight, problem.out)))
        return Workspace(0, 0, guessed=True, surprise=tensors * 8 // 2)
    known = measured(problem, capability, multiprocessors)
    if known is not None:
        return Workspace(known, known)
    return by_votes(votes(problem), terms(problem))


@lru_cache(maxsize=65536)
def trial(
    problem: ConvolutionProblem,
    capability: tuple[int, int] | None,
    multiprocessors: int | None,
    tf32: bool,
    deterministic: bool,
) -> Trial:
    """What `cudnn.benchmark` tries for a problem: asked of cuDNN for this kind of GPU, or else what the trees say.

    The fastest plan is taken to be the one that cuDNN names first: so it was, as far as memory goes, for 83 % of the
    problems that were run. The bound allows for one that copies all tensors.

    Not covered: plans that `allow_tf32=False` and `deterministic=True` rule out, which are seldom the largest.
    """
    first = workspace(problem, capability, multiprocessors)
    if problem.kind not in ITEM_BYTES:
        return Trial((), first.surprise, first)
    parts = terms(problem)
    winner = first._replace(larger=max(first.larger, all_copies(parts)), guessed=True)
    known = measured(problem, capability, multiprocessors, "trial")
    others = by_votes(votes(problem, TRIAL_TREES, OTHERS), parts)
    transform = by_votes(votes(problem, TRIAL_TREES, TRANSFORM) if transforms(problem) else [], parts)
    guesses = {first.size, others.size, transform.size} - {0}
    if known is not None:
        sizes = {known, *(size for size in guesses if size < known)}
        return Trial(tuple(sorted(sizes, reverse=True)), known, winner, guessed=False)
    return Trial(tuple(sorted(guesses, reverse=True)), max(first.size, others.larger, transform.larger), winner)
