"""Real models that were measured (`ullage measure`), as rows to learn from: features by name, grouped by family."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ullage.errors import InvalidValue, UllageError
from ullage.estimators.fast_inputs import vector_of
from ullage.estimators.walknet_rows import row_of
from ullage.gpus import gpu as find_gpu
from ullage.measure.ranking_run import Question
from ullage.measure.ranking_worker import Record
from ullage.measure.truth import Run, read_truth
from ullage.workload.configuration import Configuration


def group_of(model: str) -> str:
    """The family that a model's name tells: the letters before the first digit or underscore.

    >>> group_of("timm:vit_small_patch16_224"), group_of("tv:resnet50"), group_of("hf:BertForMaskedLM")
    ('vit', 'resnet', 'bert')
    """
    name = model.partition(":")[2]
    if model.startswith("hf:"):
        name = re.split(r"(?<=[a-z0-9])(?=For|LM|Model)", name)[0]
    return re.split(r"[\d_.]", name.casefold())[0] or name.casefold()


def read_real(
    file: Path, begin: Callable[[str, int], None] | None = None, notify: Callable[[str], None] | None = None
) -> list[dict[str, Any]]:
    """The runs of a measured file with their features; a model whose layers cannot be read is left out."""
    runs = [run for truth in read_truth(file) for run in truth.runs if not run.oom and run.reserved]
    if begin is not None:
        begin("reading real models", len(runs))
    rows = []
    for run in runs:
        row = _row(run)
        if row is not None:
            rows.append(row)
        if notify is not None:
            notify(run.id)
    if not rows:
        raise InvalidValue(f"{file} has no run of a model whose layers can be read")
    return rows


def _row(run: Run) -> dict[str, Any] | None:
    try:
        configuration = Configuration.from_row(run.row)
        if configuration.inference:
            return None
        row = row_of(configuration)
    except UllageError:
        return None
    group = "real " + group_of(configuration.model)
    return row | {
        "id": run.id,
        "group": group,
        "peak_reserved": run.reserved,
        "process_memory": run.process,
        "run": run,
    }


def write_records(
    path: Path, rows: Sequence[Mapping[str, Any]], unseen: npt.NDArray[np.float64], before: int, gpu: str
) -> None:
    """The answers of trees that had not seen a model's family, in the form of `ullage evaluate --resume`.

    `unseen` has the generated jobs first (`before` of them), then the rows in their order.
    """
    card = find_gpu(gpu)
    context, most = card.context or 0, card.context_upper or card.context or 0
    lines = []
    for row, (middle, high) in zip(rows, np.exp(unseen[before:]).tolist(), strict=True):
        closed = vector_of(row)[1]
        reserved, upper = int(closed * middle), int(closed * high) + most
        record = Record(
            estimator="fast", run=str(row["id"]), gpu=gpu, figure=reserved + context, kind="process",
            reserved=reserved, process=reserved + context, upper=upper, context=context, seconds=0.0, cpu_seconds=0.0,
            notes=("from trees that had not seen this family of models",),
        )  # fmt: skip
        key = Question("fast", row["run"], gpu).key
        lines.append(json.dumps({"key": key, **record.to_dict()}) + "\n")
    try:
        path.write_text("".join(lines))
    except OSError as error:
        raise InvalidValue(f"cannot write {path}: {error.strerror}") from None
