"""Measured runs as the ranking of estimators takes them: what was run, on which GPU, and what was seen there."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ullage.errors import InvalidValue
from ullage.measure.parquet import read_parquet
from ullage.measure.ranking_worker import Record
from ullage.workload.configuration import PREFIXES, read_rows

_COLUMNS = ("id", "configuration", "peak_allocated", "peak_reserved", "process_memory", "context")
FAMILIES = {"hf": "transformers", "mlp": "MLPs"}


@dataclass(frozen=True, kw_only=True)
class Run:
    """One measured run; sizes are bytes, `None` where they were not measured.

    `row` is the configuration (and whatever else its file says), `history` the file of its allocator's record. For a
    run that ran out of memory (`oom`) the figures are those of the attempt and are compared with nothing.

    >>> Run(id="one", row={"model": "mlp:x"}, family="MLPs", reserved=100, process=160).context
    60
    """

    id: str
    row: dict[str, Any]
    family: str
    allocated: int | None = None
    reserved: int | None = None
    process: int | None = None
    oom: bool = False
    history: Path | None = None

    @property
    def context(self) -> int | None:
        """What the process took outside PyTorch's allocator."""
        return None if self.process is None or self.reserved is None else self.process - self.reserved

    def truth(self, kind: str) -> int | None:
        """The measured figure of a kind ("allocated", "reserved", "process"); the process's where no other is."""
        value: int | None = getattr(self, kind)
        return self.process if value is None and self.reserved is None else value


@dataclass(frozen=True, kw_only=True)
class TruthSet:
    """The runs of one campaign on one GPU, and how many were left out for which reason.

    `published` are estimates that came with the table: what the authors of an estimator, or its critics, got from it.
    """

    name: str
    gpu: str
    runs: list[Run]
    published: list[Record] = field(default_factory=list)
    left_out: dict[str, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def read_truth(file: Path, gpu: str | None = None) -> list[TruthSet]:
    """The runs of a file: as `measured_rows` reads them, or one of the published A100 tables (CSV).

    A table with two campaigns gives two sets; their runs share ids, so that one estimate serves both.

    >>> read_truth(Path("h200_train_steps.jsonl"))[0].name      # doctest: +SKIP
    'h200_train_steps on H200'
    """
    if file.suffix == ".csv":
        from ullage.measure.truth_a100 import read_a100

        return read_a100(file, gpu or "A100-40GB")
    runs, without = [], 0
    for number, row in enumerate(measured_rows(file)):
        run = run_of(row, number, file.parent)
        if run.oom or run.process is not None or run.reserved is not None or run.allocated is not None:
            runs.append(run)
        else:
            without += 1
    if not runs:
        raise InvalidValue(f"{file} holds no measured runs")
    left_out = {"nothing was measured": without} if without else {}
    name = gpu or "H200"
    return [TruthSet(name=f"{file.stem} on {name}", gpu=name, runs=runs, left_out=left_out)]


def measured_rows(file: Path) -> list[dict[str, Any]]:
    """The runs of a file, as dictionaries: JSONL of `ullage measure` or `ullage dataset measure`, headers left out, or
    a data set of `ullage dataset clean` (Parquet).

    >>> len(measured_rows(Path("benchmarks/data/generated_h200.parquet")))      # doctest: +SKIP
    8207
    """
    if file.suffix != ".parquet":
        return [row for row in read_rows(file) if "header" not in row]
    return [_of_dataset(row) for row in read_parquet(file, _COLUMNS).to_dicts()]


def _of_dataset(row: dict[str, Any]) -> dict[str, Any]:
    """A run with the keys of measured files. Where runs shared a process, none of them has one to compare with."""
    process = None if row["context"] is None else row["process_memory"]
    figures = {"peak_alloc": row["peak_allocated"], "peak_reserved": row["peak_reserved"], "nvml_end": process}
    return {**json.loads(row["configuration"]), "id": row["id"], **figures}


def run_of(row: dict[str, Any], number: int, folder: Path) -> Run:
    """The run of a line of a measured file; histories lie beside the file, in `folder`."""
    reserved, end = row.get("peak_reserved"), row.get("nvml_end")
    process = None
    if reserved is not None and end is not None:
        process = end - row.get("end_reserved", reserved) + reserved
    events = row.get("events")
    history = folder / events if isinstance(events, str) else None
    return Run(
        id=str(row.get("id") or f"r{number:04d}"),
        row=row,
        family=family_of(str(row.get("model", ""))),
        allocated=row.get("peak_alloc"),
        reserved=reserved,
        process=process,
        oom="oom" in row,
        history=history if history is not None and history.is_file() else None,
    )


def family_of(model: str) -> str:
    """Where a model comes from, as a heading.

    >>> family_of("tv:resnet50"), family_of("hf:GPT2LMHeadModel"), family_of("mlp:x")
    ('torchvision', 'transformers', 'MLPs')
    """
    prefix = PREFIXES.get(model.partition(":")[0], "own")
    return FAMILIES.get(prefix, prefix)


def sample(runs: Sequence[Run], count: int | None) -> list[Run]:
    """So many of the runs, always the same ones: a smaller sample is part of every larger one.

    >>> runs = [Run(id=str(number), row={}, family="") for number in range(9)]
    >>> len(sample(runs, 4)), set(map(id, sample(runs, 2))) < set(map(id, sample(runs, 4)))
    (4, True)
    """
    if count is None or count >= len(runs):
        return list(runs)
    drawn = sorted(runs, key=lambda run: hashlib.sha256(run.id.encode()).digest())[:count]
    chosen = {run.id for run in drawn}
    return [run for run in runs if run.id in chosen]
