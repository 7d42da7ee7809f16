"""Reproduces the paper's Table 2: accuracy of each estimator on each family and bin width, next to the paper's."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from ullage.errors import InvalidValue
from ullage.estimation.estimators.gpumemnet.networks import WIDTHS, load, shipped
from ullage.estimation.estimators.weights import ModelCard, probabilities
from ullage.units import GIB
from ullage_lab.train.fitting import Notify, Schedule, classes_of
from ullage_lab.train.folds import Indices
from ullage_lab.train.protocol import Examples, predicted, scored, train

# Family, estimator, bin in GiB: the paper's accuracy and F1 (Table 2; `None` where it has none).
LINES: Mapping[tuple[str, str, float], tuple[float | None, float | None]] = {
    ("mlp", "mlp", 1): (0.95, 0.93),
    ("mlp", "mlp", 2): (0.97, 0.96),
    ("mlp", "transformer", 1): (0.97, 0.96),
    ("mlp", "transformer", 2): (0.98, 0.97),
    ("cnn", "mlp", 8): (0.83, 0.83),
    ("cnn", "transformer", 8): (0.81, 0.81),
    ("cnn", "mlp", 1): (None, None),
    ("cnn", "transformer", 1): (None, None),
    ("transformer", "mlp", 8): (0.88, 0.88),
    ("transformer", "transformer", 8): (0.86, 0.86),
    ("transformer", "mlp", 1): (None, None),
    ("transformer", "transformer", 1): (None, None),
}
ROUNDS = 100


@dataclass(frozen=True, kw_only=True)
class Table2Line:
    """One line of the table; shares from 0 to 1, `seconds` for one job on one processor core."""

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
    paper: float | None = None
    paper_f1: float | None = None
    validation: float | None = None
    trained: str = ""


def lines_of(
    examples: Examples,
    family: str,
    network: torch.nn.Module,
    card: ModelCard,
    test: Indices,
    trained: str,
) -> list[Table2Line]:
    """Return the line of one network, in its own bins; none if the table has no such line."""
    jobs, memory = examples.part(test)
    published = LINES.get((family, card.estimator, card.bin / GIB))
    if published is None:
        return []
    scores = scored(classes_of(memory, card.bin, card.bins), predicted(network, jobs))
    line = Table2Line(
        family=family,
        estimator=card.estimator,
        bin=card.bin,
        gpu=examples.gpu,
        **{name: getattr(scores, name) for name in ("rows", "accuracy", "f1", "f1_macro", "under", "over")},
        seconds=seconds_a_job(network, examples),
        paper=published[0],
        paper_f1=published[1],
        validation=_validation(card),
        trained=trained,
    )
    return [line]


def shipped_lines(examples: Examples, family: str, estimator: str, folder: Path | None) -> list[Table2Line]:
    """Return the lines of trained weights, on the rows of these data outside their training.

    The file of weights names the held-out rows. Data without any of them is all unseen.
    """
    lines = []
    for width in WIDTHS[family, estimator]:
        file = shipped(family, estimator, width * GIB)
        network, card = load(folder / file.name if folder is not None else file)
        if card.gpu != examples.gpu:
            raise InvalidValue(
                f"{file.name} was trained on {card.gpu}, the data are from {examples.gpu}: add --retrain"
            )
        held = set(card.test)
        test = np.array([place for place, key in enumerate(examples.keys) if key in held], dtype=np.int64)
        if not len(test):
            test = np.arange(len(examples))
        trained = "shipped" if folder is None else str(folder)
        lines += lines_of(examples, family, network, card, test, trained)
    return lines


def retrained_lines(
    examples: Examples,
    family: str,
    estimator: str,
    *,
    seed: int,
    schedule: Schedule | None = None,
    notify: Notify = lambda _: None,
    begin: Callable[[str, int], None] = lambda *_: None,
) -> list[Table2Line]:
    """Return the lines of networks that are trained now, with cross-validation, on these data."""
    lines = []
    for width in WIDTHS[family, estimator]:
        result = train(
            examples,
            family=family,
            estimator=estimator,
            bin=width * GIB,
            seed=seed,
            schedule=schedule,
            notify=notify,
            begin=begin,
        )
        lines += lines_of(examples, family, result.network, result.card, result.test_rows, "now")
    return lines


def _validation(card: ModelCard) -> float | None:
    """Return the mean accuracy of the folds; `None` if the card has none."""
    folds: Sequence[float] = [one["accuracy"] for one in card.figures.get("validation", ())]
    return sum(folds) / len(folds) if folds else None


def seconds_a_job(network: torch.nn.Module, examples: Examples) -> float:
    """Return the median time of one job through the network, on one core, without computing features.

    This is processor time, so that other work on the machine does not count."""
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
