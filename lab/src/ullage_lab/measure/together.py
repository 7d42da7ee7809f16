"""Measures training jobs that share this machine's GPU: each job's speed alone and in company, time-sliced or by MPS.

A job is a resident process: its model is built once, its kernels are loaded, and between two sets it waits with its
memory allocated. So a set takes little more than its reading time. As many jobs are resident as the GPU has memory for;
sets whose jobs do not fit next to them wait for the next round.

The jobs of a set start together. When all are warm, they are read over the same period, and then paused. Every job is
also read alone, in the same process and under the same way of sharing: once, or in turns with each of its sets
(`turns.py`). Rows are appended as they come; a session that was killed goes on with the sets that are not there yet.

Jobs note the end of each step in memory that they share with this process, which never touches CUDA.
"""

import gc
import hashlib
import json
import mmap
import os
import select
import sys
import tempfile
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ullage.errors import UnknownName
from ullage.hardware.local import pynvml
from ullage.hardware.mps import MISSING, MpsService, MpsUnavailable
from ullage.jobs.model import Model, rows_so_far
from ullage.manager.monitor.host import LoadSince
from ullage.units import GIB, format_bytes
from ullage_lab.clean.schema import quartiles
from ullage_lab.forking import ForkedHere, Pause
from ullage_lab.measure.activity import activity_between
from ullage_lab.measure.dataset import SPARE, appending, import_models, last_header, prepare_forking
from ullage_lab.measure.job_sets import RESIDENTS, JobSet, Round, room, rounds
from ullage_lab.measure.turns import joined, phases, slowdowns, step_alone_at

Row = dict[str, Any]
HOWS = {
    "time-slicing": "the driver lets one process after the other have the GPU",
    "mps": "NVIDIA's Multi-Process Service",
}
WARM_STEPS, WARM_SECONDS = 3, 0.2  # steps of every job before it is read
LEAST_READ = 4  # steps of every job, if they do not take longer than this
MOST_READING = 4.0
FIGURES = ("gract", "smact", "smocc", "drama", "tensor", "power_w", "energy_j", "clock_mhz", "unknown_because")


@dataclass(frozen=True, kw_only=True)
class TogetherSettings:
    """Settings of a measurement. `total` is the jobs' limit of GPU memory together; nearly all of it by default.

    With `rounds`, jobs are read alone and together in turns, so many times, each for so many `seconds`; without, every
    job is read alone once, before all sets.

    `prepare(row)` and `run(prepared, after_step)` are what a job does: the model made without CUDA, and endless
    training.
    """

    out: Path
    how: tuple[str, ...] = tuple(HOWS)
    seconds: float = 1.0
    rounds: int = 0
    timeout: float = 120.0
    total: int | None = None
    residents: int = RESIDENTS
    prepare: Callable[[Row], Any] | None = None
    run: Callable[[Any, Callable[[], None]], None] | None = None


# What jobs are made of: a place for the ends of their steps, shared with the parent.

_PHASE, _COUNT, _FIRST = 0, 1, 2
_KEPT = 1 << 15  # ends of steps, the latest


class StepBoard:
    """Memory shared by a job and its parent: whether the job must run, and the ends of its steps."""

    def __init__(self) -> None:
        self._numbers = memoryview(mmap.mmap(-1, 8 * (_FIRST + _KEPT))).cast("d")

    @property
    def runs(self) -> bool:
        return self._numbers[_PHASE] == 1.0

    @runs.setter
    def runs(self, shall: bool) -> None:
        self._numbers[_PHASE] = float(shall)

    @property
    def count(self) -> int:
        return int(self._numbers[_COUNT])

    def note(self, end: float) -> None:
        count = self.count
        self._numbers[_FIRST + count % _KEPT] = end
        self._numbers[_COUNT] = count + 1.0  # after the time: the parent may look at any moment

    def ends(self, since: float) -> list[float]:
        """Return the stored ends of steps from a time on."""
        count = self.count
        moments = [self._numbers[_FIRST + place % _KEPT] for place in range(max(0, count - _KEPT), count)]
        return moments[bisect_left(moments, since) :]


class Resident:
    def __init__(self, name: str, row: Row, settings: TogetherSettings, variables: Mapping[str, str]) -> None:
        self.name, self.board = name, StepBoard()
        self.rests = 0
        self.lost: str | None = None  # the reason why it ended
        prepare, run = settings.prepare or _prepare, settings.run or _run

        def work(pause: Pause) -> dict[str, Any]:
            os.environ.update(variables)
            rests = 0

            def after_step() -> None:
                nonlocal rests
                self.board.note(time.perf_counter())
                if not self.board.runs:
                    rests += 1
                    pause(f"rest {rests}", _memory_at_rest())

            run(prepare(row), after_step)
            return {}

        self.child = ForkedHere(work)

    def fileno(self) -> int:
        return self.child.fileno()

    @property
    def is_resting(self) -> bool:
        """Whether the job has paused after its last start."""
        return self.child.at == f"rest {self.rests + 1}"

    def let_go(self) -> None:
        self.rests += 1
        self.board.runs = True
        self.child.go_on()

    def listen(self) -> None:
        """Receive its message; a job that has ended is lost."""
        self.child.read()
        if self.child.is_silent or self.child.has_answered:
            self.lose()

    def lose(self, why: str | None = None) -> None:
        outcome = self.child.close()
        failure = outcome.failure if outcome.reason == "error" else f"the process {outcome.failure}"
        self.lost = why or str(failure).splitlines()[0]


def _prepare(row: Row) -> Any:
    from ullage_lab.measure.utilization import prepare_utilization

    return prepare_utilization(row)


def _run(prepared: Any, after_step: Callable[[], None]) -> None:
    from ullage.jobs.training import low_precision, train
    from ullage_lab.measure.memory import on_gpu
    from ullage_lab.measure.utilization import ENDLESS

    (model, task), prepared.made = prepared.made, None
    made = on_gpu(model, low_precision(prepared.configuration), drawn=True), task
    train(prepared.configuration, ENDLESS, after_iteration=after_step, prepared=made)


def _memory_at_rest() -> dict[str, Any]:
    """Wait for the GPU, and return the memory of this process on it."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return {}
    from ullage.measuring.single_run import process_memory

    torch.cuda.synchronize()
    return {"peak_reserved": torch.cuda.max_memory_reserved(), "process_memory": process_memory()}


class Lost(Exception):
    """Jobs that ended, or made no step in time."""


class Company:
    """The jobs that are resident at a time."""

    def __init__(self, rows: Mapping[str, Row], settings: TogetherSettings, variables: Mapping[str, str]) -> None:
        self.settings = settings
        gc.collect()
        gc.freeze()  # children would copy every page on which the collector moves a mark
        self._jobs = {name: Resident(name, row, settings, variables) for name, row in rows.items()}
        gc.unfreeze()
        self._rest(list(self._jobs.values()))

    @property
    def _present(self) -> list[Resident]:
        return [job for job in self._jobs.values() if job.lost is None]

    def close(self) -> None:
        for job in self._present:
            job.lose("no longer needed")

    def read(self, names: Sequence[str], uuid: str) -> dict[str, Any]:
        jobs = [self._jobs[name] for name in names]
        _all_there(jobs)
        before = {job.name: job.board.count for job in jobs}
        begin = time.perf_counter()
        for job in jobs:
            job.let_go()
        try:
            self._until(jobs, lambda: _warm(jobs, before, begin))
            with activity_between(uuid) as activity:
                begin, load = time.perf_counter(), LoadSince()
                self._until(jobs, lambda: _read_enough(jobs, begin, self.settings.seconds))
                taken = time.perf_counter() - begin
            busy, stolen = load.read()
            figures = [_speed(job.board.ends(begin)) for job in jobs]
        finally:
            self._rest(jobs)
        _all_there(jobs)
        counters = vars(activity)
        return {
            "read_s": round(taken, 4),
            "host_busy": round(busy, 2),
            "host_stolen": round(stolen, 4),
            "gpu_memory": _gpu_memory(uuid),
            **{name: [figure[name] for figure in figures] for name in figures[0]},
            **{name: counters[name] for name in FIGURES if counters[name] is not None},
        }

    def memory(self, name: str) -> dict[str, Any]:
        """Return the GPU memory of a job: the maximum of PyTorch's allocator, and that of the process."""
        return self._jobs[name].child.so_far or {}

    def _until(self, jobs: Sequence[Resident], condition: Callable[[], bool]) -> None:
        """Wait for a condition; raise `Lost` if one of these jobs ends, or if the wait takes too long."""
        deadline = time.monotonic() + self.settings.timeout
        while not condition():
            self._listen()
            _all_there(jobs)
            if time.monotonic() > deadline:
                raise Lost(f"{', '.join(job.name for job in jobs)}: no steps in {self.settings.timeout:g} s")

    def _rest(self, jobs: Sequence[Resident]) -> None:
        """Pause jobs. Kill those that do not pause in time."""
        for job in jobs:
            job.board.runs = False
        deadline = time.monotonic() + self.settings.timeout
        while late := [job for job in jobs if job.lost is None and not job.is_resting]:
            if time.monotonic() > deadline:
                for job in late:
                    job.lose(f"did not end a step in {self.settings.timeout:g} s")
            self._listen()

    def _listen(self) -> None:
        for job in select.select(self._present, [], [], 0.004)[0]:
            job.listen()


def _gpu_memory(uuid: str) -> int | None:
    """Return the used bytes of the GPU's memory, by all resident jobs."""
    nvml = pynvml()
    try:
        nvml.nvmlInit()
        try:
            return int(nvml.nvmlDeviceGetMemoryInfo(nvml.nvmlDeviceGetHandleByUUID(uuid)).used)
        finally:
            nvml.nvmlShutdown()
    except Exception:  # no NVML, or no GPU
        return None


def _all_there(jobs: Sequence[Resident]) -> None:
    lost = [f"{job.name}: {job.lost}" for job in jobs if job.lost]
    if lost:
        raise Lost("; ".join(lost))


def _warm(jobs: Sequence[Resident], before: Mapping[str, int], begin: float) -> bool:
    enough = all(job.board.count - before[job.name] >= WARM_STEPS for job in jobs)
    return enough and time.perf_counter() - begin >= WARM_SECONDS


def _read_enough(jobs: Sequence[Resident], begin: float, seconds: float) -> bool:
    taken = time.perf_counter() - begin
    if taken < seconds:
        return False
    return taken > MOST_READING or all(len(job.board.ends(begin)) > LEAST_READ for job in jobs)


def _speed(ends: Sequence[float]) -> dict[str, Any]:
    """Return the speed from the end of the first step of the period to the end of the last one."""
    between = [later - earlier for earlier, later in zip(ends, ends[1:], strict=False)]
    if not between:
        return {"steps": 0, "step_s": None, "step_q1": None, "step_median": None, "step_q3": None}
    low, middle, high = quartiles(between)
    mean = round((ends[-1] - ends[0]) / len(between), 6)
    return {"steps": len(between), "step_s": mean, "step_q1": low, "step_median": middle, "step_q3": high}


def measure_together(
    rows: Sequence[Row], sets: Sequence[JobSet], settings: TogetherSettings
) -> tuple[int, Iterator[Row]]:
    """Return the number of sets left, over all ways of sharing, and the rows as they come, also of jobs alone.

    left, found = measure_together(rows, draw_sets(rows, 100, seed=1), TogetherSettings(out=Path("together.jsonl")))
    for row in found:
        print(row["how"], row["jobs"], row.get("slowdown") or row["failed"])
    """
    jobs = {str(row["id"]): row for row in rows if "model" in row}
    for row in jobs.values():
        Model.from_row(row)
    for one in sets:
        for name in one.jobs:
            if name not in jobs:
                raise UnknownName(f"job in the set {one.id}", name, jobs)
    for how in settings.how:
        if how not in HOWS:
            raise UnknownName("way of sharing", how, HOWS)
    done = {(row.get("how"), row.get("set")) for row in rows_so_far(settings.out)}
    left = {how: [one for one in sets if (how, one.id) not in done] for how in settings.how}
    return sum(map(len, left.values())), _measured(jobs, left, settings)


def _measured(jobs: Mapping[str, Row], left: Mapping[str, list[JobSet]], settings: TogetherSettings) -> Iterator[Row]:
    if not any(left.values()):
        return
    service = _mps(settings.out) if left.get("mps") else None
    header = prepare_here(jobs, left)
    total = settings.total or max(GIB, header.pop("free") - SPARE)
    header.pop("free", None)
    with appending(settings.out) as file:
        if last_header(settings.out) != header:
            file.write(json.dumps({"header": header}) + "\n")
        for how, sets in left.items():
            used = service if how == "mps" else None
            for row in _in_one_way(how, used, jobs, sets, settings, str(header.get("uuid")), total):
                file.write(json.dumps(row) + "\n")
                file.flush()
                yield row


def prepare_here(jobs: Mapping[str, Row], left: Mapping[str, list[JobSet]]) -> dict[str, Any]:
    """Import the jobs' packages for every child, and read the facts about the GPU."""
    header = prepare_forking()
    from ullage_lab.measure import utilization  # noqa: F401

    import_models([jobs[name] for name in {name for sets in left.values() for one in sets for name in one.jobs}])
    return header


def _in_one_way(
    how: str,
    service: MpsService | None,
    jobs: Mapping[str, Row],
    sets: Sequence[JobSet],
    settings: TogetherSettings,
    uuid: str,
    total: int,
) -> Iterator[Row]:
    takes = {name: room(row) for name, row in jobs.items()}
    fitting: list[JobSet] = []
    too_large: list[JobSet] = []
    for one in sets:
        (fitting if sum(takes[name] for name in one.jobs) <= total else too_large).append(one)
    for one in too_large:
        wanted = format_bytes(sum(takes[name] for name in one.jobs))
        yield _row(how, one) | {"failed": f"needs about {wanted} of {format_bytes(total)}"}
    if not fitting:
        return
    with _served(service) as variables:
        for part in rounds(fitting, takes, total, settings.residents):
            yield from _one_round(how, part, jobs, settings, variables, uuid)


def _mps(out: Path) -> MpsService:
    """Return the service, with folders named after the output, so that a session after a killed one can end it."""
    name = hashlib.sha256(os.fsencode(out.resolve())).hexdigest()[:12]
    try:
        return MpsService(Path(tempfile.gettempdir()) / f"ullage-together-{os.getuid()}-{name}")
    except MpsUnavailable:
        raise MpsUnavailable(f"--sharing mps {MISSING}. Install it, or measure with --sharing time-slicing") from None


@contextmanager
def _served(service: MpsService | None) -> Iterator[dict[str, str]]:
    """Provide the jobs' environment while the service runs."""
    if service is None:
        yield {}
        return
    service.start()
    try:
        yield service.environment
    finally:
        service.stop()


def _one_round(
    how: str, part: Round, jobs: Mapping[str, Row], settings: TogetherSettings, variables: Mapping[str, str], uuid: str
) -> Iterator[Row]:
    copies = {f"{name}#{number}": jobs[name] for name, count in part.copies.items() for number in range(count)}
    company = Company(copies, settings, variables)

    def by_itself(name: str, reading: Row) -> Row:
        row: Row = {"how": how, "alone": name, "jobs": [name], "job": jobs[name], "copies": part.copies[name]}
        return row | reading | company.memory(f"{name}#0")

    try:
        if settings.rounds:
            for one in part.sets:
                alone, together = _in_turns(company, one, uuid, settings.rounds)
                yield from (by_itself(name, reading) for name, reading in alone.items())
                yield _row(how, one) | together
            return
        steps: dict[str, float | None] = {}
        for name in part.copies:
            row = by_itself(name, _read(company, [f"{name}#0"], uuid))
            steps[name] = row["step_s"][0] if "step_s" in row else None
            yield row
        for one in part.sets:
            yield _row(how, one) | _beside(_read(company, one.processes, uuid), [steps[name] for name in one.jobs])
    finally:
        company.close()


def _in_turns(company: Company, one: JobSet, uuid: str, rounds: int) -> tuple[dict[str, Row], Row]:
    """Read each job of a set alone and all of them together, in turns."""
    alone: dict[str, list[tuple[float, Row]]] = {name: [] for name in one.copies}
    together: list[tuple[float, Row]] = []
    for name in phases(list(alone), rounds):
        reading = _read(company, one.processes if name is None else [f"{name}#0"], uuid)
        if "failed" not in reading and None in reading["step_s"]:
            reading = {"failed": f"a job made fewer than two steps in {reading['read_s']:g} s"}
        if "failed" in reading:
            return {}, reading
        (together if name is None else alone[name]).append((time.perf_counter() - reading["read_s"] / 2, reading))
    steps = {name: [(moment, row["step_s"][0]) for moment, row in readings] for name, readings in alone.items()}
    turns = [
        {"step_s": row["step_s"], "alone_s": [round(step_alone_at(moment, steps[name]), 6) for name in one.jobs]}
        for moment, row in together
    ]
    own = {name: joined([row for _, row in readings]) | {"turns_of": one.id} for name, readings in alone.items()}
    beside = _beside(joined([row for _, row in together]), [own[name]["step_s"][0] for name in one.jobs])
    return own, beside | {"slowdown": [round(slow, 4) for slow in slowdowns(turns)], "turns": turns}


def _row(how: str, one: JobSet) -> Row:
    return {"how": how, "set": one.id, "jobs": list(one.jobs)}


def _read(company: Company, names: Sequence[str], uuid: str) -> Row:
    try:
        return company.read(names, uuid)
    except Lost as lost:
        return {"failed": str(lost)}


def _beside(reading: Row, alone: Sequence[float | None]) -> Row:
    """Return a reading with each job's time alone, and its slowdown."""
    if "failed" in reading:
        return reading
    slowdown = [
        None if own is None or step is None else round(step / own, 4)
        for step, own in zip(reading["step_s"], alone, strict=True)
    ]
    return {**reading, "alone_s": list(alone), "slowdown": slowdown}
