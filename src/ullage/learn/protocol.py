"""The whole way from examples to a judged network: hold a test part out, cross-validate, train, test once."""

from __future__ import annotations

import platform
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ullage.estimators.walknet_networks import Batch, WalkNet
from ullage.estimators.walknet_weights import Card, build, probabilities
from ullage.learn.examples import Examples
from ullage.learn.folds import FOLDS, Indices, folds, held_out
from ullage.learn.scores import Scores, coarser, scored
from ullage.learn.training import SCHEDULES, Notify, Schedule, classes_of, fit
from ullage.units import GIB

MOST_MEMORY = 160 * GIB  # bins reach further than any GPU of today, so that large jobs are told apart too
BATCH = 256
WIDER = (2, 8)  # folds are judged in bins so many times as wide, too


@dataclass
class Trained:
    """A network, its card, and how it did: a `Scores` a fold, and one on the test part."""

    network: WalkNet
    card: Card
    validation: list[Scores]
    test: Scores
    test_rows: Indices
    learn_rows: Indices
    told: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    wider: dict[int, list[float]] = field(default_factory=dict)


def train(
    examples: Examples, *, family: str, estimator: str, bin: int, seed: int = 1, schedule: Schedule | None = None,
    notify: Notify | None = None, begin: Callable[[str, int], None] | None = None,
) -> Trained:  # fmt: skip
    """Train an estimator of a family; `begin` hears of every training and its epochs, `notify` of every epoch.

    The test part is drawn first. Cross-validation divides the rest, with a new network in every fold; the network that
    is kept learns from all of the rest, and sees the test part once, to be judged.
    """
    card = Card(
        family=family, estimator=estimator, bin=bin, bins=max(2, MOST_MEMORY // bin), gpu=examples.gpu, seed=seed
    )
    build(card)  # a wrong name is told before anything is done
    plan = schedule or SCHEDULES[estimator]
    classes = classes_of(examples.memory, bin, card.bins)
    learn, test = held_out(classes.tolist(), seed)
    validation, wider = [], {factor: list[float]() for factor in WIDER}
    for number, (chosen, validate) in enumerate(folds(classes.tolist(), learn, seed), 1):
        if begin is not None:
            begin(f"fold {number} of {FOLDS}", plan.epochs)
        network = fit(card, *examples.part(chosen), plan, seed, notify)
        jobs = examples.part(validate)[0]
        validation.append(scored(classes[validate], predicted(network, jobs)))
        for factor, shares in wider.items():
            shares.append(float((classes[validate] // factor == predicted(network, jobs, factor)).mean()))
    if begin is not None:
        begin("all but the test part", plan.epochs)
    network = fit(card, *examples.part(learn), plan, seed, notify)
    told = predicted(network, examples.part(test)[0])
    result = Trained(network, card, validation, scored(classes[test], told), test, learn, told, wider)
    _fill(card, result, examples)
    return result


def predicted(network: WalkNet, jobs: Batch, factor: int = 1) -> npt.NDArray[np.int64]:
    """The most probable bin of each job, in bins `factor` times as wide as the network's."""
    return np.concatenate([coarser(found, factor).argmax(1) for found in spread_over_bins(network, jobs)])


def spread_over_bins(network: WalkNet, jobs: Batch) -> list[npt.NDArray[np.floating[Any]]]:
    """The probabilities of all jobs, a piece at a time."""
    pieces = torch.arange(len(jobs)).split(BATCH)
    return [probabilities(network, jobs.rows(piece)).numpy() for piece in pieces]


def _fill(card: Card, result: Trained, examples: Examples) -> None:
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
