"""The evaluation traces of RAD-RM and CARMA: tables of jobs with the estimates of three estimators, and the shell
scripts that submit their `.rad` files."""

import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from ullage.errors import InvalidValue
from ullage.manager.simulation.assignment import Assignment, TraceFormat, similar_alone
from ullage.manager.simulation.formats.files import TraceRow, has_columns, left_out, opened, table
from ullage.manager.simulation.known import KnownWorkload, known_workloads
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
    known = _published().get((model, batch))
    memory = row.whole("mem_mib") * MIB
    estimates = {name: row.mebibytes(column) for name, column in _ESTIMATES.items()}
    if known is not None:
        return JobKind(known.name, memory, known.kind.alone, {**known.kind.estimates, **estimates}), None
    name = f"{_UNNAMED.get(model, model)} b{batch}"
    alone, like = similar_alone(memory)
    note = f"what {name} does on a GPU is not known: taken from {like}, whose memory is nearest"
    return JobKind(name, memory, alone, {**estimates, "ullage": None}), note


def _published() -> dict[tuple[str, int], KnownWorkload]:
    return {(known.published, known.batch_size): known for known in known_workloads().values()}


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


# Scripts. They are parsed, and never run: only the lines below are allowed, besides comments.

_SUBMIT = re.compile(r"(?:python3? +)?(?:[\w.~+-]*/)*submit\.py +--task[ =]([\w./~+-]+\.rad)")
_SLEEP = re.compile(r"sleep +(\d{1,9}(?:\.\d+)?)")
_EPOCHS = re.compile(r"--n?epochs[ =](\d{1,6})(?=\s|$)")
_BATCH = re.compile(r"--batch[-_]size[ =](\d{1,9})(?=\s|$)")
_SCRIPT_OF = re.compile(r"([\w-]+)\.py(?=\s|$)")
_LONGEST_SLEEP, _MOST_LINES = 7 * 86400, 200_000


def _is_script(text: str) -> bool:
    return any(_SUBMIT.fullmatch(line.strip()) for line in text.splitlines())


def _read_script(path: Path, assignment: Assignment) -> JobTrace:
    """Read jobs that arrive after the sleeps before them, need the measured memory of their `.rad` file, and work the
    measured epochs of the same known workload."""
    kinds: dict[Path, tuple[JobKind, float, int] | None] = {}
    jobs: list[TraceJob] = []
    unknown: list[str] = []
    for arrival, file in _submissions(path):
        if file not in kinds:
            kinds[file] = _of_rad_file(file)
        described = kinds[file]
        if described is None:
            unknown.append(file.name)
        else:
            kind, work_s, gpus = described
            jobs.append(TraceJob(len(jobs) + 1, arrival, kind, work_s, gpus))
    notes = [f"{note} ({', '.join(dict.fromkeys(unknown))})" for note in left_out(len(unknown))]
    notes.append("jobs work the published time of their epochs alone on an A100-40GB, with the memory in their files")
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
            elif submit := _SUBMIT.fullmatch(line):
                yield arrival, _job_file(path, PurePosixPath(submit[1]), where)
            else:
                needed = "line must be 'python submit.py --task JOB.rad' or 'sleep SECONDS'"
                raise InvalidValue(f"{where}: {needed}, got {line[:80]!r}; the script is only read, never run")
            if number >= _MOST_LINES:
                raise InvalidValue(f"{path} must have at most {_MOST_LINES:,} lines, got more")


def _job_file(script: Path, task: PurePosixPath, where: str) -> Path:
    """Return the job file: beside the script, or in the last folder of its path, there or in the current folder."""
    if ".." in task.parts:
        raise InvalidValue(f"{where}: the job file must be in the script's folder or below, got {str(task)[:80]!r}")
    tail = Path(*task.relative_to(task.anchor).parts[-2:])
    places = (script.parent / task.name, script.parent / tail, tail)
    file = next((place for place in places if place.is_file()), None)
    if file is None:
        raise InvalidValue(f"{where}: there is no {task.name[:80]} in {script.parent} or {script.parent / tail.parent}")
    return file


def _of_rad_file(file: Path) -> tuple[JobKind, float, int] | None:
    """Return the kind of a job, its work in seconds and its GPUs; `None` if its work is unknown."""
    from ullage.jobs.job_files import read_job

    job = read_job(file)
    command = " ".join(job.spec.command)
    script, batch, epochs = (pattern.search(command) for pattern in (_SCRIPT_OF, _BATCH, _EPOCHS))
    batch_size = int(batch[1]) if batch else job.spec.batch_size
    known = _published().get((script[1] if script else "", batch_size or 0))
    if known is None:
        return None
    memory = job.spec.measured or known.kind.memory
    kind = JobKind(
        known.name, memory, known.kind.alone, {**known.kind.estimates, **job.estimates}, file=file.absolute()
    )
    return kind, known.epoch_s * (int(epochs[1]) if epochs else known.epochs[0]), job.spec.gpus


CARMA_SCRIPT = TraceFormat(
    "carma-script",
    "scripts that submit .rad files of RAD-RM and CARMA, with sleep between",
    _is_script,
    _read_script,
)
