"""Trains and judges GPUUtilNet: the paper's Table 7, on rows of a data set with SMACT, SMOCC and DRAMA."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from ullage.errors import InvalidValue
from ullage.estimation.estimators.gpumemnet.features import FAMILIES
from ullage.estimation.estimators.gpumemnet.networks import jobs_of
from ullage_lab.estimators.gpuutilnet import BINS, METRICS, GPUUtilNet, classes_of, empty_network
from ullage_lab.train.fitting import SCHEDULES, Notify, Schedule, fit_classes
from ullage_lab.train.folds import held_out, key_of
from ullage_lab.train.protocol import summary_of_row

# The paper's accuracy, and its recall of the high class.
PAPER: Mapping[tuple[str, str], tuple[float, float]] = {
    ("mlp", "smact"): (0.92, 0.79),
    ("mlp", "smocc"): (0.94, 0.0),
    ("mlp", "drama"): (0.88, 0.27),
    ("cnn", "smact"): (0.77, 0.87),
    ("cnn", "smocc"): (0.71, 0.88),
    ("cnn", "drama"): (0.73, 0.88),
    ("transformer", "smact"): (0.82, 0.89),
    ("transformer", "smocc"): (0.68, 0.36),
    ("transformer", "drama"): (0.62, 0.74),
}
SCHEDULE = SCHEDULES["mlp"]


@dataclass(frozen=True, kw_only=True)
class Table7Line:
    """One line of the table. `constant` is the accuracy of always predicting the most frequent class.

    `high` is the number of rows in the high class, `recall` the predicted share of these; `None` without any.
    """

    family: str
    metric: str
    rows: int
    accuracy: float
    constant: float
    high: int
    recall: float | None
    paper: float
    paper_recall: float


def measured(rows: Sequence[Mapping[str, Any]], family: str, metric: str) -> list[Mapping[str, Any]]:
    """Return the rows of a family that have a figure; the authors' tables have no DRAMA."""
    return [row for row in rows if row["family"] == family and row.get(metric) is not None]


def train(
    rows: Sequence[Mapping[str, Any]], *, seed: int = 1, schedule: Schedule = SCHEDULE, notify: Notify = lambda _: None
) -> GPUUtilNet:
    """Train networks for each family and metric; 30% of the rows are held out and named in the cards."""
    networks, cards = {}, {}
    for family in FAMILIES:
        for metric in METRICS:
            chosen = measured(rows, family, metric)
            if not chosen:
                continue
            summaries = [summary_of_row(row) for row in chosen]
            classes = classes_of([float(row[metric]) for row in chosen], BINS[family, metric])
            learn, test = held_out(classes.tolist(), seed)
            totals = jobs_of([summaries[place] for place in learn], family).totals
            networks[family, metric] = fit_classes(
                partial(empty_network, family), totals.__getitem__, classes[learn], schedule, seed
            )
            cards[family, metric] = {"rows": len(chosen), "test": [key_of(chosen[place]) for place in test]}
            notify(f"{family} {metric}")
    if not networks:
        raise InvalidValue("no row has smact, smocc or drama: 'ullage lab measure dataset --utilization' measures them")
    return GPUUtilNet(networks, cards, str(rows[0].get("gpu")))


def lines_of(model: GPUUtilNet, rows: Sequence[Mapping[str, Any]]) -> list[Table7Line]:
    """Return the table on the rows held out from the networks; if none of the rows is named there, all are unseen."""
    lines = []
    for family, metric in model.networks:
        chosen = measured(rows, family, metric)
        held = set(model.cards[family, metric]["test"])
        test = [row for row in chosen if key_of(row) in held] or chosen
        if not test:
            continue
        true = classes_of([float(row[metric]) for row in test], BINS[family, metric])
        predictions = model.probabilities([summary_of_row(row) for row in test], family, metric).argmax(1)
        high = true == 2
        paper, paper_recall = PAPER[family, metric]
        lines.append(
            Table7Line(
                family=family,
                metric=metric,
                rows=len(test),
                accuracy=float((true == predictions).mean()),
                constant=float(np.bincount(true).max() / len(true)),
                high=int(high.sum()),
                recall=float((predictions[high] == 2).mean()) if high.any() else None,
                paper=paper,
                paper_recall=paper_recall,
            )
        )
    return lines
