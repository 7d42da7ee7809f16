"""Training of `fast`: trees on what the closed formula leaves over, and a bound calibrated on unseen jobs."""

from __future__ import annotations

import math
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ullage.errors import InvalidValue, MissingPackage
from ullage.estimators.fast import Fast
from ullage.estimators.fast_inputs import NAMES, vector_of
from ullage.estimators.fast_trees import Trees

Floats = npt.NDArray[np.float64]
HIGH, SURE, FOLDS = 0.98, 0.99, 5
_LEAVES, _TREES = 15, {"middle": 300, "high": 150}


@dataclass(frozen=True)
class Jobs:
    """Jobs to learn from: features, the closed formula, measured reserved memory, and the group each belongs to.

    A group (a family of real models, or one generated job) is never split: what validates shares none with what fits.
    """

    features: Floats
    closed: Floats
    reserved: Floats
    groups: list[str]
    real: npt.NDArray[np.bool_]
    names: list[str]

    @property
    def target(self) -> Floats:
        """What is learned: the logarithm of the factor that the formula is off by."""
        return np.log(self.reserved / self.closed)


def jobs_of(generated: Sequence[Mapping[str, Any]], real: Sequence[Mapping[str, Any]]) -> Jobs:
    """Jobs from rows of data sets, and from rows of real models with their `group`."""
    rows = [row for row in (*generated, *real) if row.get("peak_reserved")]
    if len(rows) < 4 * FOLDS:
        raise InvalidValue(f"needed at least {4 * FOLDS} measured rows to train fast on; found {len(rows)}")
    made = [vector_of(row) for row in rows]
    return Jobs(
        np.stack([features for features, _ in made]),
        np.array([closed for _, closed in made]),
        np.array([float(row["peak_reserved"]) for row in rows]),
        [str(row.get("group") or f"{row.get('family')} {row.get('id')}") for row in rows],
        np.array([bool(row.get("group")) for row in rows]),
        [str(row.get("id")) for row in rows],
    )


def train_fast(
    jobs: Jobs, *, gpu: str, seed: int = 1, begin: Callable[[str], None] | None = None
) -> tuple[Fast, Floats]:
    """The trees, and what trees that had not seen a job's group say of it: [jobs, 2] logarithms, median and bound.

    The bound's shift is the conformal quantile of the jobs out of their folds; real models are fewer and harder than
    generated ones, so each kind gets its own and the larger one is taken.
    """
    unseen = np.zeros((len(jobs.closed), 2))
    for number, (fit, validate) in enumerate(_group_folds(jobs.groups, seed), 1):
        if begin is not None:
            begin(f"fold {number} of {FOLDS}")
        for column, kind in enumerate(("middle", "high")):
            trees = _grow(jobs.features[fit], jobs.target[fit], kind, seed)
            unseen[validate, column] = [trees.sum(features) for features in jobs.features[validate]]
    if begin is not None:
        begin("all jobs")
    kinds = [part for part in (jobs.real, ~jobs.real) if part.sum() >= 20]
    shift = max(conformal(jobs.target[part] - unseen[part, 1], SURE) for part in kinds)
    unseen[:, 1] = np.maximum(unseen[:, 1] + shift, unseen[:, 0])
    middle, high = (_grow(jobs.features, jobs.target, kind, seed) for kind in ("middle", "high"))
    card = {"gpu": gpu, "seed": seed, "jobs": len(jobs.closed), "generated": judged(jobs, unseen, ~jobs.real),
            "real": judged(jobs, unseen, jobs.real), "python": platform.python_version()}  # fmt: skip
    return Fast(middle, high, shift, card), unseen


def conformal(scores: Floats, share: float) -> float:
    """The smallest shift that held for so many of the jobs, with the correction for a finite number of them.

    >>> conformal(np.arange(1, 100) / 100, 0.9)
    0.9
    """
    rank = min(math.ceil((len(scores) + 1) * share), len(scores))
    return float(np.sort(scores)[rank - 1])


def judged(jobs: Jobs, unseen: Floats, part: npt.NDArray[np.bool_]) -> dict[str, float]:
    """Errors of reserved memory on jobs whose group was not seen, and how the bound held; empty for no jobs."""
    if not part.any():
        return {}
    error = np.exp(unseen[part, 0] - jobs.target[part]) - 1
    above = np.exp(unseen[part, 1] - jobs.target[part])
    formula = np.exp(-jobs.target[part]) - 1
    return {
        "jobs": int(part.sum()),
        "median": float(np.median(np.abs(error))),
        "mean": float(np.abs(error).mean()),
        "under": float((error < 0).mean()),
        "covered": float((above >= 1).mean()),
        "bound_above": float(np.median(above) - 1),
        "formula_median": float(np.median(np.abs(formula))),
    }


def _group_folds(groups: Sequence[str], seed: int) -> list[tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]]:
    """Folds that never split a group; which group goes where is drawn from the seed."""
    names = sorted(set(groups))
    order = np.random.default_rng(seed).permutation(len(names))
    fold = {names[place]: int(number) % FOLDS for number, place in enumerate(order)}
    place = np.array([fold[group] for group in groups])
    return [(np.flatnonzero(place != number), np.flatnonzero(place == number)) for number in range(FOLDS)]


def _grow(features: Floats, target: Floats, kind: str, seed: int) -> Trees:
    try:
        import lightgbm
    except ImportError:
        raise MissingPackage("lightgbm", "trainings of fast") from None
    options = {
        "objective": "quantile", "alpha": 0.5 if kind == "middle" else HIGH, "num_leaves": _LEAVES,
        "learning_rate": 0.06, "min_data_in_leaf": min(10 if kind == "middle" else 20, max(1, len(target) // 10)),
        "feature_fraction": 0.7, "bagging_fraction": 0.8, "bagging_freq": 1, "lambda_l2": 1.0, "verbosity": -1,
        "seed": seed, "deterministic": True, "num_threads": 1, "max_depth": 7,
    }  # fmt: skip
    data = lightgbm.Dataset(features, target, feature_name=[f"f{place}" for place in range(len(NAMES))])
    booster = lightgbm.train(options, data, num_boost_round=_TREES[kind])
    return Trees.from_lists([_nodes(tree["tree_structure"]) for tree in booster.dump_model()["tree_info"]])


def _nodes(root: dict[str, Any]) -> list[dict[str, Any]]:
    """LightGBM's nested tree as a list, the root first."""
    nodes: list[dict[str, Any]] = []

    def add(node: dict[str, Any]) -> int:
        place = len(nodes)
        nodes.append({})
        if "leaf_value" in node:
            nodes[place] = {"value": node["leaf_value"]}
            return place
        found = {"feature": node["split_feature"], "threshold": node["threshold"]}
        nodes[place] = found | {"left": add(node["left_child"]), "right": add(node["right_child"])}
        return place

    add(root)
    return nodes
