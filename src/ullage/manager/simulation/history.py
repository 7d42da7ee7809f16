"""A manager's history, to simulate it under another policy, with another estimator, or on other GPUs.

The history is `Client.trace()` or a file of `write_history`. `as_it_was` returns it as a simulation's result;
`as_it_is` also has unfinished jobs.
"""

import itertools
import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ullage.errors import InvalidValue
from ullage.hardware import gpu
from ullage.manager.placement import Rules
from ullage.manager.policy_files import own_name
from ullage.manager.simulation.assignment import TraceFormat
from ullage.manager.simulation.formats.files import check_target, head, jobs_are, opened, write_file
from ullage.manager.simulation.interference import Interference
from ullage.manager.simulation.result import (
    DONE,
    FAILED,
    MOST_SERIES,
    WAITING,
    GpuSeries,
    SimulatedAttempt,
    SimulatedJob,
    SimulationResult,
)
from ullage.manager.simulation.scenario import Scenario, World
from ullage.manager.simulation.trace import JobKind, JobTrace, TraceJob
from ullage.performance.result import Utilization, resting_w, waiting_w
from ullage.text import plain

_KEYS = ("since", "policy", "sharing", "gpus", "works", "jobs")
PROMISED = "promised"  # the estimator that returns the daemon's promises
RUNNING = "running"  # in place of a cause, while the attempt runs
# Attempts with these ends count as work; the work of others was lost and done again.
_WORK = frozenset({"finished", "failed by itself", "time limit", "time slot ended", "cancelled", RUNNING})
_OVER = frozenset({"done", "failed", "cancelled"})


def _begins_one(text: str) -> bool:
    return text.startswith('{"since":') and '"policy"' in text and '"sharing"' in text


def is_history(path: Path) -> bool:
    """Whether a file looks like a history."""
    return path.is_file() and _begins_one(head(path))


def read_history(path: Path) -> dict[str, Any]:
    """Read the result of `Client.trace()` from a file."""
    with opened(path) as file:
        try:
            data = json.load(file)
        except ValueError as error:
            raise InvalidValue(f"{path} is not JSON: {error}") from None
    missing = [key for key in _KEYS if not isinstance(data, dict) or key not in data]
    if missing:
        raise InvalidValue(f"{path} must be the history of a daemon, but has no {', '.join(missing)}")
    return dict(data)


def write_history(data: dict[str, Any], path: Path) -> None:
    """Write the result of `Client.trace()` to a file; refuse to overwrite anything else."""
    check_target(path, "history", _begins_one)
    write_file(path, json.dumps(data).encode())


def trace_of_history(data: Mapping[str, Any], name: str = "history", startup_s: float = 0.0) -> JobTrace:
    """Return the jobs of `Client.trace()` as a trace.

    A job arrives when it could have started: after its estimate or its release; its place in the queue is that of its
    submission. Its work is its run time times its predicted speed next to its neighbours. Attempts that ran out of
    memory or lost the machine did no work. Unfinished jobs, jobs without work and jobs without a GPU are left out.
    Memory is the measured one; the first promise is the estimate "promised". The first `startup_s` seconds of each
    attempt are start-up, not work.
    """
    history = _History(data, startup_s)
    jobs = [
        TraceJob(
            id=job["id"],
            arrival=history.arrival(job) - history.begin,
            kind=history.kinds[job["id"]],
            work_s=history.works[job["id"]],
            gpus=job["gpus"],
            user=job["user"],
            priority=job["priority"],
            time_limit=job["time_limit"],
            submitted=job["submitted"] - history.begin,
        )
        for job in history.jobs
    ]
    ordered = sorted(jobs, key=lambda job: (job.arrival, job.id))
    return JobTrace(name, ordered, history.notes, history.names[0] if len(set(history.names)) == 1 else None)


def scenario_of_history(data: Mapping[str, Any], policy: str | None = None) -> Scenario:
    """Return a scenario of the daemon: its GPUs, policy, rules, sharing and promises. `policy` replaces the daemon's,
    and is required for a custom one, since a history must not decide which code runs."""
    own = own_name(data["policy"])
    if policy is None and own is not None:
        name = plain(own)
        raise InvalidValue(f"the daemon's policy is {name}, from a custom file; name your copy: --policy {name}")
    return _scenario(data, data["policy"] if policy is None else policy)


def _scenario(data: Mapping[str, Any], policy: str) -> Scenario:
    if not data["gpus"]:
        raise InvalidValue("the daemon must have GPUs, got none")
    counts = Counter(gpu(each["name"]).name for each in data["gpus"])
    return Scenario(
        gpus=", ".join(f"{count}x{name}" for name, count in counts.items()),
        policy=policy,
        estimator=PROMISED,
        sharing=data["sharing"],
        min_speed=data["min_speed"],
        rules=Rules(**data["rules"]),
        world=World(
            reading_s=data["reading_s"], monitor_delay_s=data["reading_s"] / 2, startup_s=0.0, interference_error=0.0
        ),
    )


def as_it_was(data: Mapping[str, Any], startup_s: float = 0.0) -> SimulationResult:
    """Return the real outcome of the jobs of `trace_of_history` as a simulation's result. Times and energy are
    measured; activity is predicted, as is power if energy was not measured."""
    return _result(_History(data, startup_s))


class UnfinishedRun(NamedTuple):
    """The jobs until now, with times relative to `begin` (seconds since 1970), and the assumptions."""

    result: SimulationResult
    begin: float
    notes: list[str]


def as_it_is(data: Mapping[str, Any], now: float) -> UnfinishedRun:
    history = _History(data, 0.0, now)
    return UnfinishedRun(_result(history), history.begin, history.notes)


def _result(history: "_History") -> SimulationResult:
    data = history.data
    jobs = [
        SimulatedJob(
            job["id"],
            job["name"],
            job["user"],
            history.arrival(job) - history.begin,
            history.works.get(job["id"], 0.0),
            job["gpus"],
            DONE if job["state"] == "done" else FAILED if job["state"] in _OVER else WAITING,
            tuple(history.shown(each) for each in history.attempts.get(job["id"], ())),
        )
        for job in (*history.jobs, *history.waiting)
    ]
    series = history.series
    whole = (history.end - history.begin) * len(series) or 1.0
    return SimulationResult(
        scenario=_scenario(data, data["policy"]).but(label="as it was"),
        trace="history",
        jobs=jobs,
        gpus=series if len(series) <= MOST_SERIES else (),
        energy_j=sum(_sum(each, each.power_w) for each in series),
        busy_s=sum(_sum(each, [jobs > 0 for jobs in each.jobs]) for each in series),
        smact=sum(_sum(each, each.smact) for each in series) / whole,
        memory=sum(_sum(each, each.memory) / each.total for each in series) / whole,
        passes=0,
    )


class _Attempt(NamedTuple):
    """An attempt, with numbers of GPUs."""

    job: int
    begin: float
    end: float
    gpus: tuple[int, ...]
    promise: int | None
    used: int | None
    energy: float | None
    cause: str

    @property
    def did_work(self) -> bool:
        return self.cause in _WORK

    @property
    def watts(self) -> float | None:
        """Return its mean power on each of its GPUs; `None` if its energy was not measured."""
        return None if self.energy is None else self.energy / (self.end - self.begin) / len(self.gpus)


class _Company:
    """The jobs on a GPU, summed up; `unmeasured` are those of `working` without measured energy."""

    def __init__(self) -> None:
        self.count = self.memory = self.without_watts = 0
        self.watts = 0.0  # measured power, summed up
        self.working, self.unmeasured = Counter[int](), Counter[int]()

    def add(self, attempt: _Attempt, one: int) -> None:
        """Add (1) or remove (-1) an attempt."""
        self.count += one
        self.memory += one * (attempt.used or attempt.promise or 0)
        self.watts += one * (attempt.watts or 0.0)
        self.without_watts += one * (attempt.watts is None)

    def work(self, attempt: _Attempt, kind: int, one: int) -> None:
        """Add (1) or remove (-1) a working attempt."""
        self.working[kind] += one
        self.unmeasured[kind] += one * (attempt.watts is None)
        if not self.working[kind]:
            del self.working[kind], self.unmeasured[kind]


class _History:
    """A manager's history, with numbers for GPUs and kinds for jobs."""

    def __init__(self, data: Mapping[str, Any], startup_s: float, now: float | None = None) -> None:
        self.data, self._startup_s, self._now = data, startup_s, now
        self.numbers = {each["id"]: number for number, each in enumerate(data["gpus"])}
        self.names = [gpu(each["name"]).name for each in data["gpus"]]
        self.left_out: Counter[str] = Counter()
        counted = [job for job in data["jobs"] if self._counts(job)]
        self.jobs = [job for job in counted if job["attempts"]]
        self.waiting = [job for job in counted if not job["attempts"]]
        self.attempts = {job["id"]: [self._attempt(job["id"], each) for each in job["attempts"]] for job in self.jobs}
        self._all_attempts = [each for attempts in self.attempts.values() for each in attempts]
        self.begin = min((self.arrival(job) for job in counted), default=now or 0.0)
        self.end = max((each.end for each in self._all_attempts), default=self.begin) if now is None else now
        self.kinds = self._kinds()
        kinds = list({id(kind): kind for kind in self.kinds.values()}.values())
        self._model = Interference(kinds, data["sharing"])
        self._first_doing: dict[str, int] = {}
        self._first_alike: dict[tuple[int, str], int] = {}
        self._speeds = defaultdict[tuple[int, int], list[tuple[float, float]]](list)  # (since, speed) by GPU and kind
        self.works = dict.fromkeys(self.attempts, 0.0)
        lasting = [each for each in self._all_attempts if each.end > each.begin]
        self.series = [
            self._follow(number, [each for each in lasting if number in each.gpus]) for number in range(len(self.names))
        ]
        self._add_work_on_several([each for each in lasting if len(each.gpus) > 1 and each.did_work])

    def _counts(self, job: Mapping[str, Any]) -> bool:
        reason, over = None, job["state"] in _OVER
        if not over and self._now is None:
            reason = "not over"
        elif job["gpus"] == 0:
            reason = "without a GPU"
        elif over and not self._did_something(job):
            reason = "cancelled or given up before they did anything"
        elif any(slot not in self.numbers for each in job["attempts"] for slot in each["slots"]):
            reason = "on GPUs that are no longer there"
        if reason is not None:
            self.left_out[reason] += 1
        return reason is None

    def _did_something(self, job: Mapping[str, Any]) -> bool:
        """Whether a finished job did work or, in an unfinished history, ran at all."""
        if self._now is not None:
            return bool(job["attempts"])
        return any(each["cause"] in _WORK and each["started"] is not None for each in job["attempts"])

    def _attempt(self, job: int, data: Mapping[str, Any]) -> _Attempt:
        """Return an attempt, with its duration by the monotonic clock."""
        end = float(self._now or 0.0 if data["ended"] is None else data["ended"])
        begin = data["started"] or data["placed"] if data["elapsed"] is None else end - data["elapsed"]
        return _Attempt(
            job,
            min(float(begin), end),
            end,
            tuple(self.numbers[slot] for slot in data["slots"]),
            data["promise"],
            data["used"],
            data["energy"],
            RUNNING if data["ended"] is None else str(data["cause"]),
        )

    def arrival(self, job: Mapping[str, Any]) -> float:
        """Return when a job could have started."""
        came = float(job["queued"] or job["submitted"])
        attempts = self.attempts.get(job["id"])
        return min(came, attempts[0].begin) if attempts else came

    def shown(self, attempt: _Attempt) -> SimulatedAttempt:
        begin, end = attempt.begin - self.begin, attempt.end - self.begin
        return SimulatedAttempt(begin, end, attempt.gpus, attempt.promise or 0, attempt.cause)

    def _used(self, job: int) -> int | None:
        return max((each.used for each in self.attempts[job] if each.did_work and each.used), default=None)

    def _kinds(self) -> dict[int, JobKind]:
        """Return the kind of each job. Jobs with the same workload and promise share one, with the largest use."""
        same: dict[tuple[Any, ...], list[Mapping[str, Any]]] = defaultdict(list)
        for job in self.jobs:
            alike = (job["name"], self._used(job["id"])) if job["work"] is None else None
            first = job["attempts"][0]  # before recovery raised its promise
            promise = job["promise"] if first["exclusive"] else first["promise"]  # else a whole GPU
            same[job["work"], job["gpus"], promise, alike].append(job)
        kinds: dict[int, JobKind] = {}
        for (work, _, promise, _), jobs in same.items():
            measured = [used for job in jobs if (used := self._used(job["id"])) is not None]
            memory = max(measured, default=promise)
            if memory is None:  # exclusive jobs may have needed all of the GPU
                memory = min(self.data["gpus"][number]["total"] for number in self.attempts[jobs[0]["id"]][0].gpus)
            data = self.data["works"].get(work, {})
            alone = {gpu(name).name: Utilization.from_dict(each) for name, each in data.items()}
            kind = JobKind(jobs[0]["name"], int(memory), alone, {PROMISED: promise})
            kinds |= {job["id"]: kind for job in jobs}
        return kinds

    def _works_from(self, attempt: _Attempt) -> float:
        return min(attempt.begin + self._startup_s, attempt.end)

    def _follow(self, number: int, attempts: Sequence[_Attempt]) -> GpuSeries:
        """Return the series of a GPU. Work is added up by kinds of equal activity, since jobs may be thousands."""
        name, total = self.names[number], self.data["gpus"][number]["total"]
        here = [each for each in attempts if number in each.gpus]
        changes = sorted(
            [(each.begin, 1, each) for each in here]
            + [(self._works_from(each), 2, each) for each in here]
            + [(each.end, 3, each) for each in here],
            key=lambda change: change[:2],
        )
        there, before = _Company(), self.begin
        speeds: dict[int, float] = {}
        worked: Counter[int] = Counter()  # seconds of work alone that each kind has done here so far
        at_start: dict[tuple[int, float], float] = {}
        spread: Counter[int] = Counter()  # attempts that also use other GPUs, by kind
        rows = [(0.0, 0, 0, *self._activity(there, speeds, name))]
        for moment, at_once in itertools.groupby(changes, key=lambda change: change[0]):
            for kind, speed in speeds.items():
                worked[kind] += speed * (moment - before)
            before = moment
            for _, step, attempt in at_once:
                kind, alone, sign = self._alike(attempt, name), len(attempt.gpus) == 1, -1 if step == 3 else 1
                if step != 2:
                    there.add(attempt, sign)
                if step != 1:
                    there.work(attempt, kind, sign)
                    spread[kind] += sign * (not alone)
                if step == 2:
                    at_start[attempt.job, attempt.begin] = worked[kind]
                elif step == 3 and alone and attempt.did_work:
                    self.works[attempt.job] += worked[kind] - at_start[attempt.job, attempt.begin]
            speeds = self._model.together(name, there.working)
            for kind, count in spread.items():
                if count:
                    self._speeds[number, kind].append((moment, speeds[kind]))
            rows.append((moment - self.begin, there.count, there.memory, *self._activity(there, speeds, name)))
        rows.append((self.end - self.begin, 0, 0, *self._activity(_Company(), {}, name)))
        times, jobs, memory, smact, power = zip(*rows, strict=True)
        return GpuSeries(number, name, total, times, jobs, memory, smact, power)

    def _activity(self, there: _Company, speeds: Mapping[int, float], name: str) -> tuple[float, float]:
        """Return SMACT and watts of a GPU: measured, or an attempt's share of idle power plus its predicted draw."""
        if not there.count:
            return 0.0, resting_w(name)
        alone, base = {kind: self._model.alone(kind, name) for kind in speeds}, waiting_w(name)
        smact = sum(alone[kind].smact * speed * there.working[kind] for kind, speed in speeds.items())
        beyond = sum(
            max(0.0, alone[kind].power_w - base) * speed * there.unmeasured[kind] for kind, speed in speeds.items()
        )
        return min(1.0, smact), there.watts + base * there.without_watts / there.count + beyond

    def _alike(self, attempt: _Attempt, name: str) -> int:
        number = self._model.numbers[id(self.kinds[attempt.job])]
        if (number, name) not in self._first_alike:
            first = self._first_doing.setdefault(f"{name} {self._model.alone(number, name)!r}", number)
            self._first_alike[number, name] = first
        return self._first_alike[number, name]

    def _add_work_on_several(self, spread: Sequence[_Attempt]) -> None:
        """Add the work of attempts on several GPUs, at the speed of the slowest."""
        alike = defaultdict[tuple[tuple[int, int], ...], list[_Attempt]](list)
        for each in spread:
            if self._works_from(each) < each.end:
                alike[tuple((number, self._alike(each, self.names[number])) for number in sorted(each.gpus))].append(
                    each
                )
        for places, attempts in alike.items():
            begins, ends = [self._works_from(each) for each in attempts], [each.end for each in attempts]
            works = _work([self._speeds[place] for place in places], begins, ends)
            for each, work in zip(attempts, works, strict=True):
                self.works[each.job] += work

    @property
    def notes(self) -> list[str]:
        """Return the assumptions in sentences."""
        notes = [f"{jobs_are(count)} left out: {reason}" for reason, count in sorted(self.left_out.items())]
        unknown = sum(not kind.alone for kind in self.kinds.values())
        guessed = sum(self._used(job) is None for job in self.attempts)
        estimated = sum(each.energy is None and each.cause != RUNNING for each in self._all_attempts)
        assumed = {
            f"of {unknown} jobs the work is unknown: each is assumed to keep a GPU busy all the time": unknown,
            f"the memory of {guessed} jobs was not measured: they are assumed to use their promise": guessed,
            f"the energy of {estimated} attempts was not measured, and is predicted": estimated,
            "only your own jobs are shown; jobs of other users ran next to them": not self.data["all"],
        }
        return notes + [note for note, holds in assumed.items() if holds]


def _work(
    places: Sequence[Sequence[tuple[float, float]]], begins: Sequence[float], ends: Sequence[float]
) -> list[float]:
    """Return the seconds of work alone that jobs on the same GPUs do, each from its begin to its end. `places` has the
    (since, speed) pairs of their kind on each GPU; the slowest GPU decides.

    >>> _work([[(0.0, 0.5)], [(0.0, 1.0), (4.0, 0.25)]], [0.0, 2.0], [10.0, 4.0])
    [3.5, 1.0]
    """
    times = np.unique([moment for changes in places for moment, _ in changes])
    slowest = np.full(len(times), np.inf)
    for changes in places:
        moments, speeds = np.array(changes).T
        slowest = np.minimum(slowest, speeds[np.maximum(np.searchsorted(moments, times, "right") - 1, 0)])
    so_far = np.append(0.0, np.cumsum(slowest[:-1] * np.diff(times)))

    def until(moments: Sequence[float]) -> Any:
        last = np.maximum(np.searchsorted(times, moments, "right") - 1, 0)
        return so_far[last] + slowest[last] * (np.asarray(moments) - times[last])

    return [float(work) for work in until(ends) - until(begins)]


def _sum(series: GpuSeries, values: Iterable[float]) -> float:
    """Integrate values of a series over its time."""
    spans = (until - moment for moment, until in itertools.pairwise(series.times))
    return sum(span * value for span, value in zip(spans, values, strict=False))


HISTORY = TraceFormat(
    "history",
    "what a manager ran (--save-history, or GET /v1/trace)",
    _begins_one,
    lambda path, assignment: trace_of_history(read_history(path), path.name),  # jobs keep their recorded activity
)
