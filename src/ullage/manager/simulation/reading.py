"""`read_trace` reads a trace in any known format; `write_trace` writes one in Ullage's own."""

from dataclasses import replace
from pathlib import Path

from ullage.errors import InvalidValue, UnknownName
from ullage.manager.simulation.assignment import Assignment, Mix, TraceFormat
from ullage.manager.simulation.formats.carma import CARMA
from ullage.manager.simulation.formats.files import head
from ullage.manager.simulation.formats.own import OWN, write_trace
from ullage.manager.simulation.formats.public import ALIBABA_2020, ALIBABA_2023, HELIOS, PHILLY
from ullage.manager.simulation.history import HISTORY
from ullage.manager.simulation.trace import JobTrace

__all__ = ["FORMATS", "read_trace", "write_trace"]

FORMATS = {each.name: each for each in (OWN, CARMA, PHILLY, ALIBABA_2020, ALIBABA_2023, HELIOS, HISTORY)}


def read_trace(
    path: str | Path, *, format: str | None = None, limit: int | None = None, mix: Mix = "mixed", seed: int = 0
) -> JobTrace:
    """Read a trace of jobs.

    Args:
        path: The file, which may be compressed (.gz, .xz), or the folder of a public trace.
        format: The format of the file. Default: recognised from its beginning.
        limit: The number of jobs to read, in order of arrival.
        mix: The mix of known workloads, for traces that do not name their training jobs.
        seed: The seed for choosing workloads.

    Returns:
        The jobs in order of arrival. `notes` lists the assumptions.
    """
    path = Path(path)
    if format is not None and format not in FORMATS:
        raise UnknownName("form of traces", format, FORMATS)
    if limit is not None and limit < 1:
        raise InvalidValue(f"limit must be 1 or more, got {limit}")
    file = _file_in(path, format) if path.is_dir() else path
    form = FORMATS[format] if format else _recognised(file)
    trace = form.read(file, Assignment(mix, seed, limit))
    if not trace.jobs:
        raise InvalidValue(f"{file} has no jobs on GPUs whose run time is known")
    return replace(trace, jobs=sorted(trace.jobs, key=lambda job: job.arrival)[:limit])


def _file_in(folder: Path, format: str | None) -> Path:
    names = [name for form in FORMATS.values() if format in (None, form.name) for name in form.files]
    for name in names:
        for packed in ("", ".gz", ".xz"):
            if (folder / (name + packed)).is_file():
                return folder / (name + packed)
    needed = f"there must be one of {', '.join(names)}" if names else "name a file"
    raise InvalidValue(f"{folder} is a folder: {needed} in it")


def _recognised(path: Path) -> TraceFormat:
    text = head(path)
    if not text.strip():
        raise InvalidValue(f"{path} must be a trace of jobs (CSV or JSON), but it is empty")
    for form in FORMATS.values():
        if form.recognises(text):
            return form
    known = "; ".join(f"{name}: {form.title}" for name, form in FORMATS.items())
    named = "name it with --trace-format (in Python, format=)"
    raise InvalidValue(f"{path} is in no known form of traces; {named}, or see what is needed: {known}")
