"""Public traces: Microsoft's Philly, Alibaba's PAI of 2020 and its GPU trace of 2023, and SenseTime's Helios.

They have the arrivals, run times and GPU counts of jobs, but not their training, which `Assignment` chooses.
"""

import csv
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ullage.errors import InvalidValue
from ullage.manager.simulation.assignment import Assignment, PublicJob, TraceFormat
from ullage.manager.simulation.formats.files import (
    first_row,
    has_columns,
    head,
    left_out,
    read_json,
    seconds_of,
    table,
)
from ullage.manager.simulation.trace import JobTrace


def _read_philly(path: Path, assignment: Assignment) -> JobTrace:
    content = read_json(path)
    if not isinstance(content, list):
        raise InvalidValue(f"{path} must be a list of jobs, got {type(content).__name__}")
    jobs = [_philly_job(f"{path}, job {number}", values) for number, values in enumerate(content, 1)]
    trained = [job for job in jobs if job.gpus > 0 and job.run_s > 0]
    note = "a job's work is the sum of its attempts' run times, on the most GPUs that one of them had"
    return assignment.trace(path.name, trained, [note, *left_out(len(jobs) - len(trained))])


def _philly_job(where: str, values: Any) -> PublicJob:
    """Read a job; attempts without a recorded begin or end do not count."""

    def known(attempt: Mapping[str, Any]) -> bool:
        return all(attempt.get(key) not in (None, "None", "") for key in ("start_time", "end_time"))

    try:
        attempts = [attempt for attempt in values["attempts"] if known(attempt)]
        run_s = sum(seconds_of(attempt["end_time"]) - seconds_of(attempt["start_time"]) for attempt in attempts)
        gpus = max((sum(len(server["gpus"]) for server in attempt["detail"]) for attempt in attempts), default=0)
        return PublicJob(seconds_of(values["submitted_time"]), run_s, gpus, str(values.get("user") or "user"))
    except KeyError as error:
        raise InvalidValue(f"{where}: the key {error.args[0]} is missing") from None
    except (TypeError, ValueError, AttributeError) as error:
        raise InvalidValue(f"{where}: the job must be as in Philly's cluster_job_log; {error}") from None


_HELIOS = ("user", "gpu_num", "submit_time", "duration")


def _read_helios(path: Path, assignment: Assignment) -> JobTrace:
    """Read jobs of every state that had GPUs and ran."""
    jobs, others = [], 0
    for row in table(path, _HELIOS):
        gpus, run_s = row.number("gpu_num", 0), row.number("duration", 0)
        if gpus > 0 and run_s > 0:
            jobs.append(PublicJob(row.moment("submit_time"), run_s, gpus, row.text("user", "user")))
        else:
            others += 1
    return assignment.trace(path.name, jobs, left_out(others))


_PODS = ("num_gpu", "gpu_milli", "creation_time", "deletion_time", "scheduled_time")


def _read_pods(path: Path, assignment: Assignment) -> JobTrace:
    """Read pods, which run from scheduling to deletion. A pod with a part of a GPU needs one GPU here, but counts by
    that part when workloads are assigned."""
    jobs, others = [], 0
    for row in table(path, _PODS):
        gpus = row.number("num_gpu", 0) * row.number("gpu_milli", 0) / 1000
        run_s = row.number("deletion_time", 0) - row.number("scheduled_time", 0) if row.has("scheduled_time") else 0
        if gpus > 0 and run_s > 0:
            jobs.append(PublicJob(row.number("creation_time"), run_s, gpus))
        else:
            others += 1
    note = "a pod that asks for a part of a GPU needs one GPU here; users are not in the trace"
    return assignment.trace(path.name, jobs, [note, *left_out(others)])


_TASKS, _JOBS = "pai_task_table", "pai_job_table"
_PAI = {  # columns from the .header files, since the tables have no header line
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


def _is_pai(text: str) -> bool:
    row = next(csv.reader(text.splitlines()[:1]), [])
    return row in _PAI.values() or len(row) in map(len, _PAI.values()) and row[3] in _STATES


def _read_pai(path: Path, assignment: Assignment) -> JobTrace:
    """Read jobs, which run from their first task's start to their last one's end on the GPUs of all instances."""
    tasks, jobs = _beside(path, _TASKS), _beside(path, _JOBS)
    if tasks is None:
        raise InvalidValue(f"{_TASKS}.csv must be next to {path}; it says how many GPUs jobs need")
    spans: dict[str, list[float]] = {}  # GPUs, begin, end
    names = set()
    for row in table(tasks, _PAI[_TASKS], _columns(tasks, _TASKS)):
        name = row.text("job_name")
        names.add(name)
        gpus = row.number("inst_num", 1) * row.number("plan_gpu", 0) / 100
        if gpus > 0 and row.has("start_time") and row.has("end_time"):
            begin, end = row.number("start_time"), row.number("end_time")
            span = spans.setdefault(name, [0.0, begin, end])
            span[:] = span[0] + gpus, min(span[1], begin), max(span[2], end)
    rows = [] if jobs is None else table(jobs, _PAI[_JOBS], _columns(jobs, _JOBS))
    submitted = {
        row.text("job_name"): (row.number("start_time"), row.text("user")) for row in rows if row.has("start_time")
    }
    usable = []
    for name, (gpus, begin, end) in spans.items():
        arrival, user = submitted.get(name, (begin, "user"))
        if end > begin:
            usable.append(PublicJob(min(arrival, begin), end - begin, gpus, user))
    notes = ["a job needs the GPUs of all its instances together, in whole GPUs", *left_out(len(names) - len(usable))]
    notes += [] if submitted else [f"without {_JOBS}.csv jobs come when their first task starts, and users are unknown"]
    return assignment.trace(tasks.name, usable, notes)


def _columns(path: Path, table_name: str) -> list[str] | None:
    return None if first_row(head(path)) == _PAI[table_name] else _PAI[table_name]


def _beside(path: Path, table_name: str) -> Path | None:
    """Return this file if it is that table, or the table in the same folder."""
    names = [path.name] if path.name.startswith(table_name) else []
    names += [f"{table_name}.csv{packed}" for packed in ("", ".gz", ".xz")]
    return next((path.with_name(name) for name in names if path.with_name(name).is_file()), None)


PHILLY = TraceFormat(
    "philly",
    "Microsoft Philly, cluster_job_log (JSON: jobid, submitted_time, attempts)",
    lambda text: text.lstrip()[:1] == "[" and '"submitted_time"' in text and '"attempts"' in text,
    _read_philly,
    ("cluster_job_log", "cluster_job_log.json"),
)
ALIBABA_2020 = TraceFormat(
    "alibaba2020",
    "Alibaba PAI 2020, pai_task_table.csv, with pai_job_table.csv next to it",
    _is_pai,
    _read_pai,
    ("pai_task_table.csv",),
)
ALIBABA_2023 = TraceFormat(
    "alibaba2023",
    "Alibaba 2023, openb_pod_list_*.csv (num_gpu, gpu_milli, creation_time, deletion_time)",
    has_columns(*_PODS),
    _read_pods,
    ("openb_pod_list_default.csv",),
)
HELIOS = TraceFormat(
    "helios",
    "SenseTime Helios, cluster_log.csv (job_id, gpu_num, submit_time, duration)",
    has_columns(*_HELIOS),
    _read_helios,
    ("cluster_log.csv",),
)
