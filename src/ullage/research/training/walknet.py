"""Training of walknet's networks: cross-entropy over memory bins, Adam, fixed seeds, models built anew every time."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from ullage.errors import InvalidValue
from ullage.estimation.estimators.walknet.networks import (
    Factors,
    WalkNet,
    WalknetBatch,
    build,
    cross_entropy,
    plain_products,
)
from ullage.estimation.estimators.weights import ModelCard

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
    patience: int | None = None  # stop so many epochs after the best one


SCHEDULES = {"mlp": Schedule(), "transformer": Schedule(rate=2e-3)}


def classes_of(memory: npt.NDArray[np.float64], width: int, bins: int) -> npt.NDArray[np.int64]:
    """The bin that each figure (bytes) falls into; an edge belongs to the bin below it, whose upper edge it is.

    >>> classes_of(np.array([1.0, 2.0, 2.5, 9.0]), 2, 3).tolist()
    [0, 0, 1, 2]
    """
    return np.clip(np.ceil(memory / width).astype(np.int64) - 1, 0, bins - 1)


def fit(
    card: ModelCard,
    jobs: WalknetBatch,
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


def _begin(network: WalkNet, jobs: WalknetBatch, memory: npt.NDArray[np.float64]) -> None:
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


def _descend(
    network: WalkNet, jobs: WalknetBatch, edges: torch.Tensor, schedule: Schedule, notify: Notify | None
) -> None:
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
