"""The evaluation traces of RAD-RM and CARMA: jobs by script name, with the estimates of three estimators."""

import re
from pathlib import Path

from ullage.manager.simulation.assignment import Assignment, TraceFormat, similar_alone
from ullage.manager.simulation.formats.files import TraceRow, has_columns, table
from ullage.manager.simulation.known import known_workloads
from ullage.manager.simulation.trace import JobKind, JobTrace, TraceJob
from ullage.units import MIB

_NEEDED = ("arrival_s", "model", "batch_size", "gpus", "mem_mib", "duration_min_mapper")
_ESTIMATES = {"horus": "horus_mib", "faketensor": "faketensor_mib", "gpumemnet": "gpumemnet_mib"}
_CAP_MIB = 40000
_UNNAMED = {"train": "maskrcnn"}  # scripts whose names do not name the model


def _read(path: Path, assignment: Assignment) -> JobTrace:
    """Read jobs that arrive at `arrival_s` and work `duration_min_mapper` minutes alone, with memory and estimates."""
    kinds: dict[tuple[str, int], JobKind] = {}
    jobs: list[TraceJob] = []
    notes: dict[str, None] = {}
    for row in table(path, _NEEDED):
        model, batch = row.text("model"), row.whole("batch_size")
        kind = kinds.get((model, batch))
        if kind is None:
            kind, note = _kind(model, batch, row)
            kinds[model, batch] = kind
            notes.update({note: None} if note else {})
        shorter = _epochs_run(row)
        if shorter != 1:
            notes["jobs whose command runs fewer epochs than their name says work only those"] = None
        if any(row.number(column, 0) == _CAP_MIB for column in _ESTIMATES.values()):
            notes["an estimate of exactly 40,000 MiB is the authors' cap: such a job is promised a whole A100-40GB"] = (
                None
            )
        jobs.append(
            TraceJob(
                id=row.whole("task", len(jobs)) + 1,
                arrival=row.number("arrival_s"),
                kind=kind,
                work_s=60 * row.number("duration_min_mapper") * shorter,
                gpus=row.whole("gpus"),
            )
        )
    return JobTrace(path.name, jobs, list(notes))


def _kind(model: str, batch: int, row: TraceRow) -> tuple[JobKind, str | None]:
    published = {(known.published, known.batch_size): known for known in known_workloads().values()}
    known = published.get((model, batch))
    memory = row.whole("mem_mib") * MIB
    estimates = {name: row.mebibytes(column) for name, column in _ESTIMATES.items()}
    if known is not None:
        return JobKind(known.name, memory, known.kind.alone, {**known.kind.estimates, **estimates}), None
    name = f"{_UNNAMED.get(model, model)} b{batch}"
    alone, like = similar_alone(memory)
    note = f"what {name} does on a GPU is not known: taken from {like}, whose memory is nearest"
    return JobKind(name, memory, alone, {**estimates, "ullage": None}), note


def _epochs_run(row: TraceRow) -> float:
    """Return the share of the epochs in a job's name (resnet18_cifar100_50e_3.rad) that its command runs."""
    named = re.search(r"_(\d+)e_", row.text("rad", ""))
    return row.number("epochs_in_cmd") / int(named[1]) if named and row.has("epochs_in_cmd") else 1.0


CARMA = TraceFormat(
    "carma",
    "evaluation traces of RAD-RM and CARMA (arrival_s, model, mem_mib, duration_min_mapper)",
    has_columns("arrival_s", "duration_min_mapper"),
    _read,
)
