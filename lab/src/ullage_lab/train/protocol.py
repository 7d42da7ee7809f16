"""Trains and judges a network on a data set: holds a test part out, cross-validates, trains, tests once.

Rows become examples (what the networks read, and the measured memory). A classification over memory bins is scored by
accuracy, precision, recall, F1, underestimates and its confusion.
"""

import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ullage.errors import InvalidValue
from ullage.estimation.estimators.gpumemnet.networks import SummaryBatch, build, jobs_of
from ullage.estimation.estimators.printed_summary import ModelSummary, SummaryLayer
from ullage.estimation.estimators.weights import ModelCard, probabilities
from ullage.units import GIB
from ullage_lab.train.fitting import SCHEDULES, Notify, Schedule, classes_of, fit
from ullage_lab.train.folds import FOLDS, Indices, folds, held_out, key_of

TARGET = "process_memory"
BATCH = 256


def summary_of_row(row: Mapping[str, Any]) -> ModelSummary:
    """Return the summary of a row of a data set (`ullage lab data clean`, or the authors' tables).

    Rows include attention that is a function, without parameters; a summary does not print it.
    """
    layers = [
        SummaryLayer(str(layer["type"]), int(layer["activations"]), int(layer["parameters"]))
        for layer in row.get("layers") or ()
    ]
    return ModelSummary(
        layers=tuple(layer for layer in layers if layer.kind != "attention" or layer.parameters),
        parameters=int(row["parameters"]),
        batch_size=int(row["batch_size"]),
        activation_function=str(row.get("activation_function") or "") or None,
    )


@dataclass
class Examples:
    """Examples of one family: `jobs` as inputs of the networks, `memory` in bytes, and the original `rows`."""

    rows: list[dict[str, Any]]
    jobs: SummaryBatch
    memory: npt.NDArray[np.float64]
    keys: list[str]

    def __len__(self) -> int:
        return len(self.rows)

    def part(self, chosen: Indices) -> tuple[Any, npt.NDArray[np.float64]]:
        return self.jobs.rows(torch.from_numpy(chosen)), self.memory[chosen]

    @property
    def gpu(self) -> str:
        """Return the GPU of the measurements; refuse examples from several."""
        names = sorted({str(row.get("gpu") or "unknown") for row in self.rows})
        if len(names) > 1:
            raise InvalidValue(f"rows must be of one GPU, got {', '.join(names)}")
        return names[0]

    @property
    def versions(self) -> dict[str, str]:
        names = ("torch", "cuda", "cudnn", "driver")
        by_name = {name: sorted({str(row[name]) for row in self.rows if row.get(name)}) for name in names}
        return {name: ", ".join(values) for name, values in by_name.items() if values}


def examples_of(rows: Sequence[Mapping[str, Any]]) -> Examples:
    """Return examples from rows of one family, without those that have no measured figure (out of memory)."""
    measured = [dict(row) for row in rows if row.get(TARGET)]
    if not measured:
        raise InvalidValue(f"no row has {TARGET}: there is nothing to learn from")
    memory = np.array([row[TARGET] for row in measured], dtype=np.float64)
    families = sorted({str(row["family"]) for row in measured})
    if len(families) > 1:
        raise InvalidValue(f"rows must be of one family, got {', '.join(families)}")
    jobs = jobs_of([summary_of_row(row) for row in measured], families[0])
    return Examples(measured, jobs, memory, [key_of(row) for row in measured])


def read_rows(file: Path, family: str | None = None) -> list[dict[str, Any]]:
    """Read the rows of a Parquet file of `ullage lab data clean`, or of the authors' CSV, of one family or of all."""
    from ullage_lab.clean.measured_files import CleaningReport, read_authors
    from ullage_lab.clean.schema import frame, read_dataset

    table = frame(read_authors(file, CleaningReport())) if file.suffix == ".csv" else read_dataset(file)
    rows: list[dict[str, Any]] = table.to_dicts()
    chosen = [row for row in rows if family is None or row["family"] == family]
    if not chosen:
        there = ", ".join(sorted({str(row["family"]) for row in rows})) or "none"
        raise InvalidValue(f"{file} has no rows{f' of the family {family}' if family else ''}; families in it: {there}")
    return chosen


@dataclass(frozen=True)
class Scores:
    """Shares from 0 to 1; precision, recall and F1 are means over the classes, weighted by their rows.

    `under` is the share of jobs in a higher bin than predicted (they could run out of memory), `over` the share in a
    lower one (they would waste some).

    >>> scored([0, 0, 1, 2], [0, 1, 1, 1]).under
    0.25
    """

    rows: int
    accuracy: float
    precision: float
    recall: float
    f1: float
    f1_macro: float
    under: float
    over: float
    within_one: float
    classes: int


def scored(true: Sequence[int] | npt.NDArray[np.int64], predictions: Sequence[int] | npt.NDArray[np.int64]) -> Scores:
    from sklearn.metrics import precision_recall_fscore_support

    truth, answer = np.asarray(true, dtype=np.int64), np.asarray(predictions, dtype=np.int64)
    options: dict[str, Any] = {"zero_division": 0}
    precision, recall, f1, _ = precision_recall_fscore_support(truth, answer, average="weighted", **options)
    macro = precision_recall_fscore_support(truth, answer, average="macro", **options)[2]
    return Scores(
        rows=len(truth),
        accuracy=float((truth == answer).mean()),
        precision=float(precision),
        recall=float(recall),
        f1=float(f1),
        f1_macro=float(macro),
        under=float((answer < truth).mean()),
        over=float((answer > truth).mean()),
        within_one=float((np.abs(answer - truth) <= 1).mean()),
        classes=len(np.unique(truth)),
    )


def confusion(true: Sequence[int], predictions: Sequence[int]) -> tuple[list[int], list[list[int]]]:
    """Return the bins that occur, and the number of rows of each bin (a line) predicted in each bin (a column).

    >>> confusion([0, 0, 2], [0, 2, 2])
    ([0, 2], [[1, 1], [0, 1]])
    """
    from sklearn.metrics import confusion_matrix

    names = sorted({*map(int, true), *map(int, predictions)})
    return names, confusion_matrix(true, predictions, labels=names).tolist()


@dataclass
class Trained:
    """A network, its card, and its `Scores`: one per fold, and one on the test part."""

    network: Any
    card: ModelCard
    validation: list[Scores]
    test: Scores
    test_rows: Indices
    learn_rows: Indices
    predictions: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, dtype=np.int64))


def train(
    examples: Examples,
    *,
    family: str,
    estimator: str,
    bin: int,
    seed: int = 1,
    schedule: Schedule | None = None,
    notify: Notify = lambda _: None,
    begin: Callable[[str, int], None] = lambda *_: None,
    validate: bool = True,
) -> Trained:
    """Train an estimator of a family; call `begin` for every training with its epochs, and `notify` for every epoch.

    The test part is drawn first. Cross-validation divides the rest, with a new network in every fold; the network that
    is kept learns from all of the rest, and sees the test part once, to be judged.
    """
    bins = max(2, int(-(-examples.memory.max() // bin)))  # the classes that occur, as published
    card = ModelCard(family=family, estimator=estimator, bin=bin, bins=bins, gpu=examples.gpu, seed=seed)
    build(card)  # reports a wrong name before any work
    plan = schedule or SCHEDULES[estimator]
    classes = classes_of(examples.memory, bin, bins)
    # Networks of all widths are judged on the same rows.
    learn, test = held_out(classes_of(examples.memory, GIB, max(1, bins * bin // GIB)).tolist(), seed)
    validation = []
    parts = folds(classes.tolist(), learn, seed) if validate else ()
    for number, (chosen, judged) in enumerate(parts, 1):
        begin(f"fold {number} of {FOLDS}", plan.epochs)
        network = fit(card, *examples.part(chosen), plan, seed, notify)
        jobs = examples.part(judged)[0]
        validation.append(scored(classes[judged], predicted(network, jobs)))
    begin("all but the test part", plan.epochs)
    network = fit(card, *examples.part(learn), plan, seed, notify)
    predictions = predicted(network, examples.part(test)[0])
    result = Trained(network, card, validation, scored(classes[test], predictions), test, learn, predictions)
    card.rows = len(examples)
    card.figures = {
        "test": _rounded(result.test),
        "validation": [_rounded(one) for one in result.validation],
    }
    card.versions = {f"measured with {name}": value for name, value in examples.versions.items()}
    card.versions |= {"trained with torch": torch.__version__, "trained with python": platform.python_version()}
    card.range = [int(examples.memory.min()), int(examples.memory.max())]
    card.test = [examples.keys[place] for place in test.tolist()]
    return result


def predicted(network: torch.nn.Module, jobs: SummaryBatch) -> npt.NDArray[np.int64]:
    return np.concatenate([scores.argmax(1) for scores in spread_over_bins(network, jobs)])


def spread_over_bins(network: torch.nn.Module, jobs: Any) -> list[npt.NDArray[np.floating[Any]]]:
    pieces = torch.arange(len(jobs)).split(BATCH)
    return [probabilities(network, jobs.rows(piece)).numpy() for piece in pieces]


def _rounded(scores: Scores) -> dict[str, float]:
    return {name: round(value, 4) for name, value in asdict(scores).items()}
