"""The whole way from examples to a judged network: hold a test part out, cross-validate, train, test once."""

from __future__ import annotations

import platform
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ullage.estimation.estimators.weights import ModelCard, probabilities
from ullage.research.training.examples import Examples
from ullage.research.training.folds import FOLDS, Indices, folds, held_out
from ullage.research.training.methods import WALKNET, Method
from ullage.research.training.scores import Scores, coarser, scored
from ullage.research.training.walknet import Notify, Schedule, classes_of

BATCH = 256
WIDER = (2, 8)  # folds are judged in bins so many times as wide, too


@dataclass
class Trained:
    """A network, its card, and how it did: a `Scores` a fold, and one on the test part."""

    network: Any
    card: ModelCard
    validation: list[Scores]
    test: Scores
    test_rows: Indices
    learn_rows: Indices
    told: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    wider: dict[int, list[float]] = field(default_factory=dict)
    method: str = WALKNET.name


def train(
    examples: Examples, *, family: str, estimator: str, bin: int, seed: int = 1, schedule: Schedule | None = None,
    notify: Notify | None = None, begin: Callable[[str, int], None] | None = None, method: Method = WALKNET,
    validate: bool = True,
) -> Trained:  # fmt: skip
    """Train an estimator of a family; `begin` hears of every training and its epochs, `notify` of every epoch.

    The test part is drawn first. Cross-validation divides the rest, with a new network in every fold; the network that
    is kept learns from all of the rest, and sees the test part once, to be judged.
    """
    bins = method.bins(bin, examples.memory)
    card = ModelCard(family=family, estimator=estimator, bin=bin, bins=bins, gpu=examples.gpu, seed=seed)
    method.build(card)  # a wrong name is told before anything is done
    plan = schedule or method.schedules[estimator]
    classes = classes_of(examples.memory, bin, bins)
    drawn = method.drawn_by or bin
    learn, test = held_out(classes_of(examples.memory, drawn, max(1, bins * bin // drawn)).tolist(), seed)
    validation, wider = [], {factor: list[float]() for factor in WIDER}
    parts = folds(classes.tolist(), learn, seed) if validate else ()
    for number, (chosen, judged) in enumerate(parts, 1):
        if begin is not None:
            begin(f"fold {number} of {FOLDS}", plan.epochs)
        network = method.fit(card, *examples.part(chosen), plan, seed, notify)
        jobs = examples.part(judged)[0]
        validation.append(scored(classes[judged], predicted(network, jobs)))
        for factor, shares in wider.items():
            shares.append(float((classes[judged] // factor == predicted(network, jobs, factor)).mean()))
    if begin is not None:
        begin("all but the test part", plan.epochs)
    network = method.fit(card, *examples.part(learn), plan, seed, notify)
    told = predicted(network, examples.part(test)[0])
    result = Trained(network, card, validation, scored(classes[test], told), test, learn, told, wider, method.name)
    _fill(card, result, examples)
    return result


def predicted(network: torch.nn.Module, jobs: Any, factor: int = 1) -> npt.NDArray[np.int64]:
    """The most probable bin of each job, in bins `factor` times as wide as the network's."""
    return np.concatenate([coarser(found, factor).argmax(1) for found in spread_over_bins(network, jobs)])


def spread_over_bins(network: torch.nn.Module, jobs: Any) -> list[npt.NDArray[np.floating[Any]]]:
    """The probabilities of all jobs, a piece at a time."""
    pieces = torch.arange(len(jobs)).split(BATCH)
    return [probabilities(network, jobs.rows(piece)).numpy() for piece in pieces]


def _fill(card: ModelCard, result: Trained, examples: Examples) -> None:
    card.rows = len(examples)
    card.figures = {
        "test": _rounded(result.test),
        "validation": [_rounded(one) for one in result.validation],
        "validation_wider": {str(factor): [round(one, 4) for one in shares] for factor, shares in result.wider.items()},
    }
    card.versions = {f"measured with {name}": value for name, value in examples.versions.items()}
    card.versions |= {"trained with torch": torch.__version__, "trained with python": platform.python_version()}
    card.range = [int(examples.memory.min()), int(examples.memory.max())]
    card.test = [examples.keys[place] for place in result.test_rows.tolist()]


def _rounded(scores: Scores) -> dict[str, float]:
    return {name: round(value, 4) for name, value in scores.to_dict().items()}
