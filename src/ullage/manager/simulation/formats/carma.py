"""The evaluation traces of RAD-RM and CARMA: shell scripts that submit `.rad` files, with sleeps between.

A script is parsed, and never run: only the lines below are allowed, besides comments.
"""

import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from ullage.errors import InvalidValue
from ullage.manager.simulation.assignment import Assignment, TraceFormat
from ullage.manager.simulation.formats.files import left_out, opened
from ullage.manager.simulation.known import known_workloads
from ullage.manager.simulation.trace import JobKind, JobTrace, TraceJob
from ullage.units import MIB

_SUBMIT = re.compile(r"(?:python3? +)?(?:[\w.~+-]*/)*submit\.py +--task[ =]([\w./~+-]+\.rad)")
_SLEEP = re.compile(r"sleep +(\d{1,9}(?:\.\d+)?)")
_EPOCHS = re.compile(r"--n?epochs[ =](\d{1,6})(?=\s|$)")
_BATCH = re.compile(r"--batch[-_]size[ =](\d{1,9})(?=\s|$)")
_PROGRAM = re.compile(r"([\w-]+)\.py(?=\s|$)")
_LONGEST_SLEEP, _MOST_LINES = 7 * 86400, 200_000
_CAP = 40000 * MIB


def _is_script(text: str) -> bool:
    return any(_SUBMIT.fullmatch(line.strip()) for line in text.splitlines())


def _read(path: Path, assignment: Assignment) -> JobTrace:
    """Read jobs with the measured memory of their `.rad` files and the published time of their epochs."""
    by_file: dict[Path, tuple[JobKind, float, int] | None] = {}
    jobs: list[TraceJob] = []
    unknown: list[str] = []
    for arrival, file in _submissions(path):
        if file not in by_file:
            by_file[file] = _described(file)
        described = by_file[file]
        if described is None:
            unknown.append(file.name)
        else:
            jobs.append(TraceJob(len(jobs) + len(unknown) + 1, arrival, *described))
    notes = [f"{note} ({', '.join(dict.fromkeys(unknown))})" for note in left_out(len(unknown))]
    notes.append("jobs need the memory in their files, and work the published time of their epochs on an A100-40GB")
    if any(_CAP in job.kind.estimates.values() for job in jobs):
        notes.append("an estimate of exactly 40,000 MiB is the authors' cap: such a job is promised a whole A100-40GB")
    return JobTrace(path.name, jobs, notes)


def _submissions(path: Path) -> Iterator[tuple[float, Path]]:
    """Yield each submission of a script: its time, and the job file."""
    arrival = 0.0
    with opened(path) as lines:
        for number, text in enumerate(lines, 1):
            line, where = text.strip(), f"{path}, line {number}"
            if not line or line.startswith("#"):
                continue
            if sleep := _SLEEP.fullmatch(line):
                if float(sleep[1]) > _LONGEST_SLEEP:
                    raise InvalidValue(f"{where}: sleep must be at most {_LONGEST_SLEEP} s, a week, got {sleep[1]}")
                arrival += float(sleep[1])
                continue
            submit = _SUBMIT.fullmatch(line)
            if submit is None or number > _MOST_LINES:
                needed = f"'python submit.py --task JOB.rad' or 'sleep SECONDS', in {_MOST_LINES:,} lines at most"
                raise InvalidValue(f"{where}: a script must have {needed}, got {line[:80]!r}; it is never run")
            yield arrival, _job_file(path.parent, PurePosixPath(submit[1]), where)


def _job_file(folder: Path, task: PurePosixPath, where: str) -> Path:
    """Return the job file: in the script's folder, or in a folder there or here that its path ends with."""
    if ".." in task.parts:
        raise InvalidValue(f"{where}: the job file must be in the script's folder or below, got {str(task)[:80]!r}")
    tail = Path(*task.relative_to(task.anchor).parts[-2:])
    file = next((place for place in (folder / task.name, folder / tail, tail) if place.is_file()), None)
    if file is None:
        raise InvalidValue(f"{where}: there is no {task.name[:80]} in {folder} or {folder / tail.parent}")
    return file


def _described(file: Path) -> tuple[JobKind, float, int] | None:
    """Return the kind, the seconds of work and the GPUs of a job; `None` if it is no known workload."""
    from ullage.jobs.job_files import read_job  # it needs pydantic

    job = read_job(file)
    command = " ".join(job.spec.command)
    program, batch, epochs = (pattern.search(command) for pattern in (_PROGRAM, _BATCH, _EPOCHS))
    wanted = (program and program[1], int(batch[1]) if batch else job.spec.batch_size)
    known = next((one for one in known_workloads().values() if (one.published, one.batch_size) == wanted), None)
    if known is None:
        return None
    memory, estimates = job.spec.measured or known.kind.memory, {**known.kind.estimates, **job.spec.recorded}
    kind = JobKind(known.name, memory, known.kind.alone, estimates, file=file.absolute())
    return kind, known.epoch_s * (int(epochs[1]) if epochs else known.epochs[0]), job.spec.gpus


CARMA = TraceFormat("carma", "scripts of RAD-RM and CARMA that submit .rad files", _is_script, _read)
