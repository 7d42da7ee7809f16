"""SenseTime's Helios traces (github.com/S-Lab-System-Group/HeliosData): cluster_log.csv of a cluster."""

from __future__ import annotations

from pathlib import Path

from ullage.manager.simulation.assignment import Assignment, PublicJob
from ullage.manager.simulation.formats.files import first_row, left_out, table
from ullage.manager.simulation.trace import JobTrace

NAME, TITLE = "helios", "SenseTime Helios, cluster_log.csv (job_id, gpu_num, submit_time, duration)"
FILES: tuple[str, ...] = ("cluster_log.csv",)
_NEEDED = ("user", "gpu_num", "submit_time", "duration")


def recognises(text: str) -> bool:
    return set(_NEEDED) <= set(first_row(text))


def read(path: Path, assignment: Assignment) -> JobTrace:
    """Jobs of every state that had GPUs and ran."""
    kept, others = [], 0
    for row in table(path, _NEEDED):
        gpus, run_s = row.number("gpu_num", 0), row.number("duration", 0)
        if gpus > 0 and run_s > 0:
            kept.append(PublicJob(row.moment("submit_time"), run_s, gpus, row.text("user", "user")))
        else:
            others += 1
    return assignment.trace(path.name, kept, left_out(others))
