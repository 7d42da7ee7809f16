"""Formulas for cuDNN's workspaces over the shapes of a convolution.

cuDNN is closed source. Formulas were fitted to measured calls and to cuDNN's own answers about its plans
(`ullage_lab.train.workspaces`). Almost every workspace is a sum of copies in another layout (NHWC for NCHW tensors,
channels padded for tensor cores), partial results of a split sum, a constant, and buffers of the plan's method: Fourier
or Winograd transforms, the parts of a strided gradient, or tiles of results in single precision. Which formula applies
depends on the engine that cuDNN selects; `workspaces.py` knows or guesses it.
"""

from collections.abc import Sequence
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple, Self

from ullage.units import round_up

FORWARD, DATA, FILTER = "f", "d", "w"
ITEM_BYTES = {"f32": 4, "f16": 2, "bf16": 2}
KINDS = tuple(ITEM_BYTES)

# The padding of a tensor's copy: no copy; as it is; channels to 16 bytes; channels of a group, of input and output
# alike, to a power of two. The filters of a depthwise convolution are also padded to 64 channels.
NONE, PLAIN, PADDED, WIDE, SIXTY_FOUR = range(5)

_RUNNER_UP = 0.02  # share of the votes from which another size counts as possible
# A guess on which all trees agree can fail, too: of 145 such calls outside the fit, 139 were exact. A bound
# allows for twice this share of the copies, which was enough for all of them (tests/virtual/test_convolutions.py).
_LEAST_DOUBT = 0.02


class ConvolutionProblem(NamedTuple):
    """A convolution in cuDNN's terms: a transposed one is the data gradient of the one it transposes."""

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

    @classmethod
    def of(cls, values: Sequence[Any]) -> Self:
        return cls._make(tuple(value) if isinstance(value, list) else value for value in values)


class Lengths:
    """A problem in whole numbers, or many in columns of them: the input of rules, trees and the network.

    A `row` is the form in data files: dimensions, type (a place in `KINDS`), channels last, batch, channels and outputs
    of a group, groups; then three each of: source, filter, stride, padding, dilation. `threes` are taps in pieces of
    three by three, `wide` and `tall` are the channels of a group padded to 16 bytes.
    """

    def __init__(self, row: Sequence[Any]) -> None:
        self.row = row
        self.dims, self.kind, self.last, self.batch, self.inner, self.outer, self.groups = row[:7]
        threes = (row[7 + 3 * part : 10 + 3 * part] for part in range(5))
        self.source, self.filter, self.stride, self.padding, self.dilation = threes
        settings = zip(self.source, self.filter, self.stride, self.padding, self.dilation, strict=True)
        self.out = [
            (long + 2 * pad - dilation * (taps - 1) - 1) // step + 1 for long, taps, step, pad, dilation in settings
        ]
        self.pixels, self.out_pixels, self.taps = map(prod, (self.source, self.out, self.filter))
        self.threes = prod(-(-length // 3) for length in self.filter)
        self.item = 4 - 2 * (self.kind > 0)
        self.unit = 16 // self.item
        self.wide, self.tall = round_up(self.inner, self.unit), round_up(self.outer, self.unit)


@lru_cache(maxsize=1024)
def lengths(problem: ConvolutionProblem) -> Lengths:
    flat, groups = len(problem.source) == 4, problem.groups
    one, none = ((1,), (0,)) if flat else ((), ())
    source, taps = one + problem.source[2:], one + problem.weight[2:]
    dims = 3 if not flat else 1 if source[1] == taps[1] == 1 else 2
    head = dims, KINDS.index(problem.kind), int(problem.channels_last), problem.source[0]
    channels = problem.source[1] // groups, problem.out[1] // groups, groups
    settings = one + problem.stride + none + problem.padding + one + problem.dilation
    return Lengths([*head, *channels, *source, *taps, *settings])


TENSOR_CORE, DOWN_CONVERT, FOURIER_NOTE, NONDETERMINISTIC = 0, 1, 3, 4  # cudnnBackendNumericalNote_t


class CandidatePlan(NamedTuple):
    """A plan that cuDNN would try: its engine, its numerical notes as bits, and the bytes of its workspace."""

    engine: int
    notes: int
    workspace: int

    def allowed(self, kind: str, tf32: bool = True, deterministic: bool = False) -> bool:
        """Conv_v8.cpp, filterEngineConfigs."""
        refused = 1 << DOWN_CONVERT
        if deterministic:
            refused |= 1 << NONDETERMINISTIC
        if kind == "f32" and not tf32:
            refused |= 1 << TENSOR_CORE
        return not self.notes & refused


class Workspace(NamedTuple):
    """Bytes of a workspace: its likeliest `size`, and the `larger` one that is not unlikely. `surprise` is the possible
    error of a guess beyond that: bytes of copies of all its tensors, times the share of the votes against it."""

    size: int
    larger: int
    guessed: bool = False
    surprise: int = 0


class Trial(NamedTuple):
    """The plans that `torch.backends.cudnn.benchmark` tries at the first call of a problem: their workspaces, the
    largest first (that one may also be `larger`), and the workspace of the fastest (`winner`)."""

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
    partials: int  # their number; a negative number counts them for each sample
    constant: int
    per_group: int
    buffer: int = 0  # which of `Terms.buffers`
    times: int = 0  # the padded copies of all tensors times 2 ** (times / TIMES_AN_OCTAVE), unless it is 0


class Terms(NamedTuple):
    """Bytes of the possible parts of a workspace; a tuple has a place for each padding."""

    source: tuple[int, ...]
    out: tuple[int, ...]
    weight: tuple[int, ...]
    partial: tuple[int, ...]  # one partial result: the tensor that is computed, in single precision
    batch: int
    groups: int
    buffers: tuple[int, ...] = (0,)  # of a plan's method, besides copies, see `buffers`


# Places in `Terms.buffers`.
NO_BUFFER, FOURIER, WINOGRAD, PHASES, TILES_32, TILES_64, TILES_128, COPIES, PADDED_COPIES = range(9)
NEEDED, NEEDED_BY_GROUP = 9, 10  # `needed_copies`, with alignment once or for each group
AT_ONCE, AT_ONCE_BUT_FILTER = 11, 12  # padded copies of the groups that are computed at once
PACKED, PACKED_BUT_FILTER = 13, 14  # copies of all groups, packed as `packed_channels` says
PADDED_PHASES = 15  # of the groups that are computed at once, with alignment
OTHER_WINOGRAD = 16  # with padded batches where `WINOGRAD` does not pad them, and the other way round
BY_SAMPLE = 17  # filters of a depthwise convolution for each sample
SINGLES = 18  # copies of all tensors in single precision


def evaluate(formula: Formula, parts: Terms) -> int:
    """Return bytes by a formula; a padding that a problem does not have is the last one it has."""
    count = formula.partials if formula.partials >= 0 else -formula.partials * parts.batch
    size = formula.constant + formula.per_group * parts.groups + count * _padded(parts.partial, formula.partial)
    size += _padded(parts.source, formula.source) + parts.buffers[formula.buffer]
    if formula.times:
        size += int(all_copies(parts) * 2 ** (formula.times / TIMES_AN_OCTAVE))
    return size + _padded(parts.out, formula.out) + _padded(parts.weight, formula.weight)


def all_copies(parts: Terms) -> int:
    return sum(_padded(sizes, PADDED) for sizes in (parts.source, parts.out, parts.weight))


def _padded(sizes: tuple[int, ...], padding: int) -> int:
    return sizes[min(padding, len(sizes) - 1)]


def by_votes(votes: list[tuple[Formula, float]], parts: Terms) -> Workspace:
    """Return the size with the most votes, without those for Fourier transforms of a problem without such plans."""
    shares = shares_of_votes(votes, parts)
    return by_shares(shares, max(shares, key=lambda size: (shares[size], size), default=0), parts)


def by_median(votes: list[tuple[Formula, float]], parts: Terms) -> Workspace:
    """Return the median of the votes, the size with most votes if there is one. Similar formulas share their votes, so
    a distant one can have more than any of them."""
    shares = shares_of_votes(votes, parts)
    left = sum(shares.values()) / 2
    size = 0
    for size in sorted(shares):
        left -= shares[size]
        if left <= 0:
            break
    return by_shares(shares, size, parts)


def shares_of_votes(votes: list[tuple[Formula, float]], parts: Terms) -> dict[int, float]:
    shares: dict[int, float] = {}
    for formula, weight in votes:
        if formula.buffer != FOURIER or parts.buffers[FOURIER]:
            size = evaluate(formula, parts)
            shares[size] = shares.get(size, 0.0) + weight
    return shares


def by_shares(shares: dict[int, float], size: int, parts: Terms) -> Workspace:
    """Return the chosen `size`, with the doubt that the other sizes leave."""
    if not shares:
        return Workspace(0, 0, guessed=True)
    total = sum(shares.values())
    largest = max([size, *(other for other, share in shares.items() if share >= _RUNNER_UP * total)])
    against = max(1 - shares[size] / total, _LEAST_DOUBT)
    return Workspace(size, largest, guessed=True, surprise=int(all_copies(parts) * against))


# The possible parts of a workspace.


def terms(problem: ConvolutionProblem) -> Terms:
    size = lengths(problem)
    groups, item, inner, outer = size.groups, size.item, size.inner, size.outer
    rows, out_rows, taps = (size.batch * size.pixels * item, size.batch * size.out_pixels * item, size.taps * item)
    common = max(16 // item, 1 << (max(inner, outer) - 1).bit_length())
    channels = [(inner, outer), (size.wide, size.tall)]
    if groups > 1:
        channels.append((common, common))
    source = (0, *(rows * groups * width for width, _ in channels))
    out = (0, *(out_rows * groups * width for _, width in channels))
    weight = (0, *(taps * groups * width * height for width, height in channels))
    computed = {FORWARD: out, DATA: source, FILTER: weight}[problem.direction]
    partial = [nbytes // item * 4 for nbytes in computed]
    if problem.direction == FILTER and groups > 1:
        partial.append(round_up(groups * outer, 64) * inner * taps // item * 4)
    parts = Terms(source, out, weight, tuple(partial), problem.source[0], groups)
    return parts._replace(buffers=buffers(problem, parts))


def buffers(problem: ConvolutionProblem, parts: Terms) -> tuple[int, ...]:
    """Return the bytes of each method's buffers, besides copies of the tensors; 0 if it does not apply."""
    copies = (sum(sizes[padding] for sizes in (parts.source, parts.out, parts.weight)) for padding in (PLAIN, PADDED))
    tiles = (tile_bytes(problem, width) for width in (32, 64, 128))
    fourier = transform_bytes(problem) if transforms(problem) else 0
    methods = fourier, winograd_bytes(problem), phase_bytes(problem)
    needed = needed_copies(problem)
    spare = _SPARE if needed else 0
    by_groups = needed + spare, needed + spare * problem.groups
    at_once, packed = _copies_at_once(problem.groups, parts), _packed_copies(problem)
    singles = sum(sizes[PLAIN] for sizes in (parts.source, parts.out, parts.weight)) // ITEM_BYTES[problem.kind] * 4
    others = padded_phase_bytes(problem), winograd_bytes(problem, other=True), sample_bytes(problem), singles
    return (0, *methods, *tiles, *copies, *by_groups, *at_once, *packed, *others)


def packed_channels(inner: int, outer: int, groups: int) -> tuple[int, int]:
    """Return the channels of a group, and of all groups, packed for tensor cores: a power of two, with as many inputs
    as outputs."""
    common = max(4, 1 << (max(inner, outer) - 1).bit_length())
    return common, round_up(groups * common, 8)


def _packed_copies(problem: ConvolutionProblem) -> tuple[int, int]:
    """Return packed copies of all groups, with and without those of the filter."""
    size = lengths(problem)
    if size.groups == 1:
        return 0, 0
    common, channels = packed_channels(size.inner, size.outer, size.groups)
    pixels = size.batch * (size.pixels + size.out_pixels)
    return channels * (pixels + common * size.taps) * size.item, channels * pixels * size.item


GROUPS_AT_ONCE = 8


def _copies_at_once(groups: int, parts: Terms) -> tuple[int, int]:
    """Return padded copies of the groups that are computed at once, with and without those of the filter."""
    if groups == 1:
        return 0, 0
    at_once = min(groups, GROUPS_AT_ONCE)
    tensors = (parts.source[PADDED] + parts.out[PADDED]) // groups * at_once
    return tensors + parts.weight[PADDED] // groups * at_once, tensors


_SPARE = 16  # bytes in addition to copies, to align them


def needed_copies(problem: ConvolutionProblem) -> int:
    """Return copies of the tensors that tensor cores cannot read or write in place: those not in channels last (a
    filter of one tap and an image of one pixel are), or not in multiples of 16 bytes, of filters on either side."""
    size, turned, elements = lengths(problem), not problem.channels_last, 0
    wider, taller = size.wide > size.inner, size.tall > size.outer
    if wider or (turned and size.pixels > 1 < problem.source[1]):
        elements += size.batch * size.wide * size.pixels
    if taller or (turned and size.out_pixels > 1 < problem.out[1]):
        elements += size.batch * size.tall * size.out_pixels
    if wider or taller or (turned and size.taps > 1 < size.inner):
        elements += size.wide * size.tall * size.taps
    return int(size.groups * elements * size.item)


def tile_bytes(problem: ConvolutionProblem, width: int) -> int:
    """Return the result in single precision, in tiles of 128 rows: of output channels for a forward pass."""
    if problem.direction == FILTER:
        return 0
    batch, channels, *lengths = problem.out if problem.direction == FORWARD else problem.source
    rows = round_up(batch * prod(lengths), 128)
    return 4 * rows * problem.groups * round_up(channels // problem.groups, width)


_WINOGRAD_TILES = {3: 4, 5: 9}  # by the side of the filter: results along one side of a tile
_WINOGRAD_BATCH = 16  # samples: batches are padded to a multiple


def winograd_bytes(problem: ConvolutionProblem, other: bool = False) -> int:
    """Return the workspace of plans with Winograd's transforms, for square filters with 3 or 5 taps along a side. In
    half precision they use multiples of samples; `other` ones do so for 5 taps alone, and copy tensors with channels
    last."""
    rows, columns = problem.weight[-2:]
    if len(problem.source) != 4 or rows != columns or rows not in _WINOGRAD_TILES:
        return 0
    if max(problem.stride) > 1 or max(problem.dilation) > 1:
        return 0
    groups, tile = problem.groups, _WINOGRAD_TILES[rows]
    inner, outer = problem.source[1] // groups, problem.out[1] // groups
    in_multiples = rows == 5 if other else problem.kind != "f32"
    batch = round_up(problem.source[0], _WINOGRAD_BATCH) if in_multiples else problem.source[0]
    height, width = problem.source[2:] if problem.direction == DATA else problem.out[2:]
    tiles = batch * -(-height // tile) * -(-width // tile)
    elements = tiles * (inner + outer) + inner * outer
    size = 4 * (tile + rows - 1) ** 2 * elements
    if other and problem.channels_last:
        tensors = problem.source[0] * (inner * prod(problem.source[2:]) + outer * prod(problem.out[2:]))
        weight = inner * outer * rows * columns * ITEM_BYTES[problem.kind]
        size += tensors * ITEM_BYTES[problem.kind] + round_up(weight + 1, _SPARE)
    return size * min(groups, GROUPS_AT_ONCE)


def phase_bytes(problem: ConvolutionProblem) -> int:
    """Return the copies for a strided data gradient computed without strides: pixels a stride apart become channels."""
    if problem.direction != DATA or max(problem.stride) == 1:
        return 0
    lengths, taps, out = _phases(problem)
    each = prod(problem.source[:2]) * prod(lengths) + prod(problem.weight[:2]) * prod(taps)
    return ITEM_BYTES[problem.kind] * (prod(problem.stride) * each + prod(problem.out[:2]) * prod(out))


_PHASE_INPUTS, _PHASE_OUTPUTS = 2, 8  # channels of a group come in multiples of these


def padded_phase_bytes(problem: ConvolutionProblem) -> int:
    """Return the same with channels in multiples, for the groups that are computed at once. Pixels that no tap reaches
    are left out, and the output is as long as without strides."""
    if problem.direction != DATA or max(problem.stride) == 1:
        return 0
    groups, taps, lengths, out = problem.groups, _phases(problem)[1], [], []
    for place, (step, padding, dilation) in enumerate(
        zip(problem.stride, problem.padding, problem.dilation, strict=True), 2
    ):
        reached = (problem.out[place] - 1) * step + dilation * (problem.weight[place] - 1) + 1 - padding
        lengths.append(-(-min(problem.source[place], reached) // step))
        out.append(lengths[-1] + 2 * -(-padding // step) - taps[place - 2] + 1)
    inner = round_up(problem.source[1] // groups, _PHASE_INPUTS) * prod(problem.stride)
    outer = round_up(problem.out[1] // groups, _PHASE_OUTPUTS)
    size = problem.source[0] * (inner * prod(lengths) + outer * prod(out)) + inner * outer * prod(taps)
    return (ITEM_BYTES[problem.kind] * size + _SPARE) * min(groups, GROUPS_AT_ONCE)


_SAMPLE_UNIT, _SAMPLE_COPIES = 32, 8  # channels, and the sums of a sample


def sample_bytes(problem: ConvolutionProblem) -> int:
    """Return gradients of a depthwise convolution's filter, several for each sample."""
    channels = problem.weight[0]
    if problem.direction != FILTER or problem.groups == 1 or problem.weight[1] > 1 or channels != problem.groups:
        return 0
    filters = round_up(channels, _SAMPLE_UNIT) * prod(problem.weight[2:])
    return 4 * _SAMPLE_COPIES * problem.source[0] * filters


def _phases(problem: ConvolutionProblem) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Return source, filter and output lengths of a strided data gradient whose strides have become channels."""
    lengths = tuple(-(-length // step) for length, step in zip(problem.source[2:], problem.stride, strict=True))
    taps = tuple(
        (step - 1 + padding) // step + (length - 1 - padding) // step + 1
        for length, padding, step in zip(problem.weight[2:], problem.padding, problem.stride, strict=True)
    )
    reached = tuple(length + tap - 1 for length, tap in zip(lengths, taps, strict=True))
    return lengths, taps, problem.out[2:] if taps[0] % 2 else reached


_TILE = 32  # lengths of the Fourier transforms by which a data gradient is computed
_TILE_BYTES = _TILE * (_TILE // 2 + 1) * 8
_LEAST_TRANSFORM, _LONGEST_TRANSFORM = 16, 256


def transform_bytes(problem: ConvolutionProblem) -> int:
    """Return the workspace of cuDNN's plans with Fourier transforms, by far the largest that `cudnn.benchmark` tries.

    Forward and filter gradient transform whole images, padded to a power of two, once in either layout. Data gradients
    go tile by tile; a strided one is that of a filter with more channels. With channels last, and for groups, tensors
    are copied first.
    """
    if len(problem.source) != 4:
        return 0
    groups = problem.groups
    batch, channels, height, width = problem.source
    inner, outer = channels // groups, problem.out[1] // groups
    rows, columns = problem.weight[2:]
    item = ITEM_BYTES.get(problem.kind, 8)
    source = batch * inner * height * width * item
    out = batch * outer * prod(problem.out[2:]) * item
    weight = inner * outer * rows * columns * item
    copies = source + out + 16 + (weight if rows * columns > 1 else 0)
    through, filters, written = batch * inner, inner * outer, batch * outer
    if problem.direction == DATA:
        step = problem.stride[0]
        if step > 1:
            (height, width), (rows, columns), out_lengths = _phases(problem)
            through, filters = step * step * through, step * step * filters
            copies = through * height * width + written * prod(out_lengths) + filters * rows * columns
            copies = copies * item + 16
        if max(rows, columns) > _TILE:
            return 0
        tiles = min(2, -(-height // (_TILE + 1 - rows)) * -(-width // (_TILE + 1 - columns)))
        size = _TILE_BYTES * (tiles * through + filters + tiles * written)
        if step > 1:
            return (size + copies) * min(groups, GROUPS_AT_ONCE)
    else:
        length = _LEAST_TRANSFORM
        while length < max(height + 2 * problem.padding[0], width + 2 * problem.padding[1]):
            length *= 2
        both = 2 * length * (length // 2 + 1) * 8
        if problem.direction == FORWARD:
            size = both * max(through + filters, written) + round_up(weight, 16)
        else:
            size = both * max(through + written, filters) + round_up(out, 16)
    if groups > 1:
        return (size + source + out + 16) * min(groups, GROUPS_AT_ONCE)
    return size + copies if problem.channels_last else size


def transforms(problem: ConvolutionProblem) -> bool:
    """Check whether cuDNN has plans with Fourier transforms for such a problem, whether or not it selects them."""
    if len(problem.source) != 4 or problem.kind not in ("f32", "f16"):
        return False
    if problem.direction == DATA:
        return max(problem.weight[2:]) > 2 and max(problem.dilation) == 1
    lengths = (length + 2 * padding for length, padding in zip(problem.source[2:], problem.padding, strict=True))
    if problem.stride != (1, 1) or max(lengths) > _LONGEST_TRANSFORM:
        return False
    if any(taps > 1 < dilation for taps, dilation in zip(problem.weight[2:], problem.dilation, strict=True)):
        return False
    return problem.direction == FORWARD or problem.kind == "f32"
