"""cuDNN's part of a convolution: how many bytes of workspace the plan that it chooses takes.

cuDNN is closed. What is written here was found by laying formulas beside measured calls (`ullage.measure`): almost
every workspace is a sum of copies in another layout (NHWC for NCHW tensors, channels padded to what a tensor core
reads at once), partial results of a split sum, and a constant. Which sum it is, is cuDNN's choice of an engine: a table
of measured calls knows it for one kind of GPU, trees that were grown on the same measurements guess it for the rest
(`cudnn_choice.py`).

Everything was measured on Hopper. Other generations have other engines: the copies are the same kind of sum there, the
constants and the choice need not be, until their owner measures them and builds a table (`ullage.measure`).
"""

from __future__ import annotations

from typing import NamedTuple

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
