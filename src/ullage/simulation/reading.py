"""`read_trace`: a trace from a file of any form that is known here."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import ModuleType

from ullage.errors import InvalidValue, UnknownName
from ullage.simulation.assignment import Assignment
from ullage.simulation.formats import carma
from ullage.simulation.formats.files import head
from ullage.simulation.trace import JobTrace

FORMATS: dict[str, ModuleType] = {module.NAME: module for module in (carma,)}


def read_trace(path: str | Path, *, format: str | None = None, mix: str = "mixed", seed: int = 0) -> JobTrace:
    """Read a trace of jobs.

    Args:
        path: The file, which may be packed (.gz, .xz).
        format: The form of the file. By default it is recognised by how the file begins.
        mix: For traces that do not say what their jobs train: the mix of known workloads they are given.
        seed: The seed of that choice.

    Returns:
        The jobs in the order of their arrival; the first comes at 0 seconds.
    """
    path = Path(path)
    if format is not None and format not in FORMATS:
        raise UnknownName("form of traces", format, FORMATS)
    text = "" if format is not None else head(path)
    module = FORMATS[format] if format else next((it for it in FORMATS.values() if it.recognises(text)), None)
    if module is None:
        known = "; ".join(f"{name}: {it.TITLE}" for name, it in FORMATS.items())
        raise InvalidValue(f"{path} is in no known form of traces ({known}); name it with format=")
    trace: JobTrace = module.read(path, Assignment(mix, seed))
    if not trace.jobs:
        raise InvalidValue(f"{path} has no jobs")
    jobs = sorted(trace.jobs, key=lambda job: job.arrival)
    first = jobs[0].arrival
    return replace(trace, jobs=jobs if first == 0 else [replace(job, arrival=job.arrival - first) for job in jobs])
