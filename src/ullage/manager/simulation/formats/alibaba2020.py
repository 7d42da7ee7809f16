"""Alibaba's PAI trace of 2020 (github.com/alibaba/clusterdata, cluster-trace-gpu-v2020): tables without a first line of
names. pai_task_table.csv is needed; pai_job_table.csv beside it has the users and when jobs were submitted."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path

from ullage.errors import InvalidValue
from ullage.manager.simulation.assignment import Assignment, PublicJob
from ullage.manager.simulation.formats.files import TraceRow, first_row, head, left_out, table
from ullage.manager.simulation.trace import JobTrace

NAME, TITLE = "alibaba2020", "Alibaba PAI 2020, pai_task_table.csv, with pai_job_table.csv beside it"
FILES: tuple[str, ...] = ("pai_task_table.csv",)
_TASKS, _JOBS = "pai_task_table", "pai_job_table"
# As the .header files have them.
_COLUMNS = {
    _TASKS: [
        "job_name",
        "task_name",
        "inst_num",
        "status",
        "start_time",
        "end_time",
        "plan_cpu",
        "plan_mem",
        "plan_gpu",
        "gpu_type",
    ],
    _JOBS: ["job_name", "inst_id", "user", "status", "start_time", "end_time"],
}
_STATES = ("Terminated", "Failed", "Running", "Waiting")


def recognises(text: str) -> bool:
    row = next(csv.reader(text.splitlines()[:1]), [])
    widths = [len(columns) for columns in _COLUMNS.values()]
    return row in _COLUMNS.values() or len(row) in widths and row[3] in _STATES


def read(path: Path, assignment: Assignment) -> JobTrace:
    """A job comes when it was submitted, runs from its first task's start to its last one's end, and needs the GPUs of
    all instances of its tasks together."""
    tasks = _beside(path, _TASKS)
    if tasks is None:
        raise InvalidValue(f"needed {_TASKS}.csv beside {path}, which says how many GPUs jobs need")
    spans: dict[str, list[float]] = {}  # GPUs, begin, end
    names = set()
    for row in _rows(tasks, _TASKS):
        name = row.text("job_name")
        names.add(name)
        gpus = row.number("inst_num", 1) * row.number("plan_gpu", 0) / 100
        if gpus > 0 and row.has("start_time") and row.has("end_time"):
            begin, end = row.number("start_time"), row.number("end_time")
            span = spans.setdefault(name, [0.0, begin, end])
            span[:] = span[0] + gpus, min(span[1], begin), max(span[2], end)
    submitted = _submitted(path)
    kept = []
    for name, (gpus, begin, end) in spans.items():
        arrival, user = submitted.get(name, (begin, "user"))
        if end > begin:
            kept.append(PublicJob(min(arrival, begin), end - begin, gpus, user))
    notes = ["a job needs the GPUs of all its instances together, in whole GPUs", *left_out(len(names) - len(kept))]
    notes += [] if submitted else [f"without {_JOBS}.csv jobs come when their first task starts, and users are unknown"]
    return assignment.trace(tasks.name, kept, notes)


def _submitted(path: Path) -> dict[str, tuple[float, str]]:
    jobs = _beside(path, _JOBS)
    if jobs is None:
        return {}
    rows = _rows(jobs, _JOBS)
    return {row.text("job_name"): (row.number("start_time"), row.text("user")) for row in rows if row.has("start_time")}


def _rows(path: Path, table_name: str) -> Iterator[TraceRow]:
    named = first_row(head(path)) == _COLUMNS[table_name]
    yield from table(path, _COLUMNS[table_name], None if named else _COLUMNS[table_name])


def _beside(path: Path, table_name: str) -> Path | None:
    """This file if it is that table, or the table in the same folder."""
    names = [path.name] if path.name.startswith(table_name) else []
    names += [f"{table_name}.csv{packed}" for packed in ("", ".gz", ".xz")]
    return next((path.with_name(name) for name in names if path.with_name(name).is_file()), None)
