"""Divides rows into a held-out test part and folds for cross-validation, with equal shares of classes."""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ullage.errors import InvalidValue

Indices = npt.NDArray[np.int64]
TEST_SHARE, FOLDS = 0.3, 3


def key_of(row: Mapping[str, Any]) -> str:
    """Return a short key of a row's configuration, the same in every file."""
    name = f"{row.get('configuration') or row.get('id')}|{row.get('gpu')}"
    return hashlib.blake2b(name.encode(), digest_size=6).hexdigest()


def strata(classes: Sequence[int], least: int) -> Indices:
    """Join rare classes to their neighbours, so that each part can have some of each.

    >>> strata([0, 0, 0, 1, 1, 1, 2], least=3).tolist()
    [0, 0, 0, 1, 1, 1, 1]
    """
    numbers = np.asarray(classes, dtype=np.int64)
    names, counts = np.unique(numbers, return_counts=True)
    joined: dict[int, int] = {}
    group, size = 0, 0
    for name, count in zip(names.tolist(), counts.tolist(), strict=True):
        joined[name] = group
        size += count
        if size >= least:
            group, size = group + 1, 0
    if size and group:  # the rest joins the group before
        joined = {name: min(place, group - 1) for name, place in joined.items()}
    return np.array([joined[name] for name in numbers.tolist()], dtype=np.int64)


def held_out(classes: Sequence[int], seed: int, share: float = TEST_SHARE) -> tuple[Indices, Indices]:
    """Return the rows to learn from and the rows of the test part, which no fit uses."""
    from sklearn.model_selection import train_test_split

    if len(classes) < 4 * FOLDS:
        raise InvalidValue(f"training and testing need at least {4 * FOLDS} rows, got {len(classes)}")
    every = np.arange(len(classes))
    learn, test = train_test_split(every, test_size=share, random_state=seed, stratify=strata(classes, 2 * FOLDS + 1))
    return np.sort(learn), np.sort(test)


def folds(classes: Sequence[int], learn: Indices, seed: int, count: int = FOLDS) -> Iterator[tuple[Indices, Indices]]:
    """Yield the rows to fit on and to validate on, for each fold; every row validates once."""
    from sklearn.model_selection import StratifiedKFold

    divided = StratifiedKFold(n_splits=count, shuffle=True, random_state=seed)
    chosen = np.asarray(classes)[learn]
    for fit, validate in divided.split(learn, strata(chosen.tolist(), 2 * count)):
        yield learn[fit], learn[validate]
