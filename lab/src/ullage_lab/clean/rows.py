"""From measured files to the rows of a data set: joins, checks, features, and an account of dropped lines."""

import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from ullage.errors import UllageError
from ullage.jobs.model import Model
from ullage_lab.clean.families import family_of, is_for_testing
from ullage_lab.clean.measured_files import (
    DUPLICATE,
    FAILED,
    IMPOSSIBLE,
    SHARES,
    CleaningReport,
    MergedRun,
    context,
    process_memory,
    read_authors,
    read_measured,
    share,
    too_little,
)

# The features of many runs as columns of a data set, in several processes where there are many.

FEW = 150  # up to this many runs take less time than starting processes
AT_ONCE = 16  # runs that a process gets at a time
Watching = Callable[[Iterable[Any], int], Iterable[Any]]
_POSITIVE = {
    "step_seconds": "step_s",
    "step_q1": "step_q1",
    "step_median": "step_median",
    "step_q3": "step_q3",
    "steps": "steps",
    "host_seconds": "host_s",
    "power_w": "power_w",
    "energy_step": "energy_step_j",
    "clock_mhz": "clock_mhz",
    "ram_bytes": "ram_bytes",
    "host_forward": "host_forward_s",
    "host_backward": "host_backward_s",
}
_COUNTERS = ("pcie_rx", "pcie_tx", "cpu_percent", "host_busy", "host_stolen")


def feature_rows(configurations: Sequence[str], processes: int | None = None) -> Iterator[dict[str, Any] | str]:
    """Return the columns of each configuration (as JSON), in order; a text if the model does not run."""
    if len(configurations) < FEW:
        yield from map(feature_row, configurations)
        return
    import multiprocessing
    from concurrent.futures import ProcessPoolExecutor

    # Spawned: a process that has run PyTorch has threads, which a fork would not have.
    processes = processes or len(os.sched_getaffinity(0))
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn"), _begin) as pool:
        yield from pool.map(feature_row, configurations, chunksize=AT_ONCE)


def _begin() -> None:
    """Set up a process: one thread, and PyTorch's many objects out of the collector's way."""
    import gc

    import torch

    import ullage_lab.estimators.fast.features  # noqa: F401

    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)  # the collector would scan the thousands of objects of a model again and again


def feature_row(configuration: str) -> dict[str, Any] | str:
    """Return the columns of one configuration, or the reason why there are none."""
    from ullage_lab.estimators.fast.rows import row_of

    try:
        return row_of(Model.from_row(json.loads(configuration)))
    except UllageError as error:
        return str(error).splitlines()[0]


def clean(
    files: Sequence[Path], processes: int | None = None, watching: Watching = lambda items, total: items
) -> tuple[Iterator[dict[str, Any]], CleaningReport]:
    """Return the rows of a data set, and the report, which is complete after the last row.

    `watching` gets the iterator over runs and their number, for a progress bar. Files that end in .csv are the authors'
    tables, others measured JSONL.

    rows, report = clean([Path("cnn_measured.jsonl"), Path("cnn_busy.jsonl")])
    table = frame(rows)
    """
    report = CleaningReport()
    tables = [file for file in files if file.suffix == ".csv"]
    published = [row for file in tables for row in read_authors(file, report)]
    runs = read_measured([file for file in files if file.suffix != ".csv"], report)
    return _rows(published, runs, report, processes, watching), report


def _rows(
    published: list[dict[str, Any]],
    runs: list[MergedRun],
    report: CleaningReport,
    processes: int | None,
    watching: Watching,
) -> Iterator[dict[str, Any]]:
    seen: set[str] = set()
    for row in published:  # the user may give a table twice
        if row["id"] in seen:
            report.kept -= 1
            report.drop(row["id"], DUPLICATE, "in two tables", row["source"])
            continue
        seen.add(row["id"])
        yield row
    features = feature_rows([run.configuration for run in runs], processes)
    for run, columns in watching(zip(runs, features, strict=True), len(runs)):
        made = _row(run, columns, report)
        if made is not None:
            report.kept += 1
            report.joined += len(run.lines) - 1
            yield made


def _row(run: MergedRun, columns: dict[str, Any] | str, report: CleaningReport) -> dict[str, Any] | None:
    line, header = run.memory.row, run.memory.header
    if isinstance(columns, str):
        _drop(run, FAILED, columns, report)
        return None
    if too_little(line["peak_alloc"], columns["parameters"], columns["precision"], bool(line.get("inference"))):
        _drop(run, IMPOSSIBLE, "less memory than weights and gradients take", report)
        return None
    known = family_of(line)
    return {
        "id": run.id,
        "model_family": known.name,
        "kind": known.kind,
        "split": "test" if is_for_testing(known.name) else "train",
        "family": line.get("family") or Model.from_row(json.loads(run.configuration)).source,
        "arch": line.get("arch"),
        "configuration": run.configuration,
        **columns,
        "peak_allocated": line["peak_alloc"],
        "peak_reserved": line["peak_reserved"],
        "process_memory": process_memory(line),
        "context": None if "lent_context" in line else context(line),
        **_utilization(run, report),
        "gpu": header.get("gpu"),
        "machine": _text((run.utilization or run.memory).header.get("uuid")),
        **{name: _text(header.get(name)) for name in ("torch", "cuda", "cudnn", "driver")},
        "source": run.memory.source,
    }


def _drop(run: MergedRun, reason: str, detail: str, report: CleaningReport) -> None:
    for line in run.lines:
        report.drop(line.id, reason, detail, line.source)


def _utilization(run: MergedRun, report: CleaningReport) -> dict[str, Any]:
    """Return the readings of the run alone; impossible figures are unknown, and counted."""
    if run.utilization is None:
        return {}
    line = run.utilization.row
    readings: dict[str, Any] = {name: share(line.get(name)) for name in SHARES}
    for name, key in _POSITIVE.items():
        value = line.get(key)
        readings[name] = value if value is not None and value > 0 else None
    for name in _COUNTERS:
        value = line.get(name)
        readings[name] = value if value is not None and value >= 0 else None
    for name, value in readings.items():
        if value is None and line.get(_POSITIVE.get(name, name)) is not None:
            report.blanked[name] += 1
    return readings


def _text(value: Any) -> str | None:
    return None if value is None else str(value)
