"""The rows of a data set as examples to learn from: what the networks read, and the measured memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ullage.errors import InvalidValue
from ullage.research.training.folds import Indices, key_of
from ullage.research.training.methods import WALKNET, Method

TARGET = "process_memory"


@dataclass
class Examples:
    """Examples of one family: `jobs` as a method's networks read them, `memory` in bytes, `rows` as they were read.

    >>> row = {"batch_size": 8, "parameters": 9, "layers": [], "process_memory": 1 << 30, "id": "a"}
    >>> examples_of([row]).memory.tolist()
    [1073741824.0]
    """

    rows: list[dict[str, Any]]
    jobs: Any
    memory: npt.NDArray[np.float64]
    keys: list[str]

    def __len__(self) -> int:
        return len(self.rows)

    def part(self, chosen: Indices) -> tuple[Any, npt.NDArray[np.float64]]:
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


def examples_of(rows: Sequence[Mapping[str, Any]], method: Method = WALKNET) -> Examples:
    """Examples from rows for a method; those without a measured figure (out of memory) are left out."""
    measured = [dict(row) for row in rows if row.get(TARGET)]
    if not measured:
        raise InvalidValue(f"no row has {TARGET}: there is nothing to learn from")
    memory = np.array([row[TARGET] for row in measured], dtype=np.float64)
    return Examples(measured, method.jobs(measured), memory, [key_of(row) for row in measured])


def read_rows(file: Path, family: str | None = None) -> list[dict[str, Any]]:
    """The rows of a Parquet file of `ullage dataset clean`, or of the authors' CSV, of one family or of all."""
    from ullage.research.datasets.measured_files import CleaningReport, read_authors
    from ullage.research.datasets.schema import frame, read_dataset

    table = frame(read_authors(file, CleaningReport())) if file.suffix == ".csv" else read_dataset(file)
    rows: list[dict[str, Any]] = table.to_dicts()
    chosen = [row for row in rows if family is None or row["family"] == family]
    if not chosen:
        there = ", ".join(sorted({str(row["family"]) for row in rows})) or "none"
        raise InvalidValue(f"{file} has no rows{f' of the family {family}' if family else ''}; families in it: {there}")
    return chosen
