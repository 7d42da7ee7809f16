"""Regression of memory, four ways: as the original tried it, and what makes it work, one change at a time.

The dissertation found that regression does not learn, and put it down to memory growing in steps. The steps are small
(the allocator's segments have 2 to 20 MiB). What stops it is the scale of things: raw features span eight decades, so
the largest drowns the others, and an error in bytes is that of the few largest jobs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from ullage.units import GIB, MIB
from ullage_lab.estimators.walknet.inputs import TOTALS, closed_sum
from ullage_lab.estimators.walknet.networks import plain_products
from ullage_lab.train.fitting import classes_of
from ullage_lab.train.folds import held_out
from ullage_lab.train.protocol import Examples

Floats = npt.NDArray[np.float64]
QUANTILES = (0.05, 0.5, 0.99)
PAPER = ("depth", "batch_size", "parameters", "activations")  # what the dissertation gave its regression
EPOCHS, BATCH, RATE = 150, 128, 1e-3


@dataclass(frozen=True)
class Way:
    """One way to set the task: which features on which scale, and what is predicted.

    >>> [way.name for way in WAYS][0]
    'as the original'
    """

    name: str
    features: str  # "raw", "normal" (of raw values), "log" (logarithms, normalised) or "all" (all of them)
    target: str  # "bytes" (in MiB), "log", or "left over" (the logarithm of what the closed formula is off by)


WAYS = (
    Way("as the original", "raw", "bytes"),
    Way("normalised features", "normal", "bytes"),
    Way("logarithms of both", "log", "log"),
    Way("what the closed formula leaves over", "all", "left over"),
)


@dataclass(frozen=True)
class RegressionOutcome:
    """How one way did on the held-out part: errors of the median, and how often the quantiles held.

    `first` and `last` are the mean absolute error in MiB on the training part after the first and the last epoch.
    """

    name: str
    first: float
    last: float
    error_mib: float
    error_median: float
    under: float
    below_high: float
    same_bin: float


def compare(
    examples: Examples, *, seed: int = 1, epochs: int = EPOCHS, begin: Callable[[str, int], None] | None = None,
    notify: Callable[[str], None] | None = None,
) -> list[RegressionOutcome]:  # fmt: skip
    """The same network, trained each way on the same rows and judged on the same test part."""
    torch.set_num_threads(1)  # the network is too small to divide
    classes = classes_of(examples.memory, GIB, 160)
    learn, test = held_out(classes.tolist(), seed)
    found = []
    for way in WAYS:
        if begin is not None:
            begin(way.name, epochs)
        found.append(_try(way, examples, learn, test, seed, epochs, notify))
    return found


def _try(
    way: Way, examples: Examples, learn: npt.NDArray[np.int64], test: npt.NDArray[np.int64], seed: int, epochs: int,
    notify: Callable[[str], None] | None,
) -> RegressionOutcome:  # fmt: skip
    features = _features(way, examples, learn)
    base = np.array([math.log(closed_sum(parts)) for parts in examples.jobs.parts.numpy()])
    target = {
        "bytes": examples.memory / MIB,
        "log": np.log(examples.memory),
        "left over": np.log(examples.memory) - base,
    }
    back = {"bytes": lambda y, b: y * MIB, "log": lambda y, b: np.exp(y), "left over": lambda y, b: np.exp(y + b)}
    wanted = torch.from_numpy(target[way.target]).float()
    with torch.random.fork_rng(devices=[]), plain_products():
        torch.manual_seed(seed)
        network = nn.Sequential(
            nn.Linear(features.shape[1], 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, len(QUANTILES))
        )

        def memory(rows: npt.NDArray[np.int64]) -> Floats:
            with torch.no_grad():
                told = network(features[rows]).numpy().astype(np.float64)
            return np.asarray(back[way.target](told, base[rows, None]), dtype=np.float64)

        def off(rows: npt.NDArray[np.int64]) -> float:
            return float(np.abs(memory(rows)[:, 1] - examples.memory[rows]).mean() / MIB)

        errors = []
        for epoch in _descend(network, features[learn], wanted[learn], epochs):
            errors.append(off(learn))
            if notify is not None:
                notify(f"epoch {epoch}, off by {errors[-1]:.0f} MiB")
    told, true = memory(test), examples.memory[test]
    return RegressionOutcome(
        way.name, errors[0], errors[-1], off(test), float(np.median(np.abs(told[:, 1] / true - 1))),
        float((told[:, 1] < true).mean()), float((true <= told[:, 2]).mean()),
        float((classes_of(np.maximum(told[:, 1], 1), GIB, 160) == classes_of(true, GIB, 160)).mean()),
    )  # fmt: skip


def _descend(network: nn.Module, features: torch.Tensor, wanted: torch.Tensor, epochs: int) -> Iterator[int]:
    """Train by Adam on the pinball loss; gives the number of every epoch after it."""
    optimizer = torch.optim.Adam(network.parameters(), lr=RATE, fused=True)
    for epoch in range(1, epochs + 1):
        for chosen in torch.randperm(len(features)).split(BATCH):
            loss = pinball(network(features[chosen]), wanted[chosen])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        yield epoch


def _features(way: Way, examples: Examples, learn: npt.NDArray[np.int64]) -> torch.Tensor:
    """Features on the way's scale; statistics come from the training part."""
    totals: torch.Tensor = examples.jobs.totals.double()
    if way.features != "all":
        totals = totals[:, [TOTALS.index(name) for name in PAPER]]
    if way.features in ("raw", "normal"):
        totals = totals.expm1()  # totals are logarithms: back to the numbers themselves
    if way.features != "raw":
        mean, spread = totals[learn].mean(0), totals[learn].std(0)
        totals = (totals - mean) / torch.where(spread > 1e-9, spread, torch.ones_like(spread))
    return totals.float()


def pinball(told: torch.Tensor, true: torch.Tensor) -> torch.Tensor:
    """The loss whose minimum is at the quantiles; for the median alone it is half the absolute error.

    >>> round(pinball(torch.zeros(1, 3), torch.ones(1)).item(), 3)
    0.513
    """
    over = true.unsqueeze(1) - told
    shares = torch.tensor(QUANTILES)
    return torch.maximum(shares * over, (shares - 1) * over).mean()
