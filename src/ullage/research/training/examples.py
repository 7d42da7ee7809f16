"""The rows of a data set as examples to learn from: what the networks read, and the measured memory."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ullage.errors import InvalidValue
from ullage.estimation.estimators.walknet.inputs import inputs_of
from ullage.estimation.estimators.walknet.networks import Batch, batched

# How rows are divided: a held-out test part, and folds for cross-validation, both with the same shares of classes.

Indices = npt.NDArray[np.int64]
TEST_SHARE, FOLDS = 0.3, 3


def key_of(row: Mapping[str, Any]) -> str:
    """A short name of a row's configuration: the same configuration has the same key in every file.

    >>> key_of({"configuration": "{}", "gpu": "H200"}) == key_of({"configuration": "{}", "gpu": "H200", "id": "x"})
    True
    """
    told = f"{row.get('configuration') or row.get('id')}|{row.get('gpu')}"
    return hashlib.blake2b(told.encode(), digest_size=6).hexdigest()


def strata(classes: Sequence[int], least: int) -> Indices:
    """The classes with rare ones joined to their neighbours, so that each part can have some of each.

    >>> strata([0, 0, 0, 1, 1, 1, 2], least=3).tolist()
    [0, 0, 0, 1, 1, 1, 1]
    """
    found = np.asarray(classes, dtype=np.int64)
    names, counts = np.unique(found, return_counts=True)
    joined: dict[int, int] = {}
    group, size = 0, 0
    for name, count in zip(names.tolist(), counts.tolist(), strict=True):
        joined[name] = group
        size += count
        if size >= least:
            group, size = group + 1, 0
    if size and group:  # what is left at the end joins the group before
        joined = {name: min(place, group - 1) for name, place in joined.items()}
    return np.array([joined[name] for name in found.tolist()], dtype=np.int64)


def held_out(classes: Sequence[int], seed: int, share: float = TEST_SHARE) -> tuple[Indices, Indices]:
    """The rows to learn from and the rows of the test part, which nothing is fitted on.

    >>> learn, test = held_out([0] * 70 + [1] * 30, seed=1)
    >>> len(test), sorted({*learn.tolist(), *test.tolist()}) == list(range(100))
    (30, True)
    """
    from sklearn.model_selection import train_test_split

    if len(classes) < 4 * FOLDS:
        raise InvalidValue(f"needed at least {4 * FOLDS} rows to train and test on; found {len(classes)}")
    every = np.arange(len(classes))
    learn, test = train_test_split(every, test_size=share, random_state=seed, stratify=strata(classes, 2 * FOLDS + 1))
    return np.sort(learn), np.sort(test)


def folds(classes: Sequence[int], learn: Indices, seed: int, count: int = FOLDS) -> Iterator[tuple[Indices, Indices]]:
    """The rows to fit on and the rows to validate on, once a fold; every row validates once.

    >>> parts = list(folds([0] * 60 + [1] * 30, np.arange(90), seed=1))
    >>> [len(fit) for fit, _ in parts], sum(len(validate) for _, validate in parts)
    ([60, 60, 60], 90)
    """
    from sklearn.model_selection import StratifiedKFold

    divided = StratifiedKFold(n_splits=count, shuffle=True, random_state=seed)
    chosen = np.asarray(classes)[learn]
    for fit, validate in divided.split(learn, strata(chosen.tolist(), 2 * count)):
        yield learn[fit], learn[validate]


TARGET = "process_memory"


@dataclass
class Examples:
    """Examples of one family: `jobs` for the networks, `memory` in bytes, `rows` as they were read.

    >>> row = {"batch_size": 8, "parameters": 9, "layers": [], "process_memory": 1 << 30, "id": "a"}
    >>> examples_of([row]).memory.tolist()
    [1073741824.0]
    """

    rows: list[dict[str, Any]]
    jobs: Batch
    memory: npt.NDArray[np.float64]
    keys: list[str]

    def __len__(self) -> int:
        return len(self.rows)

    def part(self, chosen: Indices) -> tuple[Batch, npt.NDArray[np.float64]]:
        """Some of the examples."""
        return self.jobs.rows(torch.from_numpy(chosen)), self.memory[chosen]

    @property
    def gpu(self) -> str:
        """The GPU that they were measured on; examples of several are refused."""
        names = sorted({str(row.get("gpu") or "unknown") for row in self.rows})
        if len(names) > 1:
            raise InvalidValue(f"needed rows of one GPU; found {', '.join(names)}")
        return names[0]

    @property
    def versions(self) -> dict[str, str]:
        """The versions of what they were measured with, all that occur."""
        names = ("torch", "cuda", "cudnn", "driver")
        found = {name: sorted({str(row[name]) for row in self.rows if row.get(name)}) for name in names}
        return {name: ", ".join(values) for name, values in found.items() if values}


def examples_of(rows: Sequence[Mapping[str, Any]]) -> Examples:
    """Examples from rows; those without a measured figure (out of memory) are left out."""
    measured = [dict(row) for row in rows if row.get(TARGET)]
    if not measured:
        raise InvalidValue(f"no row has {TARGET}: there is nothing to learn from")
    jobs = batched([inputs_of(row) for row in measured])
    memory = np.array([row[TARGET] for row in measured], dtype=np.float64)
    return Examples(measured, jobs, memory, [key_of(row) for row in measured])


def read_rows(file: Path, family: str | None = None) -> list[dict[str, Any]]:
    """The rows of a Parquet file of `ullage dataset clean`, or of the authors' CSV, of one family or of all."""
    from ullage.research.datasets.measured_files import Report, read_authors
    from ullage.research.datasets.schema import frame, read_dataset

    table = frame(read_authors(file, Report())) if file.suffix == ".csv" else read_dataset(file)
    rows: list[dict[str, Any]] = table.to_dicts()
    chosen = [row for row in rows if family is None or row["family"] == family]
    if not chosen:
        there = ", ".join(sorted({str(row["family"]) for row in rows})) or "none"
        raise InvalidValue(f"{file} has no rows{f' of the family {family}' if family else ''}; families in it: {there}")
    return chosen
