"""Make the virtual GPU's model of cuDNN's workspaces from cuDNN's answers: a table, and trees for all other problems.

    ullage lab train convolutions plans.jsonl --out FOLDER --describe '{"gpu": "NVIDIA H200", ...}'

The table holds every problem that cuDNN was asked about (`ullage measure cudnn`), with the workspace of its first plan.
For the trees, each workspace first gets a formula: a greedy search finds those that explain most, and the others get
the nearest of a few rounded sizes. Decision trees then learn which formula cuDNN takes. `--held-out` leaves out every
seventh layer, with all its batch sizes and types, and says how well the trees do on it, apart for layers whose channels
are no multiples of 8. Needs scikit-learn.
"""

import importlib
import itertools
import json
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

from ullage.errors import InvalidValue
from ullage.jobs.model import read_rows
from ullage.virtual.cudnn.arrays import write_arrays
from ullage.virtual.cudnn.cudnn_query import first
from ullage.virtual.cudnn.formulas import (
    AT_ONCE,
    AT_ONCE_BUT_FILTER,
    BY_SAMPLE,
    FOURIER,
    NEEDED,
    NEEDED_BY_GROUP,
    NONE,
    OTHER_WINOGRAD,
    PACKED,
    PACKED_BUT_FILTER,
    PADDED,
    PADDED_PHASES,
    PHASES,
    SINGLES,
    WIDE,
    WINOGRAD,
    CandidatePlan,
    ConvolutionProblem,
    Formula,
    Terms,
    Workspace,
    by_votes,
    evaluate,
    terms,
)
from ullage.virtual.cudnn.workspaces import MEASURED_CAPABILITY, TABLE, features, hash_of, trees_of

_SAMPLE = 40_000  # problems in which formulas are searched
_LEAST = 4  # of the sample that a formula has to explain
_SMALL = 1024  # a constant next to partial results is smaller
_STEPS_AN_OCTAVE = 8  # of rounded sizes: at most 4.5% off
MODES = [(0, 0, 0)] + [
    (padding * source, padding * out, padding * weight)
    for padding in (1, 2, 3)
    for source, out, weight in itertools.product((0, 1), repeat=3)
    if source or out or weight
]
# Buffers that hold copies, in addition to `MODES`, and those of a plan's method, which not every problem has.
_AS_NEEDED = (NEEDED, NEEDED_BY_GROUP, AT_ONCE, AT_ONCE_BUT_FILTER, PACKED, PACKED_BUT_FILTER)
_METHODS = (FOURIER, WINOGRAD, PHASES, PADDED_PHASES, OTHER_WINOGRAD, BY_SAMPLE, SINGLES)
_BUFFERS = (*_AS_NEEDED, *_METHODS)
_PER_GROUP = (0, 16, 144, 160)  # bytes a group that grouped convolutions were seen to take
_SAMPLES = (1, 2, 4, 8, 16)  # partial results a sample
_MOST = 1000  # partial results
_UNKNOWN = 1 << 50  # bytes of a copy with a padding that a problem does not know: more than any workspace
_WIDTH = SINGLES + 1  # places of the longest tuple in `Terms`
DIRECTIONS = "fdw"  # forward, gradient of the data, gradient of the weight
EVERY = 7  # layer is held out


Value = TypeVar("Value")


class Measured(NamedTuple):
    """The measured problems of one direction, and the components of their workspaces, in columns."""

    problems: list[ConvolutionProblem]
    sizes: Any
    parts: list[Terms]


def answers(path: Path) -> Iterator[tuple[ConvolutionProblem, tuple[CandidatePlan, ...]]]:
    """Read the problems that cuDNN answered in a file of `ullage measure cudnn`, and its plans for each."""
    for row in read_rows(path):
        if "candidates" in row:
            yield ConvolutionProblem.of(row["problem"]), tuple(CandidatePlan(*plan) for plan in row["candidates"])


def chosen_workspaces(path: Path) -> dict[ConvolutionProblem, int]:
    """Read the workspace of the plan that PyTorch takes for each problem."""
    chosen = {problem: first(plans, problem, True, False) for problem, plans in answers(path)}
    return {problem: plan.size for problem, plan in chosen.items() if plan is not None}


def by_direction(values: Mapping[ConvolutionProblem, Value]) -> Iterator[tuple[str, dict[ConvolutionProblem, Value]]]:
    """Yield the problems of each direction that has any."""
    for direction in DIRECTIONS:
        if of_direction := {problem: value for problem, value in values.items() if problem.direction == direction}:
            yield direction, of_direction


def write_table(path: Path, workspaces: Mapping[ConvolutionProblem, int], header: dict[str, Any]) -> None:
    """Write the differences of sorted hashes, which fit 32 bits, and the sizes that are not zero."""
    rows = sorted((hash_of(problem), size) for problem, size in workspaces.items())
    hashes = np.array([number for number, _ in rows], dtype=np.uint64)
    sizes = np.array([size for _, size in rows], dtype=np.uint64)
    steps = np.diff(hashes, prepend=np.uint64(0))
    if steps.max() >= 2**32:
        raise InvalidValue(f"a table needs more problems, got {len(rows)} different convolutions")
    columns: dict[str, Any] = {
        "header": np.frombuffer(json.dumps(header).encode(), dtype=np.uint8),
        "steps": steps.astype(np.uint32),
        "nonzero": (sizes > 0).astype(np.uint8),
        "sizes": sizes[sizes > 0],
    }
    write_arrays(path, columns)


def _candidates(part: Measured, chosen: Any) -> Any:
    """Return every formula that gives a problem's size exactly, as a packed number; -1 if there is none."""
    parts = [part.parts[place] for place in chosen]
    sizes = part.sizes[chosen]
    tensors = [_columns([getattr(row, name) for row in parts], 4, _UNKNOWN) for name in ("source", "out", "weight")]
    partial = _columns([row.partial for row in parts], 5, 0)
    batch = np.array([row.batch for row in parts], dtype=np.int64)
    groups = np.array([row.groups for row in parts], dtype=np.int64)
    copied = [sum(column[:, mode] for column, mode in zip(tensors, modes, strict=True)) for modes in MODES]
    for buffer in _BUFFERS:
        bytes_each = np.array([row.buffers[buffer] for row in parts], dtype=np.int64)
        copied.append(np.where((bytes_each == 0) & (buffer in _METHODS), _UNKNOWN, bytes_each))
    codes = []
    for number, copies in enumerate(copied):
        for per_group, constant in enumerate(_PER_GROUP):
            left = sizes - copies - constant * groups
            fits = (left >= 0) & ((per_group == 0) | ((groups > 1) & (left < _SMALL)))
            codes.append(np.where(fits, _pack(number, 0, per_group, 0, left), -1))
            for padding in range(1, 5):
                count, rest = np.divmod(left, np.maximum(partial[:, padding], 1))
                known = (partial[:, padding] > 0) & ((padding == 1) | (partial[:, padding] != partial[:, 1]))
                fits = known & (left > 0) & (count > 0) & (rest < _SMALL) & ((per_group == 0) | (groups > 1))
                few = fits & (count < _MOST)
                codes.append(np.where(few, _pack(number, padding, per_group, np.minimum(count, _MOST), rest), -1))
                for times, factor in enumerate(_SAMPLES):
                    by_batch = fits & (count == factor * batch)
                    codes.append(np.where(by_batch, _pack(number, padding, per_group, _MOST + times, rest), -1))
    return np.stack(codes, 1)


def _columns(rows: Sequence[tuple[int, ...]], width: int, unknown: int | None = None) -> Any:
    """Sizes by padding; a padding that a problem does not know is the given number, or else the last one it knows."""
    filled = [(*row, *[row[-1] if unknown is None else unknown] * (width - len(row))) for row in rows]
    return np.array(filled, dtype=np.int64)


def _pack(modes: int, padding: int, per_group: int, count: Any, constant: Any) -> Any:
    return (modes << 56) | (padding << 53) | (per_group << 51) | (count << 40) | constant


def _unpack(code: int) -> Formula:
    count = (code >> 40) & 0x7FF
    if count >= _MOST:
        count = -_SAMPLES[count - _MOST]
    place, padding, per_group = code >> 56, (code >> 53) & 7, _PER_GROUP[(code >> 51) & 3]
    modes, buffer = (MODES[place], 0) if place < len(MODES) else (MODES[0], _BUFFERS[place - len(MODES)])
    return Formula(*modes, padding, count, code & ((1 << 40) - 1), per_group, buffer)


def _plainness(code: int) -> tuple[int, ...]:
    """Return a sort key for formulas that explain equally much: the least padding, the fewest terms."""
    formula = _unpack(code)
    modes = (formula.source, formula.out, formula.weight)
    return formula.partials > 0, max(modes), sum(mode > 0 for mode in modes), formula.partial, formula.per_group


def find_formulas(part: Measured, seed: int = 0) -> list[tuple[Formula, float]]:
    """Return formulas, those that explain most first, each with the share of problems that no earlier one explains."""
    chosen = np.random.default_rng(seed).permutation(len(part.problems))[:_SAMPLE]
    codes = _candidates(part, chosen)
    rows, columns = np.nonzero(codes >= 0)
    values, numbers = np.unique(codes[rows, columns], return_inverse=True)
    pairs = np.unique(np.stack([rows, numbers], 1), axis=0)  # a row may have a code twice
    rows, numbers = pairs[:, 0], pairs[:, 1]
    counts = np.bincount(numbers, minlength=len(values))
    by_code, first_row = np.argsort(numbers, kind="stable"), np.searchsorted(rows, np.arange(len(codes) + 1))
    first_code = np.concatenate([[0], np.cumsum(counts)])
    left = np.ones(len(codes), dtype=bool)
    formulas: list[tuple[Formula, float]] = []
    while len(counts) and counts.max() >= _LEAST:
        best = min(np.flatnonzero(counts == counts.max()).tolist(), key=lambda number: _plainness(int(values[number])))
        having = rows[by_code[first_code[best] : first_code[best + 1]]]
        explained = having[left[having]]
        formulas.append((_unpack(int(values[best])), len(explained) / len(chosen)))
        left[explained] = False
        gone = np.concatenate([numbers[first_row[row] : first_row[row + 1]] for row in explained])
        counts -= np.bincount(gone, minlength=len(values))
    return formulas


def rounded(size: int, parts: Terms) -> Formula:
    """Return a substitute for a size without a formula: as many copies as fit, and the rest rounded."""
    paddings = (WIDE, PADDED) if parts.groups > 1 else (PADDED,)
    choices = [modes for padding in paddings for modes in ((padding,) * 3, (padding, padding, NONE))]
    for modes in (*choices, (NONE, NONE, NONE)):
        copies = evaluate(Formula(*modes, 0, 0, 0, 0), parts)
        if copies <= size:
            break
    rest = max(size - copies, 1)
    return Formula(*modes, 0, 0, round(2 ** (round(np.log2(rest) * _STEPS_AN_OCTAVE) / _STEPS_AN_OCTAVE)), 0)


def label(part: Measured, formulas: Sequence[Formula]) -> tuple[list[int], list[Formula]]:
    """Return the number of each problem's formula, and all formulas including rounded ones."""
    columns = all_columns(part.parts)
    labels = np.full(len(part.parts), -1)
    for number, formula in enumerate(formulas):
        labels[(labels < 0) & (sizes_by(formula, columns) == part.sizes)] = number
    known = {formula: number for number, formula in enumerate(formulas)}
    for place in np.flatnonzero(labels < 0).tolist():
        nearest = rounded(int(part.sizes[place]), part.parts[place])
        labels[place] = known.setdefault(nearest, len(known))
    return labels.tolist(), list(known)


def all_columns(parts: Sequence[Terms]) -> dict[str, Any]:
    tensors = ("source", "out", "weight", "partial", "buffers")
    columns: dict[str, Any] = {name: _columns([getattr(row, name) for row in parts], _WIDTH) for name in tensors}
    for name in ("batch", "groups"):
        columns[name] = np.array([getattr(row, name) for row in parts], dtype=np.int64)
    return columns


def sizes_by(formula: Formula, columns: dict[str, Any]) -> Any:
    """Do the same as `evaluate` for many problems at once."""
    count = formula.partials if formula.partials >= 0 else -formula.partials * columns["batch"]
    copies = sum(columns[name][:, getattr(formula, name)] for name in ("source", "out", "weight"))
    partials = count * columns["partial"][:, formula.partial] + columns["buffers"][:, formula.buffer]
    return formula.constant + formula.per_group * columns["groups"] + partials + copies


def grow(rows: Any, labels: Sequence[int], count: int, leaves: int, seed: int = 0, most: int = 1 << 62) -> list[Any]:
    """Grow decision trees on features, each on another sample of at most N problems."""
    classifier = importlib.import_module("sklearn.tree").DecisionTreeClassifier
    targets = np.array(labels)
    grown = []
    for number in range(seed, seed + count):
        chosen = np.sort(np.random.default_rng(number).permutation(len(rows))[:most])
        tree = classifier(
            criterion="entropy", max_leaf_nodes=leaves, max_features=0.5, min_samples_leaf=1, random_state=number
        )
        grown.append(tree.fit(rows[chosen], targets[chosen]))
    return grown


def guess(
    grown: Sequence[Any],
    formulas: Sequence[Formula],
    rows: Any,
    parts: Sequence[Terms],
    choose: Callable[[list[tuple[Formula, float]], Terms], Workspace] = by_votes,
) -> list[Workspace]:
    """Return the trees' guesses for problems with these features; `choose` makes one size of their votes."""
    votes: list[list[tuple[Formula, float]]] = [[] for _ in parts]
    for tree in grown:
        leaves: dict[int, list[tuple[Formula, float]]] = {}
        for place, leaf in enumerate(tree.apply(rows).tolist()):
            if leaf not in leaves:
                leaves[leaf] = [(formulas[tree.classes_[label]], share) for label, share in _top_votes(tree, leaf)]
            votes[place] += leaves[leaf]
    return [choose(given, part) for given, part in zip(votes, parts, strict=True)]


def _top_votes(tree: Any, leaf: int) -> list[tuple[int, float]]:
    """Return the labels with the most votes in a leaf, and their shares."""
    values = tree.tree_.value[leaf][0] / tree.tree_.value[leaf][0].sum()
    return [(int(number), float(values[number])) for number in np.argsort(-values)[:3] if values[number] >= 0.08]


def feature_rows(part: Measured) -> Any:
    return np.array([features(problem) for problem in part.problems], dtype=np.float64)


def export(grown: Sequence[Any]) -> dict[str, Any]:
    """Return the trees as flat arrays: nodes in depth-first order, the left child next to its node."""
    feature: list[int] = []
    threshold: list[int] = []
    right: list[int] = []
    labels: list[int] = []
    shares: list[int] = []
    roots = []
    for tree in grown:
        inner, classes = tree.tree_, tree.classes_
        roots.append(len(feature))

        def add(node: int, tree: Any = tree, inner: Any = inner, classes: Any = classes) -> None:
            place = len(feature)
            if inner.children_left[node] < 0:
                top = _top_votes(tree, node)
                feature.append(-1)
                right.append(len(top))
                labels.extend(int(classes[number]) for number, _ in top)
                shares.extend(round(255 * share) for _, share in top)
                return
            feature.append(int(inner.feature[node]))
            threshold.append(int(np.floor(inner.threshold[node])))
            right.append(0)
            add(inner.children_left[node])
            right[place] = len(feature) - place
            add(inner.children_right[node])

        add(0)
    thresholds, places = np.unique(np.array(threshold, dtype=np.int64), return_inverse=True)
    return {
        "roots": np.array(roots, dtype=np.int32),
        "feature": np.array(feature, dtype=np.int8),
        "thresholds": thresholds,
        "threshold": places.astype(np.uint16 if len(thresholds) < 2**16 else np.uint32),
        "step": np.array(right, dtype=np.int32),
        "labels": np.array(labels, dtype=np.int16 if max(labels) < 2**15 else np.int32),
        "shares": np.array(shares, dtype=np.uint8),
    }


def named_arrays(name: str, grown: Sequence[Any], formulas: Sequence[Formula]) -> dict[str, Any]:
    arrays = export(grown) | {"formulas": np.array(formulas, dtype=np.int64)}
    return {f"{name}_{part}": values for part, values in arrays.items()}


def layer_of(problem: ConvolutionProblem) -> int:
    """Return a number for the layer of a problem, independent of batch size, type, layout and direction."""
    layer = (problem.source[1:], problem.weight, problem.stride, problem.groups)
    return zlib.crc32(repr(layer).encode())


def has_odd_channels(problem: ConvolutionProblem) -> bool:
    """Whether the input or output channels of a group are not a multiple of 8."""
    return any(channels // problem.groups % 8 > 0 for channels in (problem.source[1], problem.out[1]))


def measured_part(rows: Iterable[tuple[ConvolutionProblem, int]]) -> Measured:
    problems, sizes = zip(*rows, strict=True)
    return Measured(list(problems), np.array(sizes, dtype=np.int64), [terms(problem) for problem in problems])


def judge(grown: Sequence[Any], formulas: Sequence[Formula], part: Measured) -> dict[str, float]:
    """Return the trees' accuracy: exact, within 1 MiB, the sums of the errors and of the sizes, and the bound."""
    guessed = guess(grown, formulas, feature_rows(part), part.parts)
    guesses, larger = [one.size for one in guessed], [one.larger for one in guessed]
    errors = np.abs(np.array(guesses) - part.sizes)
    return {
        "problems": len(guesses),
        "exact": float((errors == 0).mean()),
        "within_1_mib": float((errors <= 2**20).mean()),
        "error_of_bytes": float(errors.sum() / max(part.sizes.sum(), 1)),
        "not_above_larger": float((part.sizes <= np.array(larger)).mean()),
    }


def _fit_direction(
    rows: Mapping[ConvolutionProblem, int], direction: str, trees: int, leaves: int, say: Callable[[str], None]
) -> tuple[list[Any], list[Formula]]:
    part = measured_part(rows.items())
    shares = find_formulas(part)
    labels, formulas = label(part, [formula for formula, _ in shares])
    explained = round(sum(share for _, share in shares), 4)
    say(f"{direction} {len(part.problems)} problems; {len(shares)} formulas explain {explained}")
    for formula, share in shares[:12]:
        say(f"  {share:7.2%} {formula}")
    return grow(feature_rows(part), labels, trees, leaves), formulas


def write_fit(
    workspaces: Mapping[ConvolutionProblem, int],
    out: Path,
    header: dict[str, Any],
    trees: int,
    leaves: int,
    say: Callable[[str], None],
) -> None:
    """Write the table and the trees into a folder, and report which formulas explain most."""
    out.mkdir(parents=True, exist_ok=True)
    write_table(out / TABLE, workspaces, header)
    arrays: dict[str, Any] = {}
    for direction, rows in by_direction(workspaces):
        arrays |= named_arrays(direction, *_fit_direction(rows, direction, trees, leaves, say))
    write_arrays(out / trees_of(MEASURED_CAPABILITY), arrays)


def evaluate_held_out(
    workspaces: Mapping[ConvolutionProblem, int], trees: int, leaves: int, say: Callable[[str], None]
) -> None:
    """Fit without every seventh layer, and report how well the trees do on those; write nothing."""
    for direction, rows in by_direction(workspaces):
        learnt = {problem: size for problem, size in rows.items() if layer_of(problem) % EVERY}
        grown, formulas = _fit_direction(learnt, direction, trees, leaves, say)
        for name, odd in (("odd channels", True), ("multiples of 8", False)):
            chosen = {one: rows[one] for one in rows if one not in learnt and has_odd_channels(one) is odd}
            if chosen:
                say(f"  held out, {name}: {judge(grown, formulas, measured_part(chosen.items()))}")
