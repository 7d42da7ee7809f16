"""Training of `fast`: trees on the residual of the closed formula, and a bound calibrated on unseen jobs."""

import json
import math
import platform
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ullage.errors import InvalidValue, UllageError
from ullage.hardware import gpu as find_gpu
from ullage.jobs.model import Model
from ullage.performance.trees import Trees
from ullage_lab.estimators.fast.estimator import Fast, vector_of
from ullage_lab.estimators.fast.rows import row_of
from ullage_lab.judge.questions import Question
from ullage_lab.judge.truth import MeasuredRun, read_truth
from ullage_lab.judge.worker import Record
from ullage_lab.train.trees import grow

Floats = npt.NDArray[np.float64]
HIGH, SURE, FOLDS = 0.98, 0.99, 5
_LEAVES, _TREES = 15, {"middle": 300, "high": 150}


@dataclass(frozen=True)
class FastJobs:
    """Jobs to learn from: features, the closed formula, measured reserved memory, and the group each belongs to.

    A group (a family of real models, or one generated job) is never split between fitting and validation.
    """

    features: Floats
    closed: Floats
    reserved: Floats
    groups: list[str]
    real: npt.NDArray[np.bool_]
    names: list[str]

    @property
    def target(self) -> Floats:
        """Return the target of the training: the logarithm of the formula's error factor."""
        return np.log(self.reserved / self.closed)


def jobs_of(generated: Sequence[Mapping[str, Any]], real: Sequence[Mapping[str, Any]]) -> FastJobs:
    """Return jobs from rows of data sets, and from rows of real models with their `group`."""
    rows = [row for row in (*generated, *real) if row.get("peak_reserved")]
    if len(rows) < 4 * FOLDS:
        raise InvalidValue(f"training fast needs at least {4 * FOLDS} measured rows, got {len(rows)}")
    made = [vector_of(row) for row in rows]
    return FastJobs(
        np.stack([features for features, _ in made]),
        np.array([closed for _, closed in made]),
        np.array([float(row["peak_reserved"]) for row in rows]),
        [str(row.get("group") or f"{row.get('family')} {row.get('id')}") for row in rows],
        np.array([bool(row.get("group")) for row in rows]),
        [str(row.get("id")) for row in rows],
    )


def train_fast(
    jobs: FastJobs, *, gpu: str, seed: int = 1, begin: Callable[[str], None] = lambda _: None
) -> tuple[Fast, Floats]:
    """Return the trees, and predictions by trees fitted without a job's group: [jobs, 2] logarithms, median and bound.

    The bound's shift is the conformal quantile of the jobs out of their folds; real models are fewer and harder than
    generated ones, so each kind gets its own and the larger one is taken.
    """
    unseen = np.zeros((len(jobs.closed), 2))
    for number, (fit, validate) in enumerate(_group_folds(jobs.groups, seed), 1):
        begin(f"fold {number} of {FOLDS}")
        for column, kind in enumerate(("middle", "high")):
            trees = _grow(jobs.features[fit], jobs.target[fit], kind, seed)
            unseen[validate, column] = [trees.sum(features) for features in jobs.features[validate]]
    begin("all jobs")
    kinds = [part for part in (jobs.real, ~jobs.real) if part.sum() >= 20]
    shift = max(conformal(jobs.target[part] - unseen[part, 1], SURE) for part in kinds)
    unseen[:, 1] = np.maximum(unseen[:, 1] + shift, unseen[:, 0])
    middle, high = (_grow(jobs.features, jobs.target, kind, seed) for kind in ("middle", "high"))
    card = {
        "gpu": gpu,
        "seed": seed,
        "jobs": len(jobs.closed),
        "generated": judged(jobs, unseen, ~jobs.real),
        "real": judged(jobs, unseen, jobs.real),
        "python": platform.python_version(),
    }
    return Fast(middle, high, shift, card), unseen


def conformal(scores: Floats, share: float) -> float:
    """Return the smallest shift that held for the given share of jobs, with the correction for a finite number of them.

    >>> conformal(np.arange(1, 100) / 100, 0.9)
    0.9
    """
    rank = min(math.ceil((len(scores) + 1) * share), len(scores))
    return float(np.sort(scores)[rank - 1])


def judged(jobs: FastJobs, unseen: Floats, part: npt.NDArray[np.bool_]) -> dict[str, float]:
    """Return errors of reserved memory on jobs of unseen groups, and how the bound held; empty for no jobs."""
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
    """Return folds that never split a group; the seed draws the fold of each group."""
    names = sorted(set(groups))
    order = np.random.default_rng(seed).permutation(len(names))
    fold = {names[place]: int(number) % FOLDS for number, place in enumerate(order)}
    place = np.array([fold[group] for group in groups])
    return [(np.flatnonzero(place != number), np.flatnonzero(place == number)) for number in range(FOLDS)]


def _grow(features: Floats, target: Floats, kind: str, seed: int) -> Trees:
    options = {
        "objective": "quantile",
        "alpha": 0.5 if kind == "middle" else HIGH,
        "num_leaves": _LEAVES,
        "learning_rate": 0.06,
        "min_data_in_leaf": min(10 if kind == "middle" else 20, max(1, len(target) // 10)),
        "bagging_fraction": 0.8,
        "bagging_freq": 1,
        "lambda_l2": 1.0,
        "seed": seed,
        "max_depth": 7,
    }
    return grow(features, target, options, _TREES[kind], "trainings of fast")


# Real models that were measured (`ullage measure`), as rows to learn from: features by name, grouped by family.


def group_of(model: str) -> str:
    """Return the family in a model's name: the letters before the first digit or underscore.

    >>> group_of("timm:vit_small_patch16_224"), group_of("tv:resnet50"), group_of("hf:BertForMaskedLM")
    ('vit', 'resnet', 'bert')
    """
    name = model.partition(":")[2]
    if model.startswith("hf:"):
        name = re.split(r"(?<=[a-z0-9])(?=For|LM|Model)", name)[0]
    return re.split(r"[\d_.]", name.casefold())[0] or name.casefold()


def read_real(
    file: Path, begin: Callable[[str, int], None] = lambda *_: None, notify: Callable[[str], None] = lambda _: None
) -> list[dict[str, Any]]:
    """Return the runs of a measured file with their features; leave out models whose layers cannot be read."""
    runs = [run for truth in read_truth(file) for run in truth.runs if not run.oom and run.reserved]
    begin("reading real models", len(runs))
    rows = []
    for run in runs:
        row = _row(run)
        if row is not None:
            rows.append(row)
        notify(run.id)
    if not rows:
        raise InvalidValue(f"{file} has no run of a model whose layers can be read")
    return rows


def _row(run: MeasuredRun) -> dict[str, Any] | None:
    try:
        configuration = Model.from_row(run.row)
        if configuration.inference:
            return None
        row = row_of(configuration)
    except UllageError:
        return None
    group = "real " + group_of(configuration.name)
    return row | {
        "id": run.id,
        "group": group,
        "peak_reserved": run.reserved,
        "process_memory": run.process,
        "run": run,
    }


def write_records(
    path: Path, rows: Sequence[Mapping[str, Any]], unseen: npt.NDArray[np.float64], before: int, gpu: str
) -> None:
    """Write the predictions of trees fitted without a model's family, in the form of `ullage lab evaluate --resume`.

    `unseen` has the generated jobs first (`before` of them), then the rows in their order.
    """
    card = find_gpu(gpu)
    context, most = card.context or 0, card.context_upper or card.context or 0
    lines = []
    for row, (middle, high) in zip(rows, np.exp(unseen[before:]).tolist(), strict=True):
        closed = vector_of(row)[1]
        reserved, upper = int(closed * middle), int(closed * high) + most
        record = Record(
            estimator="fast",
            run=str(row["id"]),
            gpu=gpu,
            figure=reserved + context,
            kind="process",
            reserved=reserved,
            process=reserved + context,
            upper=upper,
            context=context,
            seconds=0.0,
            cpu_seconds=0.0,
            notes=("from trees that had not seen this family of models",),
        )
        key = Question("fast", row["run"], gpu).key
        lines.append(json.dumps({"key": key, **record.to_dict()}) + "\n")
    try:
        path.write_text("".join(lines))
    except OSError as error:
        raise InvalidValue(f"cannot write {path}: {error.strerror}") from None
