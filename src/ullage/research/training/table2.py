"""The paper's Table 2 again: accuracy of each estimator on each family at each width of bins, beside the paper's."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ullage.errors import InvalidValue
from ullage.estimation.estimators.walknet.networks import Card, WalkNet, load, probabilities, shipped
from ullage.research.training.examples import Examples, Indices
from ullage.research.training.networks import Notify, Schedule, classes_of, predicted, train
from ullage.research.training.scores import Scores, scored
from ullage.units import GIB

# Family, estimator, bin in GiB: the paper's accuracy and F1 (its Table 2; `None` where it reports none), and our goal.
LINES: Mapping[tuple[str, str, int], tuple[float | None, float | None, float]] = {
    ("mlp", "mlp", 1): (0.95, 0.93, 0.97),
    ("mlp", "mlp", 2): (0.97, 0.96, 0.98),
    ("mlp", "transformer", 1): (0.97, 0.96, 0.98),
    ("mlp", "transformer", 2): (0.98, 0.97, 0.99),
    ("cnn", "mlp", 8): (0.83, 0.83, 0.92),
    ("cnn", "transformer", 8): (0.81, 0.81, 0.92),
    ("cnn", "mlp", 1): (None, None, 0.80),
    ("cnn", "transformer", 1): (None, None, 0.80),
    ("transformer", "mlp", 8): (0.88, 0.88, 0.93),
    ("transformer", "transformer", 8): (0.86, 0.86, 0.93),
    ("transformer", "mlp", 1): (None, None, 0.80),
    ("transformer", "transformer", 1): (None, None, 0.80),
}
PAPER_SECONDS = 0.032  # at most, on an AMD EPYC processor
ROUNDS = 100


@dataclass(frozen=True, kw_only=True)
class Line:
    """One line of the table; shares from 0 to 1, `seconds` for one job on one processor core.

    >>> Line(family="mlp", estimator="mlp", bin=1 << 30, gpu="H200", rows=9, accuracy=0.98, goal=0.97, f1=0.98,
    ...      f1_macro=0.9, under=0.01, over=0.01, seconds=0.001).reached
    True
    """

    family: str
    estimator: str
    bin: int
    gpu: str
    rows: int
    accuracy: float
    f1: float
    f1_macro: float
    under: float
    over: float
    seconds: float
    goal: float
    paper: float | None = None
    paper_f1: float | None = None
    validation: float | None = None
    trained: str = ""

    @property
    def reached(self) -> bool:
        """Whether the goal was reached."""
        return self.accuracy >= self.goal

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self) | {"reached": self.reached}


def lines_of(examples: Examples, family: str, network: WalkNet, card: Card, test: Indices, trained: str) -> list[Line]:
    """The lines of one network: the same test part, in bins of every width that the table has."""
    jobs, memory = examples.part(test)
    took = seconds_a_job(network, examples)
    found = []
    for (of_family, estimator, width), (paper, paper_f1, goal) in LINES.items():
        if (of_family, estimator) != (family, card.estimator) or width * GIB % card.bin:
            continue
        factor = width * GIB // card.bin
        true = classes_of(memory, width * GIB, -(-card.bins // factor))
        scores = scored(true, predicted(network, jobs, factor))
        found.append(
            Line(
                family=family, estimator=estimator, bin=width * GIB, gpu=examples.gpu, rows=scores.rows,
                accuracy=scores.accuracy, f1=scores.f1, f1_macro=scores.f1_macro, under=scores.under,
                over=scores.over, seconds=took, goal=goal, paper=paper, paper_f1=paper_f1,
                validation=_validation(card, factor), trained=trained,
            )
        )  # fmt: skip
    return found


def shipped_lines(examples: Examples, family: str, estimator: str, folder: Path | None) -> list[Line]:
    """The lines of trained weights, on the rows of these data that they were not trained on.

    Which rows were held out is written in the file of weights. Data in which none of them is found is all unseen.
    """
    file = shipped(family, estimator)
    network, card = load(folder / file.name if folder is not None else file)
    if card.gpu != examples.gpu:
        raise InvalidValue(f"{file.name} was trained on {card.gpu}, the data are from {examples.gpu}: add --retrain")
    held = set(card.test)
    test = np.array([place for place, key in enumerate(examples.keys) if key in held], dtype=np.int64)
    if not len(test):
        test = np.arange(len(examples))
    return lines_of(examples, family, network, card, test, "shipped" if folder is None else str(folder))


def retrained_lines(
    examples: Examples, family: str, estimator: str, *, seed: int, schedule: Schedule | None = None,
    notify: Notify | None = None, begin: Callable[[str, int], None] | None = None,
) -> list[Line]:  # fmt: skip
    """The lines of a network that is trained now, with cross-validation, on these data."""
    result = train(
        examples, family=family, estimator=estimator, bin=GIB, seed=seed, schedule=schedule, notify=notify, begin=begin
    )
    return lines_of(examples, family, result.network, result.card, result.test_rows, "now")


def _validation(card: Card, factor: int) -> float | None:
    """The mean accuracy of the folds in bins `factor` times as wide; `None` where the card does not have it."""
    folds: Sequence[float] = [one["accuracy"] for one in card.figures.get("validation", ())]
    if factor != 1:
        folds = card.figures.get("validation_wider", {}).get(str(factor), ())
    return sum(folds) / len(folds) if folds else None


def seconds_a_job(network: WalkNet, examples: Examples) -> float:
    """The median time of one job through the network, on one core, features being there.

    The processor's time, so that other work on the machine does not count."""
    longest = int(examples.jobs.there.sum(1).argmax())
    one = examples.jobs.rows(torch.tensor([longest]))
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        times = []
        for _ in range(ROUNDS):
            begin = time.thread_time()
            probabilities(network, one)
            times.append(time.thread_time() - begin)
    finally:
        torch.set_num_threads(before)
    return sorted(times)[ROUNDS // 2]


def mean_of(folds: Sequence[Scores]) -> float:
    """The mean accuracy of the folds.

    >>> mean_of([scored([0, 1], [0, 1]), scored([0, 1], [0, 0])])
    0.75
    """
    return sum(one.accuracy for one in folds) / len(folds)
