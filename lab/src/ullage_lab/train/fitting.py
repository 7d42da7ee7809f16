"""Fits GPUMemNet's networks to examples.

It follows the published code: batches of 128 at a rate of 0.001, stopped 30 epochs after the best loss on a part that
it does not learn from, 600 at the most. Transformers take batches of 32 here, 30 epochs at the most and 5 to wait: an
epoch costs the same and moves four times as far, without which their long sequences take hours on one core.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.nn import functional

from ullage.errors import InvalidValue
from ullage.estimation.estimators.gpumemnet.networks import GPUMemNet, SummaryBatch
from ullage.estimation.estimators.gpumemnet.networks import build as build_gpumemnet
from ullage.estimation.estimators.weights import ModelCard, plain_products
from ullage_lab.train.folds import held_out

Notify = Callable[[str], None]
Network = TypeVar("Network", bound=nn.Module)


@dataclass(frozen=True)
class Schedule:
    epochs: int = 30
    batch: int = 128
    rate: float = 3e-3
    threads: int = 1
    patience: int | None = None  # stop this many epochs after the best one


def classes_of(memory: npt.NDArray[np.float64], width: int, bins: int) -> npt.NDArray[np.int64]:
    """Return the bin of each figure in bytes; an edge belongs to the bin below it.

    >>> classes_of(np.array([1.0, 2.0, 2.5, 9.0]), 2, 3).tolist()
    [0, 0, 1, 2]
    """
    return np.clip(np.ceil(memory / width).astype(np.int64) - 1, 0, bins - 1)


SCHEDULES = {
    "mlp": Schedule(epochs=600, batch=128, rate=1e-3, patience=30),
    "transformer": Schedule(epochs=30, batch=32, rate=1e-3, patience=5),
}
STOP_SHARE = 2 / 9  # of the rows: they tell when to stop (published: 20%, and 70% to learn from)
AT_ONCE = 256


def fit(
    card: ModelCard,
    jobs: SummaryBatch,
    memory: npt.NDArray[np.float64],
    schedule: Schedule,
    seed: int,
    notify: Notify = lambda _: None,
) -> GPUMemNet:
    """Return a new network trained only on these jobs; call `notify` for every epoch.

    Some of the jobs are held out and decide when to stop; the best weights on them are returned. Equal arguments give
    equal weights.
    """
    if len(jobs) < 12:
        raise InvalidValue(f"training needs at least 12 rows, got {len(jobs)}")
    seen = jobs if card.estimator == "transformer" else jobs.alone()
    classes = classes_of(memory, card.bin, card.bins)
    return fit_classes(lambda: build_gpumemnet(card), seen.rows, classes, schedule, seed, notify)


def fit_classes(
    build: Callable[[], Network],
    rows: Callable[[torch.Tensor], Any],
    classes: npt.NDArray[np.int64],
    schedule: Schedule,
    seed: int,
    notify: Notify = lambda _: None,
) -> Network:
    """Train a new network on the classes of jobs; `rows` returns its inputs for some of them."""
    torch.set_num_threads(schedule.threads)
    parts = held_out(classes.tolist(), seed, STOP_SHARE)
    with torch.random.fork_rng(devices=[]), plain_products():
        torch.manual_seed(seed)
        network = build()
        _descend(network, rows, torch.from_numpy(classes), [torch.from_numpy(part) for part in parts], schedule, notify)
    return network.eval()


def _descend(
    network: nn.Module,
    rows: Callable[[torch.Tensor], Any],
    classes: torch.Tensor,
    parts: Sequence[torch.Tensor],
    schedule: Schedule,
    notify: Notify,
) -> None:
    """Learn from the first of the `parts`; the second decides when to stop, and which weights to keep."""
    learn, stop = parts
    optimizer = torch.optim.Adam(network.parameters(), lr=schedule.rate, fused=True)
    best, since, state = float("inf"), 0, network.state_dict()
    for epoch in range(schedule.epochs):
        network.train()
        for chosen in learn[torch.randperm(len(learn))].split(schedule.batch):
            if len(chosen) < 2:
                continue  # batch normalisation needs two
            loss = functional.cross_entropy(network(rows(chosen)), classes[chosen])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        stop_loss = _loss(network, rows, classes, stop)
        since += 1
        if stop_loss < best:
            best, since = stop_loss, 0
            state = {name: value.clone() for name, value in network.state_dict().items()}
        notify(f"epoch {epoch + 1}, loss {stop_loss:.2f}")
        if schedule.patience is not None and since >= schedule.patience:
            break
    network.load_state_dict(state)


def _loss(network: nn.Module, rows: Callable[[torch.Tensor], Any], classes: torch.Tensor, stop: torch.Tensor) -> float:
    network.eval()
    with torch.inference_mode():
        scores = torch.cat([network(rows(piece)) for piece in stop.split(AT_ONCE)])
    return float(functional.cross_entropy(scores, classes[stop]))
