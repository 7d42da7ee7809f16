"""Grows the trees of each engine on cuDNN's answers: how many parts of a sum it keeps, and which formula gives the rest
of a workspace."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from sklearn.tree import DecisionTreeClassifier

from drawn_convolutions.answers import Labels, aimed_at, product_parts
from drawn_convolutions.drawing import problems_of
from grown_trees import Grower, named
from ullage.virtual.cudnn import plans
from ullage.virtual.cudnn.formulas import (
    TIMES_AN_OCTAVE,
    ConvolutionProblem,
    Formula,
    Lengths,
    Terms,
    all_copies,
    lengths,
    needed_copies,
    terms,
)
from ullage.virtual.cudnn.workspaces import COPIED, PARTS
from ullage_lab.train import workspaces as table

SAMPLE = 20_000  # problems of an engine that its trees are grown on
FORMULAS = 40  # of an engine
SPLIT_SAMPLE = 1_000_000  # problems of an engine that the trees are grown on that split its sums
LEAVES = 90_000  # at most, of the tree that knows every problem
DOUBTFUL = 50  # problems in a leaf of the tree that tells how sure the other one is
PERSISTENT_SAMPLE = 150_000
NEAR = 16_384  # bytes
LEAST_LEFT = 1000  # bytes beside the copies of a persistent kernel that keeps partial sums


def parts_taken(problem: ConvolutionProblem, plan: plans.EnginePlan, cut: plans.Grid, size: int, knob: int) -> int:
    """Into how many parts a sum is split: a knob, or, of persistent kernels and products, what the workspace tells."""
    if plan.engine in plans.PRODUCT[plan.direction]:
        row = np.array([lengths(problem).row])
        return int(product_parts(plan.direction, row, np.array([size]))[0]) if cut.rows else 0
    if plan.engine not in plans.PERSISTENT[plan.direction]:
        return plans.parts_by(plan, cut, knob)
    left = size - needed_copies(problem) - 16
    if not cut.left or not cut.tile_bytes or left < LEAST_LEFT:
        return 0
    tiles = left // cut.tile_bytes
    return tiles // cut.left if tiles % cut.left == 0 and cut.left < tiles <= cut.clusters else 0


def in_copies(size: int, parts: Terms) -> Formula:
    """The stand-in for a workspace that no formula gives: copies of all tensors, times a power of the root of two."""
    octaves = round(2 * np.log2(max(size, 1) / all_copies(parts))) / 2
    times = round(TIMES_AN_OCTAVE * min(max(octaves, -6), 6))
    return Formula(0, 0, 0, 0, 0, 0, 0, 0, times or 1)


def grow_parts(direction: str, engine: int, labels: Labels) -> dict[str, Any]:
    """Two trees that say into how many parts an engine splits its sums (`p`): one that knows every problem, and a
    coarse one for how sure that is. None of an engine that splits nothing."""
    if not any(engine in each[direction] for each in (plans.PERSISTENT, plans.SLICED, plans.SPLIT, plans.PRODUCT)):
        return {}
    plan_of = [plans.EnginePlan(direction, number, dict(knobs)) for number, knobs in labels.plans]
    places = np.flatnonzero(np.array([plan.engine == engine for plan in plan_of] + [False])[labels.plan])
    if engine in plans.PRODUCT[direction]:
        places = places[(labels.rows[places, 2] == 1) | (labels.rows[places, 3] == 1)]
    places = np.random.default_rng(2).permutation(places)[:SPLIT_SAMPLE]
    given = labels.rows[places].astype(np.int64)
    if engine in plans.PERSISTENT[direction]:
        places, given = places[:PERSISTENT_SAMPLE], given[:PERSISTENT_SAMPLE]
        knobs = [labels.plans[number][1] for number in labels.plan[places]]
        inputs, parts = _persistent(direction, engine, given, knobs, labels.sizes[places].tolist())
    else:
        knobs = np.array([plans.part_knobs(plan) for plan in plan_of])[labels.plan[places]]
        inputs, parts = np.concatenate([given, knobs], 1), labels.parts[places]
        if engine in plans.PRODUCT[direction]:
            columns = np.stack(plans.product_inputs(Lengths(given.T), direction), 1)
            parts = product_parts(direction, given, labels.sizes[places])
            inputs, parts = np.concatenate([columns, knobs], 1), aimed_at(direction, given, parts)
    inputs, tested = np.asarray(inputs, np.int64), len(places) // 50
    with TemporaryDirectory() as folder:
        grower = Grower(Path(folder))
        (fine,), (coarse,) = (
            grower.grow(inputs[tested:], parts[tested:], 1, LEAVES, least=least) for least in (1, DOUBTFUL)
        )
    right = (named(fine, inputs[:tested]) == parts[:tested]).mean()
    leaves = int((fine.tree_.children_left < 0).sum())
    print(f"{direction} {engine}: {leaves} leaves name the parts of {right:.1%} of {tested} held out", flush=True)
    return _arrays({f"{direction}{engine}{PARTS}": ([fine, coarse], [])})


def _persistent(direction: str, engine: int, rows: Any, knobs: list[Any], sizes: list[int]) -> tuple[Any, Any]:
    """Of problems of a persistent kernel, what its trees are told and the parts they should name."""
    inputs, parts = [], []
    for problem, each, whole in zip(problems_of(rows, direction), knobs, sizes, strict=True):
        plan, size = plans.EnginePlan(direction, engine, dict(each)), lengths(problem)
        cut = plans.grid(plan, size)
        count = parts_taken(problem, plan, cut, whole, 0)
        inputs.append(plans.tree_inputs(plan, size, cut, 0))
        parts.append(plans.AS_MANY_AS_FIT if count == cut.most_parts > 1 else count)
    return np.array(inputs), np.array(parts)


def grow_copied(direction: str, engine: int, labels: Labels) -> dict[str, Any]:
    """The tree of an engine that says which formula gives the rest of a workspace (`c`)."""
    of_engine = np.array([plan[0] == engine for plan in labels.plans] + [False])
    places = np.flatnonzero(of_engine[labels.plan])
    places = np.random.default_rng(1).permutation(places)
    grouped = labels.rows[places, 6] > 1  # copied in more ways than others: as many as there are, up to a half
    some = places[grouped][: SAMPLE // 2]
    places = np.sort(np.concatenate([some, places[~grouped][: SAMPLE - len(some)]]))
    problems, inputs, rests = problems_of(labels.rows[places].astype(np.int64), direction), [], []
    for problem, place in zip(problems, places.tolist(), strict=True):
        plan = plans.EnginePlan(direction, engine, dict(labels.plans[labels.plan[place]][1]))
        size = lengths(problem)
        cut = plans.grid(plan, size, problem.channels_last or size.batch == 1)
        whole = int(labels.sizes[place])
        parts = parts_taken(problem, plan, cut, whole, int(labels.parts[place]))
        inputs.append(plans.tree_inputs(plan, size, cut, parts))
        rests.append(whole - plans.partial_bytes(plan, cut, parts))
    sizes = np.array(rests, dtype=np.int64)
    part = table.Measured(problems, np.maximum(sizes, 0), [terms(problem) for problem in problems])
    formulas = [formula for formula, _ in table.find_formulas(part)][:FORMULAS]
    columns, chosen = table.all_columns(part.parts), np.full(len(places), len(formulas))
    for number, formula in reversed(list(enumerate(formulas))):
        chosen[table.sizes_by(formula, columns) == part.sizes] = number
    exact = chosen < len(formulas)
    for number, formula in reversed(list(enumerate(formulas))):  # counters that are not known
        chosen[~exact & (np.abs(table.sizes_by(formula, columns) - part.sizes) <= NEAR)] = number
    exact_or_near = chosen < len(formulas)
    rest = [in_copies(int(size), each) for size, each in zip(sizes, part.parts, strict=True)]
    listed = formulas + sorted({formula for formula, known in zip(rest, exact_or_near, strict=True) if not known})
    number_of = {formula: number for number, formula in enumerate(listed)}
    chosen = np.where(exact_or_near, chosen, [number_of.get(formula, 0) for formula in rest])
    known = sizes >= 0
    tree = DecisionTreeClassifier(max_leaf_nodes=600, min_samples_leaf=2, random_state=0)
    trees = {f"{direction}{engine}{COPIED}": ([tree.fit(np.array(inputs)[known], chosen[known])], listed)}
    right = (exact & known & (tree.predict(np.array(inputs)) == chosen)).mean()
    print(
        f"{direction} {engine}: {len(places)} problems; {len(formulas)} formulas explain {(exact & known).mean():.1%}, "
        f"{right:.1%} found, {(exact_or_near & known).mean():.1%} nearly",
        flush=True,
    )
    return _arrays(trees)


def _arrays(trees: dict[str, tuple[list[Any], list[Any]]]) -> dict[str, Any]:
    """Trees with their formulas, by name, as arrays."""
    arrays: dict[str, Any] = {}
    for name, (grown, given) in trees.items():
        exported = table.export(grown) | {"formulas": np.array(given, dtype=np.int64).reshape(-1, len(Formula._fields))}
        arrays |= {f"{name}_{key}": value for key, value in exported.items()}
    return arrays
