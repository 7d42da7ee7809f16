"""Alibaba's GPU trace of 2023 (github.com/alibaba/clusterdata, cluster-trace-gpu-v2023): openb_pod_list_*.csv."""

from __future__ import annotations

from pathlib import Path

from ullage.manager.simulation.assignment import Assignment, PublicJob
from ullage.manager.simulation.formats.files import first_row, left_out, table
from ullage.manager.simulation.trace import JobTrace

NAME, TITLE = "alibaba2023", "Alibaba 2023, openb_pod_list_*.csv (num_gpu, gpu_milli, creation_time, deletion_time)"
FILES: tuple[str, ...] = ("openb_pod_list_default.csv",)
_NEEDED = ("num_gpu", "gpu_milli", "creation_time", "deletion_time", "scheduled_time")


def recognises(text: str) -> bool:
    return set(_NEEDED) <= set(first_row(text))


def read(path: Path, assignment: Assignment) -> JobTrace:
    """Pods run from being scheduled to being deleted; one that asks for a part of a GPU needs one GPU, and its work
    counts by that part where workloads are given."""
    kept, others = [], 0
    for row in table(path, _NEEDED):
        gpus = row.number("num_gpu", 0) * row.number("gpu_milli", 0) / 1000
        run_s = row.number("deletion_time", 0) - row.number("scheduled_time", 0) if row.has("scheduled_time") else 0
        if gpus > 0 and run_s > 0:
            kept.append(PublicJob(row.number("creation_time"), run_s, gpus))
        else:
            others += 1
    note = "a pod that asks for a part of a GPU needs one GPU here; users are not in the trace"
    return assignment.trace(path.name, kept, [note, *left_out(others)])
