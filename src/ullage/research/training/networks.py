"""Training of walknet's networks: cross-entropy over memory bins, Adam, fixed seeds, models built anew every time."""

from __future__ import annotations

import math
import platform
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ullage.errors import InvalidValue
from ullage.estimation.estimators.walknet.networks import (
    Batch,
    Card,
    Factors,
    WalkNet,
    build,
    cross_entropy,
    plain_products,
    probabilities,
)
from ullage.research.training.examples import FOLDS, Examples, Indices, folds, held_out
from ullage.research.training.scores import Scores, coarser, scored
from ullage.units import GIB

Notify = Callable[[str], None]
FINER = 16  # training tells bins apart that are so many times finer: a bin of 1 GiB alone says little about its inside


@dataclass(frozen=True)
class Schedule:
    """How long and how fast to train.

    >>> Schedule().epochs > 10
    True
    """

    epochs: int = 30
    batch: int = 128
    rate: float = 3e-3
    threads: int = 1


SCHEDULES = {"mlp": Schedule(), "transformer": Schedule(rate=2e-3)}


def classes_of(memory: npt.NDArray[np.float64], width: int, bins: int) -> npt.NDArray[np.int64]:
    """The bin that each figure (bytes) falls into; an edge belongs to the bin below it, whose upper edge it is.

    >>> classes_of(np.array([1.0, 2.0, 2.5, 9.0]), 2, 3).tolist()
    [0, 0, 1, 2]
    """
    return np.clip(np.ceil(memory / width).astype(np.int64) - 1, 0, bins - 1)


def fit(
    card: Card,
    jobs: Batch,
    memory: npt.NDArray[np.float64],
    schedule: Schedule,
    seed: int,
    notify: Notify | None = None,
) -> WalkNet:
    """A new network, trained on these jobs and nothing else; `notify` hears of every epoch.

    The network is built here, with its weights drawn from `seed`, and takes its statistics from these jobs: nothing is
    carried over from another fold. Equal arguments give equal weights.
    """
    if len(jobs) < 8:
        raise InvalidValue(f"needed at least 8 rows to train on; found {len(jobs)}")
    torch.set_num_threads(schedule.threads)
    with torch.random.fork_rng(devices=[]), plain_products():
        torch.manual_seed(seed)
        network = build(card)
        network.normal.learn(jobs.totals)
        _begin(network, jobs, memory)
        seen = jobs if card.estimator == "transformer" else jobs.alone()
        _descend(network, seen, _edges(memory, card.bin // FINER), schedule, notify)
    return network.eval()


def _begin(network: WalkNet, jobs: Batch, memory: npt.NDArray[np.float64]) -> None:
    """What is fixed begins with the median of what the walk leaves over: another GPU has another context."""
    parts = jobs.parts.double().numpy()
    fixed = float(np.median((memory - parts[:, 0]) / parts[:, -1]))
    for module in network.modules():
        if isinstance(module, Factors):
            module.begin(min(max(fixed, 0.1), 10.0))


def _edges(memory: npt.NDArray[np.float64], width: int) -> torch.Tensor:
    """The logarithms of the lower and the upper edge of each figure's bin [2, rows]; the first bin begins at 1 byte."""
    place = np.ceil(memory / width) - 1
    return torch.from_numpy(np.log(np.stack([np.maximum(place * width, 1.0), (place + 1) * width]))).float()


def _descend(network: WalkNet, jobs: Batch, edges: torch.Tensor, schedule: Schedule, notify: Notify | None) -> None:
    weights = list(network.parameters())
    optimizer = torch.optim.Adam(weights, lr=schedule.rate, fused=True)
    rounds = math.ceil(len(jobs) / schedule.batch)
    rate = torch.optim.lr_scheduler.OneCycleLR(optimizer, schedule.rate, total_steps=rounds * schedule.epochs + 1)
    for epoch in range(schedule.epochs):
        losses = []
        for chosen in torch.randperm(len(jobs)).split(schedule.batch):
            loss = cross_entropy(network.belief(jobs.rows(chosen)), *edges[:, chosen])
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(weights, 5.0)
            optimizer.step()
            rate.step()
            losses.append(loss.item())
        if notify is not None:
            notify(f"epoch {epoch + 1}, loss {sum(losses) / len(losses):.2f}")


# The whole way from examples to a judged network: hold a test part out, cross-validate, train, test once.

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
