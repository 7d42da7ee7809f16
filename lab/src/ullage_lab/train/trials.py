"""Make the virtual GPU's tables for `cudnn.benchmark` from cuDNN's plans (`ullage measure cudnn`).

    ullage lab train convolutions plans.jsonl --trials --out FOLDER --describe '{"gpu": "NVIDIA H200", ...}'

PyTorch takes memory for the plan with the largest workspace. Trees guess two things of a problem: whether cuDNN names a
plan by Fourier transforms, and which formula gives the largest of the others. A table has what they do not guess.
`--held-out` leaves out every seventh family of problems, those with the same channels and filter, and says how well
the trees do on it. Needs scikit-learn.
"""

import math
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ullage.virtual.cudnn.arrays import read_arrays, write_arrays
from ullage.virtual.cudnn.formulas import (
    FOURIER,
    FOURIER_NOTE,
    NO_BUFFER,
    NONE,
    PADDED_COPIES,
    PLAIN,
    TIMES_AN_OCTAVE,
    WIDE,
    CandidatePlan,
    ConvolutionProblem,
    Formula,
    all_copies,
    by_median,
    transforms,
)
from ullage.virtual.cudnn.workspaces import MULTIPROCESSORS, OTHERS, TRANSFORM, TRIAL_TABLE, TRIAL_TREES
from ullage_lab.draw.convolutions import BATCHES
from ullage_lab.train.workspaces import (
    EVERY,
    MODES,
    Measured,
    all_columns,
    answers,
    by_direction,
    feature_rows,
    grow,
    guess,
    measured_part,
    named_arrays,
    sizes_by,
    write_table,
)


class LargestPlans(NamedTuple):
    """The largest workspaces of a problem's candidates: with Fourier transforms, 0 if there are none, and without."""

    transform: int
    others: int


def asked_problems(path: Path) -> dict[ConvolutionProblem, LargestPlans]:
    """Yield every problem in a file of `ullage measure cudnn`, with the plans that PyTorch would try."""
    return {
        problem: largest_plans([plan for plan in plans if plan.allowed(problem.kind)])
        for problem, plans in answers(path)
    }


def largest_plans(plans: Sequence[CandidatePlan]) -> LargestPlans:
    """
    >>> largest_plans([CandidatePlan(3, 1 << FOURIER_NOTE, 900), CandidatePlan(62, 1, 40), CandidatePlan(22, 1, 50)])
    LargestPlans(transform=900, others=50)
    """
    transforms = [plan.workspace for plan in plans if plan.notes >> FOURIER_NOTE & 1]
    others = [plan.workspace for plan in plans if not plan.notes >> FOURIER_NOTE & 1]
    return LargestPlans(max(transforms, default=0), max(others, default=0))


_WORTH_TABLING = 80 << 20  # bytes
_MOST_A_TREE = 90_000  # problems that one tree is grown on
_WELL_GUESSED = 0.01  # of the largest plan
_NEGLIGIBLE = 1 << 20  # bytes
_NEARLY = 0.004  # of a workspace: a formula within this error counts as right
_NOTHING = Formula(NONE, NONE, NONE, NONE, 0, 0, 0)
_BY_TRANSFORM = _NOTHING._replace(buffer=FOURIER)
_TILE_KIB = (64, 128)  # of partial results that each multiprocessor keeps
_TRIED = [
    Formula(*modes, NONE, 0, 0, 0)._replace(**beside)
    for beside in (
        *({"buffer": buffer} for buffer in range(PADDED_COPIES + 1) if buffer != FOURIER),
        {"partial": PLAIN, "partials": -1},
        *({"constant": MULTIPROCESSORS * size << 10} for size in _TILE_KIB),
    )
    for modes in MODES
    if WIDE not in modes
]


def nearest_formulas(part: Measured) -> list[Formula]:
    """Return a formula for each problem: the near one that explains most problems, or else copies of all tensors times
    a rounded number."""
    formulas = [_NOTHING] * len(part.parts)
    left = np.flatnonzero(part.sizes >= _NEGLIGIBLE)
    sizes = part.sizes[left]
    columns = all_columns([part.parts[place] for place in left])
    applies = columns["buffers"] > 0
    applies[:, NO_BUFFER] = True
    near = [np.abs(sizes_by(formula, columns) - sizes) <= _NEARLY * sizes for formula in _TRIED]
    fits = np.stack([one & applies[:, formula.buffer] for one, formula in zip(near, _TRIED, strict=True)], 1)
    while len(left):
        counts = fits.sum(0)
        best = int(counts.argmax())
        if not counts[best]:
            break
        for place in left[fits[:, best]]:
            formulas[place] = _TRIED[best]
        left, fits = left[~fits[:, best]], fits[~fits[:, best]]
    for place in left:
        times = math.log2(part.sizes[place] / all_copies(part.parts[place])) * TIMES_AN_OCTAVE
        formulas[place] = _NOTHING._replace(times=round(times) or 1)
    return formulas


class TrialTrees(NamedTuple):
    """The trees of one direction for tried plans, by question, each with its formulas."""

    others: tuple[list[Any], list[Formula]]
    transform: tuple[list[Any], list[Formula]] | None  # none: no plan by Fourier transforms was asked for


def _trees_of_trials(group: Mapping[ConvolutionProblem, LargestPlans], trees: int, leaves: int) -> TrialTrees:
    """Grow the trees of one direction; those for transforms are a yes or a no and have half as many leaves."""
    others = measured_part((problem, plans.others) for problem, plans in group.items())
    rows = feature_rows(others)
    transformed = [place for place, problem in enumerate(group) if transforms(problem)]
    by_transforms = [
        _BY_TRANSFORM if plans.transform else _NOTHING for problem, plans in group.items() if transforms(problem)
    ]
    return TrialTrees(
        _grow_for(rows, nearest_formulas(others), trees, leaves),
        _grow_for(rows[transformed], by_transforms, trees, leaves // 2) if transformed else None,
    )


def _questions(direction: str, grown: TrialTrees) -> Iterator[tuple[str, tuple[list[Any], list[Formula]]]]:
    """Yield the existing trees, by the name of their arrays."""
    for question, trees in zip((OTHERS, TRANSFORM), grown, strict=True):
        if trees is not None:
            yield f"{direction}{question}", trees


def add_trees(
    trials: Mapping[ConvolutionProblem, LargestPlans], out: Path, trees: int, leaves: int, say: Callable[[str], None]
) -> None:
    """Grow more trees for both questions, which vote together with those in a folder."""
    arrays = read_arrays(out / TRIAL_TREES)
    for direction, group in by_direction(trials):
        for name, grown in _questions(direction, _trees_of_trials(group, trees, leaves)):
            before = {part: arrays[part] for part in arrays if part.startswith(f"{name}_")}
            arrays |= beside(name, before, named_arrays(name, *grown))
        say(f"{direction} {len(group)} problems, {trees} more trees")
    write_arrays(out / TRIAL_TREES, arrays)


def beside(name: str, first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """Return two sets of trees as one: labels of the second are places among the formulas of both."""
    first, second = ({part.removeprefix(f"{name}_"): each[part] for part in each} for each in (first, second))
    joined = {name: np.concatenate([first[name], second[name]]) for name in ("feature", "step", "shares", "formulas")}
    joined["roots"] = np.concatenate([first["roots"], second["roots"] + np.int32(len(first["feature"]))])
    joined["labels"] = np.concatenate([first["labels"], second["labels"] + np.int16(len(first["formulas"]))])
    thresholds, places = np.unique(
        np.concatenate([each["thresholds"][each["threshold"]] for each in (first, second)]), return_inverse=True
    )
    joined |= {"thresholds": thresholds, "threshold": places.astype(np.uint16)}
    return {f"{name}_{part}": values for part, values in joined.items()}


def _grow_for(rows: Any, formulas: Sequence[Formula], trees: int, leaves: int) -> tuple[list[Any], list[Formula]]:
    numbers = {formula: number for number, formula in enumerate(dict.fromkeys(formulas))}
    labels = [numbers[formula] for formula in formulas]
    return grow(rows, labels, trees, leaves, most=_MOST_A_TREE), list(numbers)


def _guess_trials(grown: TrialTrees, problems: Measured) -> list[tuple[int, int]]:
    """Return the largest plan of each problem, and its possible sizes."""
    rows = feature_rows(problems)
    guesses = guess(*grown.others, rows, problems.parts, by_median)
    transformed = [place for place, problem in enumerate(problems.problems) if transforms(problem)]
    if grown.transform is not None and transformed:
        parts = [problems.parts[place] for place in transformed]
        for place, other in zip(transformed, guess(*grown.transform, rows[transformed], parts), strict=True):
            one = guesses[place]
            guesses[place] = one._replace(size=max(one.size, other.size), larger=max(one.larger, other.larger))
    return [(one.size, one.larger) for one in guesses]


def write_fit(
    trials: Mapping[ConvolutionProblem, LargestPlans],
    out: Path,
    header: dict[str, Any],
    trees: int,
    leaves: int,
    say: Callable[[str], None],
) -> None:
    """Write the trees for the plans that `cudnn.benchmark` tries into a folder, and a table of the wrong guesses."""
    out.mkdir(parents=True, exist_ok=True)
    arrays: dict[str, Any] = {}
    tabled: dict[ConvolutionProblem, int] = {}
    for direction, group in by_direction(trials):
        grown = _trees_of_trials(group, trees, leaves)
        for name, answer in _questions(direction, grown):
            arrays |= named_arrays(name, *answer)
        usual = {problem: max(plans) for problem, plans in group.items() if problem.source[0] in BATCHES}
        guesses = _guess_trials(grown, measured_part(usual.items())) if usual else []
        for (problem, size), (guessed, _) in zip(usual.items(), guesses, strict=True):
            if max(size, guessed) >= _WORTH_TABLING and abs(guessed - size) > _WELL_GUESSED * size:
                tabled[problem] = size
        say(f"{direction} {len(group)} problems, {len(usual)} of usual batch sizes, {len(tabled)} tabled so far")
    write_arrays(out / TRIAL_TREES, arrays)
    write_table(out / TRIAL_TABLE, tabled, header)


def family_of(problem: ConvolutionProblem) -> int:
    """Return a number that is equal for all problems with the same channels and filter."""
    channels = problem.source[1] // problem.groups, problem.out[1] // problem.groups
    return zlib.crc32(repr((channels, problem.weight[2:])).encode())


def evaluate_held_out(
    trials: Mapping[ConvolutionProblem, LargestPlans], trees: int, leaves: int, say: Callable[[str], None]
) -> None:
    """Fit trials without every seventh family, and report how well the trees do on those; write nothing."""
    for direction, group in by_direction(trials):
        learnt = {one: plans for one, plans in group.items() if family_of(one) % EVERY}
        held = {one: max(plans) for one, plans in group.items() if one not in learnt and max(plans) >= _WORTH_TABLING}
        if not learnt or not held:
            continue
        part = measured_part(held.items())
        guesses = np.array(_guess_trials(_trees_of_trials(learnt, trees, leaves), part), dtype=np.float64)
        errors = np.abs(guesses[:, 0] / part.sizes - 1)
        say(
            f"{direction} {len(held)} problems held out: within 1% {(errors <= 0.01).mean():.3f}, "
            f"10% {(errors <= 0.1).mean():.3f}; error in the median {np.median(errors):.3f}, "
            f"90% {np.quantile(errors, 0.9):.3f}; not above what it may be {(part.sizes <= guesses[:, 1]).mean():.3f}"
        )
