"""The result of a simulation: each job with its attempts, each GPU over time, and summary figures."""

import functools
import gzip
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ullage.errors import InvalidValue
from ullage.manager.simulation.formats.files import check_target, opened, write_file
from ullage.manager.simulation.scenario import Scenario
from ullage.performance.result import known_fields
from ullage.units import format_duration, format_energy

FINISHED, OUT_OF_MEMORY, GPU_LOST, TIME_LIMIT = "finished", "out of GPU memory", "GPU lost", "time limit"
DONE, FAILED, WAITING = "done", "failed", "waiting"
MOST_SERIES = 64  # most GPUs with stored series
_BEGINNING = '{"runs": ['  # first bytes of a file of runs
_OF_GPUS = ("energy_j", "busy_s", "smact", "memory")


class SimulatedAttempt(NamedTuple):
    """An attempt on GPUs (by number) from `begin` to `end`, with its promise in bytes. `cause` is "finished", "out of
    GPU memory", "GPU lost" or "time limit"."""

    begin: float
    end: float
    gpus: tuple[int, ...]
    promise: int
    cause: str


class SimulatedJob(NamedTuple):
    """A job of the trace and its outcome; `state` is "done", "failed" or "waiting" (it could never be placed)."""

    id: int
    kind: str
    user: str
    arrival: float
    work_s: float
    gpus: int
    state: str
    attempts: tuple[SimulatedAttempt, ...]

    @property
    def running_s(self) -> float:
        """Return the time on GPUs in all attempts."""
        return sum(attempt.end - attempt.begin for attempt in self.attempts)

    @property
    def over_at(self) -> float:
        """Return the end of the last attempt, or the arrival without one."""
        return self.attempts[-1].end if self.attempts else self.arrival

    @property
    def completion_s(self) -> float:
        """Return the time from arrival to the end of the last attempt."""
        return self.over_at - self.arrival

    @property
    def waiting_s(self) -> float:
        """Return the part of the completion time without a GPU."""
        return self.completion_s - self.running_s


@dataclass(frozen=True)
class GpuSeries:
    """A GPU over time: its number of jobs, used bytes, SM activity (0 to 1) and watts from each of `times` (seconds) to
    the next. The last time is the end."""

    index: int
    name: str
    total: int
    times: Sequence[float]
    jobs: Sequence[int]
    memory: Sequence[int]
    smact: Sequence[float]
    power_w: Sequence[float]


@dataclass(frozen=True, kw_only=True)
class UserFigures:
    """A user's done jobs: their number, and mean waiting, completion time and slowdown (None without jobs)."""

    user: str
    jobs: int
    done: int
    waiting_s: float | None
    completion_s: float | None
    slowdown: float | None


@dataclass(frozen=True, kw_only=True)
class GpuFigures:
    """A GPU over the whole time: the share of time with jobs, means of memory (a share), SM activity and power, the
    most memory in use (bytes), the most jobs at once, and the energy."""

    index: int
    name: str
    busy: float
    memory: float
    smact: float
    power_w: float
    memory_peak: int
    jobs_peak: int
    energy_j: float


@dataclass(frozen=True, kw_only=True)
class Figures:
    """The figures of a simulation.

    - `total_s`: from the first arrival to the last end.
    - `waiting_s`, `running_s`, `completion_s`: means over the done jobs. A job waits while it has no GPU, also between
      two attempts; it runs while it has one, also in attempts that fail and while it starts. The sum is its completion
      time. `..._p95` is the 95th percentile over the jobs.
    - `slowdown`: the completion time divided by the work alone: 1 for a job that starts at once and runs at full speed.
    - `ooms`, `lost`: attempts that ran out of GPU memory, or whose GPU was lost. `failed`: jobs that got no other
      attempt. `unplaced`: jobs that were not over at the end, because no GPU could take them.
    - `energy_j` of all GPUs; `smact` and `memory`: means over GPUs and time, 0 to 1; `busy_s`: GPU-seconds with a job.
    - `fairness`: Jain's index over the users' mean slowdowns: 1 if all are equal, 1/n if one of n users has it all.

    Unknown figures are None.
    """

    jobs: int
    done: int
    failed: int
    unplaced: int
    ooms: int
    lost: int
    total_s: float
    waiting_s: float | None
    waiting_p95_s: float | None
    running_s: float | None
    completion_s: float | None
    completion_p95_s: float | None
    slowdown: float | None
    slowdown_median: float | None
    slowdown_p95: float | None
    energy_j: float | None
    busy_s: float | None
    smact: float | None
    memory: float | None
    fairness: float | None

    def to_dict(self) -> dict[str, Any]:
        """Return the attributes as a dictionary of plain values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Figures":
        """Read what `to_dict` gave; keys of later versions are ignored."""
        return cls(**known_fields(cls, values, "figures of a simulation"))


@dataclass(frozen=True)
class SimulationResult:
    """The outcome of one simulation. `gpus` has every GPU over time, or nothing for clusters larger than 64 GPUs;
    `energy_j`, `busy_s` (GPU-seconds with a job), `smact` and `memory` (means over GPUs and time, shares 0 to 1) are
    there for all."""

    scenario: Scenario
    trace: str
    jobs: Sequence[SimulatedJob]
    gpus: Sequence[GpuSeries]
    energy_j: float
    busy_s: float
    smact: float
    memory: float
    passes: int

    @property
    def name(self) -> str:
        return self.scenario.name

    @functools.cached_property
    def figures(self) -> Figures:
        """Return the figures of the whole run."""
        return self._summed(-math.inf, math.inf, {name: getattr(self, name) for name in _OF_GPUS})

    def figures_between(self, begin: float, end: float) -> Figures:
        """Return the figures of a part of the time: jobs present, ended attempts, and means over the jobs that
        finished. `total_s` is the time with jobs. Without series of GPUs, their means and energy are unknown."""
        if not self.gpus:
            return self._summed(begin, end, dict.fromkeys(_OF_GPUS))
        parts = [_cut(series, begin, end) for series in self.gpus]
        rows = [_of_gpu(part) for part in parts]
        whole = {
            "energy_j": sum(row.energy_j for row in rows),
            "busy_s": sum(row.busy * (part.times[-1] - part.times[0]) for row, part in zip(rows, parts, strict=True)),
            "smact": sum(row.smact for row in rows) / len(rows),
            "memory": sum(row.memory for row in rows) / len(rows),
        }
        return self._summed(begin, end, whole)

    def _summed(self, begin: float, end: float, of_gpus: Mapping[str, float | None]) -> Figures:
        there = [job for job in self.jobs if job.arrival <= end and (job.state == WAITING or job.over_at >= begin)]
        over = [job for job in there if job.state != WAITING and job.over_at <= end]
        done = [job for job in over if job.state == DONE]
        completion = np.array([job.completion_s for job in done])
        running = np.array([job.running_s for job in done])
        slowdown = np.array([job.completion_s / job.work_s for job in done if job.work_s > 0])
        causes = [attempt.cause for job in there for attempt in job.attempts if begin <= attempt.end <= end]
        first = min((max(job.arrival, begin) for job in there), default=0.0)
        last = max((min(job.over_at, end) for job in there if job.attempts), default=first)
        return Figures(
            jobs=len(there),
            done=len(done),
            failed=len(over) - len(done),
            unplaced=sum(job.state == WAITING for job in there),
            ooms=causes.count(OUT_OF_MEMORY),
            lost=causes.count(GPU_LOST),
            total_s=last - first,
            waiting_s=_mean(completion - running),
            waiting_p95_s=_quantile(completion - running, 0.95),
            running_s=_mean(running),
            completion_s=_mean(completion),
            completion_p95_s=_quantile(completion, 0.95),
            slowdown=_mean(slowdown),
            slowdown_median=_quantile(slowdown, 0.5),
            slowdown_p95=_quantile(slowdown, 0.95),
            **of_gpus,
            fairness=jain([row.slowdown for row in _of_users(done) if row.slowdown is not None]),
        )

    @functools.cached_property
    def users(self) -> list[UserFigures]:
        """Return a row for each user, sorted by name."""
        return _of_users(self.jobs)

    @property
    def per_gpu(self) -> list[GpuFigures]:
        """Return a row for each GPU with a series."""
        return [_of_gpu(series) for series in self.gpus]

    def __str__(self) -> str:
        f = self.figures
        means = {"waiting": f.waiting_s, "running": f.running_s, "completion": f.completion_s}
        times = ", ".join(f"{name} {format_duration(value)}" for name, value in means.items())
        return (
            f"{self.name}: {f.done} of {f.jobs} jobs done in {format_duration(f.total_s)}; on average {times}; "
            f"{f.ooms} out of memory; {format_energy(self.energy_j)}"
        )

    def summary(self) -> dict[str, Any]:
        """Return the scenario and the figures as a dictionary of plain values, without jobs and series."""
        rows = {"users": [asdict(row) for row in self.users], "per_gpu": [asdict(row) for row in self.per_gpu]}
        return {"scenario": self.scenario.to_dict(), "trace": self.trace, "figures": self.figures.to_dict(), **rows}

    def to_dict(self) -> dict[str, Any]:
        """Return everything as a dictionary of plain values, which `from_dict` reads."""
        jobs = [job._asdict() | {"attempts": [attempt._asdict() for attempt in job.attempts]} for job in self.jobs]
        gpus = [{name: _plain(value) for name, value in vars(series).items()} for series in self.gpus]
        means = {name: getattr(self, name) for name in (*_OF_GPUS, "passes")}
        return self.summary() | means | {"jobs": jobs, "gpus": gpus}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "SimulationResult":
        """Read what `to_dict` gave; keys of later versions are ignored."""
        known = known_fields(cls, values, "result of a simulation")
        jobs = [
            SimulatedJob(**known_fields(SimulatedJob, job, "job of a simulation") | {"attempts": _attempts(job)})
            for job in known["jobs"]
        ]
        gpus = [GpuSeries(**known_fields(GpuSeries, series, "GPU of a simulation")) for series in known["gpus"]]
        return cls(**known | {"scenario": Scenario.from_dict(known["scenario"]), "jobs": jobs, "gpus": gpus})


def jain(values: Sequence[float]) -> float | None:
    """Return Jain's fairness index: 1 if all values are equal, 1/n if one of n has everything.

    >>> jain([2.0, 2.0]), jain([1.0, 0.0])
    (1.0, 0.5)
    """
    squares = sum(value * value for value in values)
    return sum(values) ** 2 / (len(values) * squares) if squares else None


def check_results_file(file: Path) -> None:
    """Refuse a file that cannot be written, or that exists and holds no runs."""
    check_target(file, "file of runs", lambda text: text.startswith(_BEGINNING))


def write_results(file: Path, results: Sequence[SimulationResult]) -> None:
    """Write runs to a file, compressed if its name ends in .gz."""
    check_results_file(file)
    text = json.dumps({"runs": [result.to_dict() for result in results]})
    write_file(file, gzip.compress(text.encode()) if file.suffix == ".gz" else text.encode())


def read_results(file: Path) -> list[SimulationResult]:
    """Read the runs that `write_results` wrote."""
    with opened(file) as text:
        return results_of(text.read(), str(file))


def results_of(content: str | bytes, name: str = "this") -> list[SimulationResult]:
    """Read the runs in the content of a file of `write_results`."""
    try:
        return [SimulationResult.from_dict(run) for run in json.loads(content)["runs"]]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise InvalidValue(f"{name} must be a file of runs, as 'ullage simulate --save FILE' writes") from None


def _of_users(jobs: Sequence[SimulatedJob]) -> list[UserFigures]:
    by_user: dict[str, list[SimulatedJob]] = {}
    for job in jobs:
        by_user.setdefault(job.user, []).append(job)
    return [_of_user(user, by_user[user]) for user in sorted(by_user)]


def _of_user(user: str, jobs: Sequence[SimulatedJob]) -> UserFigures:
    done = [job for job in jobs if job.state == DONE]
    return UserFigures(
        user=user,
        jobs=len(jobs),
        done=len(done),
        waiting_s=_mean([job.waiting_s for job in done]),
        completion_s=_mean([job.completion_s for job in done]),
        slowdown=_mean([job.completion_s / job.work_s for job in done if job.work_s > 0]),
    )


def _cut(series: GpuSeries, begin: float, end: float) -> GpuSeries:
    times = np.asarray(series.times, dtype=float)
    first, last = (float(np.clip(moment, times[0], times[-1])) for moment in (begin, end))
    inside = np.flatnonzero((times > first) & (times < last))
    places = [int(np.searchsorted(times, first, side="right")) - 1, *inside.tolist()]
    places.append(places[-1])
    values: dict[str, Any] = {
        name: [getattr(series, name)[place] for place in places] for name in ("jobs", "memory", "smact", "power_w")
    }
    return replace(series, times=[first, *times[inside].tolist(), last], **values)


def _of_gpu(series: GpuSeries) -> GpuFigures:
    lasting = np.diff(np.asarray(series.times, dtype=float))
    length = float(lasting.sum()) or 1.0

    def over_time(values: Any) -> float:
        return float(np.asarray(values, dtype=float)[: len(lasting)] @ lasting)

    return GpuFigures(
        index=series.index,
        name=series.name,
        busy=over_time(np.asarray(series.jobs) > 0) / length,
        memory=over_time(series.memory) / length / (series.total or 1),
        smact=over_time(series.smact) / length,
        power_w=over_time(series.power_w) / length,
        memory_peak=int(max(series.memory, default=0)),
        jobs_peak=int(max(series.jobs, default=0)),
        energy_j=over_time(series.power_w),
    )


def _mean(values: Any) -> float | None:
    return float(np.mean(values)) if len(values) else None


def _quantile(values: Any, share: float) -> float | None:
    return float(np.quantile(values, share)) if len(values) else None


def _plain(value: Any) -> Any:
    """Return a value, or the plain values of a series."""
    return value if isinstance(value, str | int | float) else np.asarray(value).tolist()


def _attempts(job: Mapping[str, Any]) -> tuple[SimulatedAttempt, ...]:
    rows = [known_fields(SimulatedAttempt, row, "attempt of a simulation") for row in job["attempts"]]
    return tuple(SimulatedAttempt(**row | {"gpus": tuple(row["gpus"])}) for row in rows)
