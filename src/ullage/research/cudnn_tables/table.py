"""Makes what the virtual GPU knows of cuDNN's workspaces out of measured calls: a table, and trees for all else.

    ullage convolutions fit measured.jsonl.gz --out FOLDER --describe '{"gpu": "NVIDIA H200", ...}'

The table holds every measured problem. For the trees each workspace is first put into a formula: those that explain
most are found greedily, and what none explains gets the nearest of a few rounded sizes. Decision trees then learn which
formula cuDNN takes. `--held-out` leaves out every seventh layer, with all its batch sizes and types, and says how well
the trees do on it, apart for layers whose channels are no multiples of 8. Needs scikit-learn.
"""

from __future__ import annotations

import importlib
import io
import itertools
import json
import math
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ullage.errors import InvalidValue
from ullage.research.cudnn_tables.asking import problem_from
from ullage.research.cudnn_tables.candidates import FOURIER, CandidatePlan
from ullage.research.cudnn_tables.tasks import read_calls, workspaces_of
from ullage.virtual.kernels.cudnn.workspaces import (
    NONE,
    OTHERS,
    PADDED,
    PLAIN,
    TABLE,
    TIMES_AN_OCTAVE,
    TRANSFORM,
    TREES,
    TRIAL_TABLE,
    TRIAL_TREES,
    WIDE,
    ConvolutionProblem,
    Formula,
    Terms,
    all_copies,
    by_votes,
    evaluate,
    features,
    hash_of,
    terms,
    transforms,
)
from ullage.workloads.configuration import read_rows

_SAMPLE = 25_000  # problems that formulas are looked for in
_LEAST = 6  # of the sample that a formula has to explain
_SMALL = 1024  # a constant beside partial results is smaller
_STEPS_AN_OCTAVE = 8  # of rounded sizes: at most 4.5 % off
_MODES = [(0, 0, 0)] + [
    (padding * source, padding * out, padding * weight)
    for padding in (1, 2, 3)
    for source, out, weight in itertools.product((0, 1), repeat=3)
    if source or out or weight
]
_PER_GROUP = (0, 16, 144, 160)  # bytes a group that grouped convolutions were seen to take
_SAMPLES = (1, 2, 4, 8, 16)  # partial results a sample
_MOST = 1000  # partial results
_UNKNOWN = 1 << 50  # bytes of a copy with a padding that a problem does not know: more than any workspace
_DIRECTIONS = "fdw"  # forward, gradient of the data, gradient of the weight
_EVERY = 7  # layer is held out


class Measured(NamedTuple):
    """The measured problems of one direction, and what their workspaces can be made of, in columns."""

    problems: list[ConvolutionProblem]
    sizes: Any
    parts: list[Terms]


def measured_problems(path: Path) -> dict[ConvolutionProblem, int]:
    """Every problem of a measured file; calls that PyTorch's part does not explain are left out."""
    found: dict[ConvolutionProblem, int] = {}
    for row in read_calls(path):
        for problem, size in workspaces_of(row) or ():
            found[problem] = size
    return found


def write_table(path: Path, found: dict[ConvolutionProblem, int], header: dict[str, Any]) -> None:
    """Sorted hashes as steps, which fit 32 bits, and the sizes that are not zero."""
    rows = sorted((hash_of(problem), size) for problem, size in found.items())
    hashes = np.array([number for number, _ in rows], dtype=np.uint64)
    sizes = np.array([size for _, size in rows], dtype=np.uint64)
    steps = np.diff(hashes, prepend=np.uint64(0))
    if steps.max() >= 2**32:
        raise InvalidValue(f"needed more measured calls to write a table; found {len(rows)} different convolutions")
    columns: dict[str, Any] = {
        "header": np.frombuffer(json.dumps(header).encode(), dtype=np.uint8),
        "steps": steps.astype(np.uint32),
        "nonzero": (sizes > 0).astype(np.uint8),
        "sizes": sizes[sizes > 0],
    }
    with zipfile.ZipFile(path, "w") as file:
        for name, column in columns.items():
            content = io.BytesIO()
            np.save(content, column)
            # Steps are random numbers: compressed they are hardly smaller, and take half of the time of reading.
            how = zipfile.ZIP_STORED if name == "steps" else zipfile.ZIP_DEFLATED
            file.writestr(zipfile.ZipInfo(f"{name}.npy"), content.getvalue(), how)


def _candidates(part: Measured, chosen: Any) -> Any:
    """Every formula that gives a problem's size exactly, as a packed number; -1 where there is none."""
    parts = [part.parts[place] for place in chosen]
    sizes = part.sizes[chosen]
    tensors = [_columns([getattr(row, name) for row in parts], 4, _UNKNOWN) for name in ("source", "out", "weight")]
    partial = _columns([row.partial for row in parts], 5, 0)
    batch = np.array([row.batch for row in parts], dtype=np.int64)
    groups = np.array([row.groups for row in parts], dtype=np.int64)
    found = []
    for number, modes in enumerate(_MODES):
        copies = sum(column[:, mode] for column, mode in zip(tensors, modes, strict=True))
        for per_group, constant in enumerate(_PER_GROUP):
            left = sizes - copies - constant * groups
            fits = (left >= 0) & ((per_group == 0) | ((groups > 1) & (left < _SMALL)))
            found.append(np.where(fits, _pack(number, 0, per_group, 0, left), -1))
            for padding in range(1, 5):
                count, rest = np.divmod(left, np.maximum(partial[:, padding], 1))
                known = (partial[:, padding] > 0) & ((padding == 1) | (partial[:, padding] != partial[:, 1]))
                fits = known & (left > 0) & (count > 0) & (rest < _SMALL) & ((per_group == 0) | (groups > 1))
                few = fits & (count < _MOST)
                found.append(np.where(few, _pack(number, padding, per_group, np.minimum(count, _MOST), rest), -1))
                for times, factor in enumerate(_SAMPLES):
                    by_batch = fits & (count == factor * batch)
                    found.append(np.where(by_batch, _pack(number, padding, per_group, _MOST + times, rest), -1))
    return np.stack(found, 1)


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
    modes, padding, per_group = _MODES[code >> 56], (code >> 53) & 7, _PER_GROUP[(code >> 51) & 3]
    return Formula(*modes, padding, count, code & ((1 << 40) - 1), per_group)


def _plainness(code: int) -> tuple[int, ...]:
    """For choosing among formulas that explain as much: the least padding, the fewest terms."""
    formula = _unpack(code)
    modes = (formula.source, formula.out, formula.weight)
    return formula.partials > 0, max(modes), sum(mode > 0 for mode in modes), formula.partial, formula.per_group


def find_formulas(part: Measured, seed: int = 0) -> list[tuple[Formula, float]]:
    """Formulas, those that explain most first, each with the share of the problems that no earlier one explains."""
    chosen = np.random.default_rng(seed).permutation(len(part.problems))[:_SAMPLE]
    codes = _candidates(part, chosen)
    found: list[tuple[Formula, float]] = []
    while len(codes):
        values, counts = np.unique(codes[codes >= 0], return_counts=True)
        if counts.max() < _LEAST:
            break
        best = min((int(code) for code in values[counts == counts.max()]), key=_plainness)
        explained = (codes == best).any(1)
        found.append((_unpack(best), float(explained.sum()) / len(chosen)))
        codes = codes[~explained]
    return found


def rounded(size: int, parts: Terms) -> Formula:
    """The stand-in for a size that no formula gives: copies as far as they fit, and the rest rounded."""
    paddings = (WIDE, PADDED) if parts.groups > 1 else (PADDED,)
    choices = [modes for padding in paddings for modes in ((padding,) * 3, (padding, padding, NONE))]
    for modes in (*choices, (NONE, NONE, NONE)):
        copies = evaluate(Formula(*modes, 0, 0, 0, 0), parts)
        if copies <= size:
            break
    rest = max(size - copies, 1)
    return Formula(*modes, 0, 0, round(2 ** (round(np.log2(rest) * _STEPS_AN_OCTAVE) / _STEPS_AN_OCTAVE)), 0)


def label(part: Measured, formulas: Sequence[Formula]) -> tuple[list[int], list[Formula]]:
    """The number of each problem's formula, and all formulas with the rounded ones."""
    tensors = ("source", "out", "weight", "partial")
    columns: dict[str, Any] = {name: _columns([getattr(row, name) for row in part.parts], 5) for name in tensors}
    for name in ("batch", "groups"):
        columns[name] = np.array([getattr(row, name) for row in part.parts], dtype=np.int64)
    labels = np.full(len(part.parts), -1)
    for number, formula in enumerate(formulas):
        labels[(labels < 0) & (_sizes(formula, columns) == part.sizes)] = number
    known = {formula: number for number, formula in enumerate(formulas)}
    for place in np.flatnonzero(labels < 0).tolist():
        nearest = rounded(int(part.sizes[place]), part.parts[place])
        labels[place] = known.setdefault(nearest, len(known))
    return labels.tolist(), list(known)


def _sizes(formula: Formula, columns: dict[str, Any]) -> Any:
    """`evaluate` for many problems at once."""
    count = formula.partials if formula.partials >= 0 else -formula.partials * columns["batch"]
    copies = sum(columns[name][:, getattr(formula, name)] for name in ("source", "out", "weight"))
    partials = count * columns["partial"][:, formula.partial]
    return formula.constant + formula.per_group * columns["groups"] + partials + copies


def grow(part: Measured, labels: Sequence[int], count: int, leaves: int, seed: int = 0) -> list[Any]:
    """Decision trees on the features, each on another sample of the problems."""
    classifier = importlib.import_module("sklearn.tree").DecisionTreeClassifier
    rows = np.array([features(problem) for problem in part.problems], dtype=np.float64)
    targets = np.array(labels)
    grown = []
    for number in range(count):
        tree = classifier(
            criterion="entropy", max_leaf_nodes=leaves, max_features=0.5, min_samples_leaf=1, random_state=seed + number
        )
        grown.append(tree.fit(rows, targets))
    return grown


def export(grown: Sequence[Any]) -> dict[str, Any]:
    """The trees as flat arrays: nodes in depth-first order, the left child next to its node."""
    feature: list[int] = []
    threshold: list[int] = []
    right: list[int] = []
    labels: list[int] = []
    shares: list[int] = []
    roots = []
    for tree in grown:
        inner, classes = tree.tree_, tree.classes_
        roots.append(len(feature))

        def add(node: int, inner: Any = inner, classes: Any = classes) -> None:
            place = len(feature)
            if inner.children_left[node] < 0:
                values = inner.value[node][0] / inner.value[node][0].sum()
                top = [int(number) for number in np.argsort(-values)[:3] if values[number] >= 0.08]
                feature.append(-1)
                right.append(len(top))
                labels.extend(int(classes[number]) for number in top)
                shares.extend(round(255 * float(values[number])) for number in top)
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
        "labels": np.array(labels, dtype=np.int16),
        "shares": np.array(shares, dtype=np.uint8),
    }


def layer_of(problem: ConvolutionProblem) -> int:
    """A number for the layer of a problem, whatever its batch size, type, layout and direction."""
    layer = (problem.source[1:], problem.weight, problem.stride, problem.groups)
    return zlib.crc32(repr(layer).encode())


def has_odd_channels(problem: ConvolutionProblem) -> bool:
    """Whether the channels of a group, of the input or of the output, are no multiple of 8."""
    return any(channels // problem.groups % 8 > 0 for channels in (problem.source[1], problem.out[1]))


def _part(rows: Sequence[tuple[ConvolutionProblem, int]]) -> Measured:
    problems = [problem for problem, _ in rows]
    return Measured(
        problems, np.array([size for _, size in rows], dtype=np.int64), [terms(problem) for problem in problems]
    )


def judge(grown: Sequence[Any], formulas: Sequence[Formula], part: Measured) -> dict[str, float]:
    """How well trees do: exact, within 1 MiB, the sum of the errors beside the sum of the sizes, and the bound."""
    rows = np.array([features(problem) for problem in part.problems], dtype=np.float64)
    leaves = [(tree, tree.predict_proba(rows)) for tree in grown]
    guesses, larger = [], []
    for place, parts in enumerate(part.parts):
        votes = []
        for tree, shares in leaves:
            top = [number for number in np.argsort(-shares[place])[:3] if shares[place][number] >= 0.08]
            votes += [(formulas[tree.classes_[number]], float(shares[place][number])) for number in top]
        found = by_votes(votes, parts)
        guesses.append(found.size)
        larger.append(found.larger)
    errors = np.abs(np.array(guesses) - part.sizes)
    return {
        "problems": len(guesses),
        "exact": float((errors == 0).mean()),
        "within_1_mib": float((errors <= 2**20).mean()),
        "error_of_bytes": float(errors.sum() / max(part.sizes.sum(), 1)),
        "not_above_larger": float((part.sizes <= np.array(larger)).mean()),
    }


def _fit_direction(
    rows: Sequence[tuple[ConvolutionProblem, int]], direction: str, trees: int, leaves: int, say: Callable[[str], None]
) -> tuple[list[Any], list[Formula]]:
    """The trees and the formulas of one direction."""
    part = _part(rows)
    shares = find_formulas(part)
    labels, formulas = label(part, [formula for formula, _ in shares])
    explained = round(sum(share for _, share in shares), 4)
    say(f"{direction} {len(part.problems)} problems; {len(shares)} formulas explain {explained}")
    for formula, share in shares[:12]:
        say(f"  {share:7.2%} {formula}")
    return grow(part, labels, trees, leaves), formulas


def write_fit(
    found: dict[ConvolutionProblem, int],
    out: Path,
    header: dict[str, Any],
    trees: int,
    leaves: int,
    say: Callable[[str], None],
) -> None:
    """Write the table and the trees into a folder, and say which formulas explain most."""
    out.mkdir(parents=True, exist_ok=True)
    write_table(out / TABLE, found, header)
    arrays: dict[str, Any] = {}
    for direction in _DIRECTIONS:
        rows = [row for row in found.items() if row[0].direction == direction]
        grown, formulas = _fit_direction(rows, direction, trees, leaves, say)
        for name, values in export(grown).items():
            arrays[f"{direction}_{name}"] = values
        arrays[f"{direction}_formulas"] = np.array(formulas, dtype=np.int64)
    np.savez_compressed(out / TREES, **arrays)


# What `cudnn.benchmark` tries: the largest of the candidates that cuDNN names (`ullage measure cudnn`).


class LargestPlans(NamedTuple):
    """The largest workspaces of a problem's candidates: with Fourier transforms, 0 if there are none, and without."""

    transform: int
    others: int


def asked_problems(path: Path) -> dict[ConvolutionProblem, LargestPlans]:
    """Every problem in a file of `ullage measure cudnn`, with what PyTorch would try of it."""
    found: dict[ConvolutionProblem, LargestPlans] = {}
    for row in read_rows(path):
        if "candidates" in row:
            problem = problem_from(row["problem"])
            plans = [CandidatePlan(*plan) for plan in row["candidates"]]
            found[problem] = largest_plans([plan for plan in plans if plan.allowed(problem.kind)])
    return found


def largest_plans(plans: Sequence[CandidatePlan]) -> LargestPlans:
    """
    >>> largest_plans([CandidatePlan(3, 1 << FOURIER, 900), CandidatePlan(62, 1, 40), CandidatePlan(22, 1, 50)])
    LargestPlans(transform=900, others=50)
    """
    transforms = [plan.workspace for plan in plans if plan.notes >> FOURIER & 1]
    others = [plan.workspace for plan in plans if not plan.notes >> FOURIER & 1]
    return LargestPlans(max(transforms, default=0), max(others, default=0))


_WORTH_TABLING = 80 << 20  # bytes; the trees answer for smaller ones
_NEARLY = 0.004  # of a workspace: so near a formula counts as the right one
_NOTHING = Formula(NONE, NONE, NONE, NONE, 0, 0, 0)
_BY_TRANSFORM = _NOTHING._replace(transform=1)
_COPIES = [Formula(*modes, NONE, 0, 0, 0) for modes in _MODES if max(modes) in (PLAIN, PADDED)]


def nearest_formula(size: int, parts: Terms) -> Formula:
    """Copies of some tensors, or the copies of all times a rounded number.

    >>> nearest_formula(150, Terms((0, 100), (0, 50), (0, 10), (0, 36), 2, 1)).out
    1
    """
    if size == 0:
        return _NOTHING
    for formula in _COPIES:
        if abs(evaluate(formula, parts) - size) <= _NEARLY * size:
            return formula
    return _NOTHING._replace(times=round(math.log2(size / all_copies(parts)) * TIMES_AN_OCTAVE) or 1)


def _questions(
    rows: Sequence[tuple[ConvolutionProblem, LargestPlans]],
) -> Iterator[tuple[str, Measured, list[Formula]]]:
    """What the trees of trials answer: the question, the problems with the right sizes, and the right formulas."""
    others = _part([(problem, plans.others) for problem, plans in rows])
    pairs = zip(rows, others.parts, strict=True)
    yield OTHERS, others, [nearest_formula(plans.others, parts) for (_, plans), parts in pairs]
    rows = [row for row in rows if transforms(row[0])]
    transform = _part([(problem, plans.transform) for problem, plans in rows])
    yield TRANSFORM, transform, [_BY_TRANSFORM if plans.transform else _NOTHING for _, plans in rows]


def _grow_for(part: Measured, formulas: Sequence[Formula], trees: int, leaves: int) -> tuple[list[Any], list[Formula]]:
    numbers = {formula: number for number, formula in enumerate(dict.fromkeys(formulas))}
    return grow(part, [numbers[formula] for formula in formulas], trees, leaves), list(numbers)


def write_trials(
    found: dict[ConvolutionProblem, LargestPlans],
    out: Path,
    header: dict[str, Any],
    trees: int,
    leaves: int,
    say: Callable[[str], None],
) -> None:
    """Write the table and the trees of what `cudnn.benchmark` tries into a folder."""
    out.mkdir(parents=True, exist_ok=True)
    worth = {problem: max(plans) for problem, plans in found.items() if max(plans) >= _WORTH_TABLING}
    write_table(out / TRIAL_TABLE, worth, header)
    arrays: dict[str, Any] = {}
    for direction in _DIRECTIONS:
        rows = [row for row in found.items() if row[0].direction == direction]
        for question, part, formulas in _questions(rows):
            grown, known = _grow_for(part, formulas, trees, leaves)
            say(f"{direction}{question} {len(rows)} problems, {len(known)} formulas")
            for name, values in export(grown).items():
                arrays[f"{direction}{question}_{name}"] = values
            arrays[f"{direction}{question}_formulas"] = np.array(known, dtype=np.int64)
    np.savez_compressed(out / TRIAL_TREES, **arrays)


def evaluate_held_out_trials(
    found: dict[ConvolutionProblem, LargestPlans], trees: int, leaves: int, say: Callable[[str], None]
) -> None:
    """Fit trials without every seventh layer and say how well the trees do on those layers; nothing is written."""
    for direction in _DIRECTIONS:
        rows = [row for row in found.items() if row[0].direction == direction]
        learnt = [row for row in rows if layer_of(row[0]) % _EVERY]
        held = dict(
            (question, part) for question, part, _ in _questions([row for row in rows if not layer_of(row[0]) % _EVERY])
        )
        for question, part, formulas in _questions(learnt):
            say(f"{direction}{question} held out: {judge(*_grow_for(part, formulas, trees, leaves), held[question])}")


def evaluate_held_out(
    found: dict[ConvolutionProblem, int], trees: int, leaves: int, say: Callable[[str], None]
) -> None:
    """Fit without every seventh layer and say how well the trees do on those layers; nothing is written."""
    for direction in _DIRECTIONS:
        rows = [row for row in found.items() if row[0].direction == direction]
        held = [row for row in rows if layer_of(row[0]) % _EVERY == 0]
        learnt = [row for row in rows if layer_of(row[0]) % _EVERY]
        grown, formulas = _fit_direction(learnt, direction, trees, leaves, say)
        for name, odd in (("odd channels", True), ("multiples of 8", False)):
            chosen = [row for row in held if has_odd_channels(row[0]) is odd]
            say(f"  held out, {name}: {judge(grown, formulas, _part(chosen))}")
