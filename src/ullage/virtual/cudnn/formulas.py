"""What cuDNN's workspaces are made of, as formulas over the shapes of a convolution.

cuDNN is closed source. Formulas were fitted to measured calls and to what cuDNN says of its plans
(`ullage_lab.train.workspaces`). Almost every workspace is a sum of copies in another layout (NHWC for NCHW tensors,
channels padded for tensor cores), partial results of a split sum, a constant, and what the method of a plan keeps
beside them: Fourier or Winograd transforms, the parts of a strided gradient, or tiles of results in single precision.
Which formula applies depends on the engine that cuDNN chooses; `workspaces.py` knows or guesses that.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

FORWARD, DATA, FILTER = "f", "d", "w"
ITEM_BYTES = {"f32": 4, "f16": 2, "bf16": 2}

# How a tensor is padded: not taken at all; as it is; channels to 16 bytes; channels of a group, of input and output
# alike, to a power of two. The filters of a depthwise convolution are also padded to 64 channels.
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

    @classmethod
    def of(cls, values: Sequence[Any]) -> ConvolutionProblem:
        """A problem as JSON has it.

        >>> values = ["f", [1, 8, 4, 4], [8, 8, 1, 1], [1, 8, 4, 4], [1, 1], [0, 0], [1, 1], 1, "f32", False]
        >>> ConvolutionProblem.of(values).weight
        (8, 8, 1, 1)
        """
        return cls._make(tuple(value) if isinstance(value, list) else value for value in values)


TENSOR_CORE, DOWN_CONVERT, FOURIER_NOTE, NONDETERMINISTIC = 0, 1, 3, 4  # cudnnBackendNumericalNote_t


class CandidatePlan(NamedTuple):
    """A plan that cuDNN would try: its engine, its numerical notes as bits, and the bytes of its workspace."""

    engine: int
    notes: int
    workspace: int

    def allowed(self, kind: str, tf32: bool = True, deterministic: bool = False) -> bool:
        """Conv_v8.cpp, filterEngineConfigs.

        >>> CandidatePlan(1, 1 << TENSOR_CORE, 0).allowed("f32", tf32=False)
        False
        """
        refused = 1 << DOWN_CONVERT
        if deterministic:
            refused |= 1 << NONDETERMINISTIC
        if kind == "f32" and not tf32:
            refused |= 1 << TENSOR_CORE
        return not self.notes & refused


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
    buffer: int = 0  # which of `Terms.buffers`
    times: int = 0  # the padded copies of all tensors times 2 ** (times / TIMES_AN_OCTAVE), unless it is 0


class Terms(NamedTuple):
    """Bytes of what a workspace is made of; a tuple has a place for each padding."""

    source: tuple[int, ...]
    out: tuple[int, ...]
    weight: tuple[int, ...]
    partial: tuple[int, ...]  # one partial result: the tensor that is computed, in single precision
    batch: int
    groups: int
    buffers: tuple[int, ...] = (0,)  # what the method of a plan keeps beside copies, see `buffers`


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


# Places in `Terms.buffers`.
NO_BUFFER, FOURIER, WINOGRAD, PHASES, TILES_32, TILES_64, TILES_128, COPIES, PADDED_COPIES = range(9)
NEEDED, NEEDED_BY_GROUP = 9, 10  # `needed_copies`, with what aligns them once or for each group
AT_ONCE, AT_ONCE_BUT_FILTER = 11, 12  # padded copies of the groups that are computed at once
PACKED, PACKED_BUT_FILTER = 13, 14  # copies of all groups, packed as `packed_channels` says
PADDED_PHASES = 15  # of the groups that are computed at once, with what aligns them
OTHER_WINOGRAD = 16  # with samples in multiples where `WINOGRAD` takes them as they are, and the other way round
BY_SAMPLE = 17  # filters of a depthwise convolution for each sample
SINGLES = 18  # copies of all tensors in single precision


def evaluate(formula: Formula, parts: Terms) -> int:
    """Bytes by a formula; a padding that a problem does not know is the last one it knows.

    >>> evaluate(Formula(PLAIN, PLAIN, NONE, NONE, 0, 16, 0), Terms((0, 100), (0, 50), (0, 9), (0, 36), 2, 1))
    166
    """
    count = formula.partials if formula.partials >= 0 else -formula.partials * parts.batch
    size = formula.constant + formula.per_group * parts.groups + count * _padded(parts.partial, formula.partial)
    size += _padded(parts.source, formula.source) + parts.buffers[formula.buffer]
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

    Votes for Fourier transforms of a problem that cuDNN has no such plan for do not count: trees know no limits.

    >>> copies, nothing = Formula(PLAIN, PLAIN, NONE, NONE, 0, 0, 0), Formula(NONE, NONE, NONE, NONE, 0, 0, 0)
    >>> by_votes([(copies, 3.0), (nothing, 1.0)], Terms((0, 100), (0, 50), (0, 10), (0, 36), 2, 1))
    Workspace(size=150, larger=150, guessed=True, surprise=40)
    >>> by_votes([(copies, 2.0), (nothing, 98.0)], Terms((0, 100), (0, 50), (0, 10), (0, 36), 2, 1)).larger
    150
    """
    shares = shares_of_votes(votes, parts)
    return by_shares(shares, max(shares, key=lambda size: (shares[size], size), default=0), parts)


def by_median(votes: list[tuple[Formula, float]], parts: Terms) -> Workspace:
    """The median of the votes. It is the size that most votes name, if there is one. Formulas that are near each other
    share their votes, so a single one far off can have more than any of them.

    >>> one, two, three, far = (Formula(NONE, NONE, NONE, NONE, 0, size, 0) for size in (90, 100, 110, 900))
    >>> parts = Terms((0, 100), (0, 50), (0, 10), (0, 36), 2, 1)
    >>> by_median([(one, 2.0), (two, 2.0), (three, 2.0), (far, 3.0)], parts)[:2]
    (110, 900)
    >>> by_median([(one, 2.0), (two, 2.0), (far, 5.0)], parts).size
    900
    """
    shares = shares_of_votes(votes, parts)
    left = sum(shares.values()) / 2
    size = 0
    for size in sorted(shares):
        left -= shares[size]
        if left <= 0:
            break
    return by_shares(shares, size, parts)


def shares_of_votes(votes: list[tuple[Formula, float]], parts: Terms) -> dict[int, float]:
    """The votes by the size that their formulas give."""
    shares: dict[int, float] = {}
    for formula, weight in votes:
        if formula.buffer != FOURIER or parts.buffers[FOURIER]:
            size = evaluate(formula, parts)
            shares[size] = shares.get(size, 0.0) + weight
    return shares


def by_shares(shares: dict[int, float], size: int, parts: Terms) -> Workspace:
    """The `size` that was chosen among several, with what the others leave to doubt.

    >>> by_shares({100: 0.5, 200: 0.3}, 100, Terms((0, 100), (0, 50), (0, 10), (0, 36), 2, 1)).larger
    200
    """
    if not shares:
        return Workspace(0, 0, guessed=True)
    total = sum(shares.values())
    largest = max([size, *(other for other, share in shares.items() if share >= _RUNNER_UP * total)])
    against = max(1 - shares[size] / total, _LEAST_DOUBT)
    return Workspace(size, largest, guessed=True, surprise=int(all_copies(parts) * against))
