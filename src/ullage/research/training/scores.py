"""How good a classification over memory bins is: accuracy, precision, recall, F1, underestimates, confusion."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class Scores:
    """Shares from 0 to 1; precision, recall and F1 are means over the classes, weighed by their rows.

    `under` is the share of jobs in a higher bin than the one that was told (they could run out of memory), `over` the
    share in a lower one (they would waste some).

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

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


def scored(true: Sequence[int] | npt.NDArray[np.int64], told: Sequence[int] | npt.NDArray[np.int64]) -> Scores:
    """The scores of told bins against true ones."""
    from sklearn.metrics import precision_recall_fscore_support

    truth, answer = np.asarray(true, dtype=np.int64), np.asarray(told, dtype=np.int64)
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


def confusion(true: Sequence[int], told: Sequence[int]) -> tuple[list[int], list[list[int]]]:
    """The bins that occur, and how many rows of each (a line) were told to be in each (a column).

    >>> confusion([0, 0, 2], [0, 2, 2])
    ([0, 2], [[1, 1], [0, 1]])
    """
    from sklearn.metrics import confusion_matrix

    names = sorted({*map(int, true), *map(int, told)})
    return names, confusion_matrix(true, told, labels=names).tolist()


def coarser(probabilities: npt.NDArray[np.floating[Any]], factor: int) -> npt.NDArray[np.floating[Any]]:
    """The probabilities of bins `factor` times as wide.

    >>> coarser(np.array([[0.1, 0.2, 0.3, 0.4]]), 2).round(1).tolist()
    [[0.3, 0.7]]
    """
    rows, bins = probabilities.shape
    padded = np.zeros((rows, -(-bins // factor) * factor))
    padded[:, :bins] = probabilities
    wide: npt.NDArray[np.floating[Any]] = padded.reshape(rows, -1, factor).sum(2)
    return wide
