"""What jobs do on GPUs, and how fast they are side by side: predicted when they come, corrected while they run.

A *work* is what jobs do that one user runs from one place and of which the same was predicted. So what is measured of a
job counts for the others of its array, and for the same job when it is submitted again. What is predicted stays as it
was; beside it stands what was measured, and takes its place step by step.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

from ullage.errors import InvalidValue, UllageError
from ullage.hardware import gpu as find_gpu
from ullage.manager.monitor import Monitor
from ullage.manager.placement import Slot, Speeds
from ullage.manager.storage.job_store import JobStore
from ullage.manager.storage.records import RUNNING, AttemptRecord, WorkRecord
from ullage.performance.result import Utilization
from ullage.performance.sharing import share_of
from ullage.units import GIB

_SHARES = ("gract", "smact", "smocc", "drama", "tensor")  # of the time, 0 to 1
_ADD_UP = ("smact", "smocc", "drama", "tensor")  # of jobs that share a GPU, as long as there is some of it left
_FIGURES = (*_SHARES, "power_w")
_HOW = {"mps": "mps", "time-slicing": "timeslice"}
_IDLE, _FULL = 0.005, 0.95  # SM activity below which nothing ran, and over which nothing can be told apart
_SLOWEST = 8  # a window of readings counts for one part in so many, once there were as many
_FURTHEST = 4.0  # times the prediction, or one part in so many: nothing that is measured goes beyond
_SLACK = 0.05  # of a share that was predicted as next to nothing
_UNNOTICED = GIB  # of memory, by nobody knows whom
_LONGEST_STEP, _LARGEST, _MOST_WATTS = 86400.0, 1e24, 1e5
_MOST_GROUPS = 200  # of kernels by their length
_MOST_KNOWN = 100_000  # predictions in memory
_MOST_EXPECTED = 1000  # works of submissions that are only tried
_NOTHING = 0.005  # of a share: too little to predict anew


def read_utilization(told: Any, gpus: Iterable[str]) -> dict[str, dict[str, Any]]:
    """What an estimate says of a step, by GPU, ready for JSON; what makes no sense is left out.

    It comes from a process of the user, who may have it say anything.

    >>> read_utilization({"T4": {"step_s": float("nan")}, "T9": {}}, ["T4"])
    {}
    """
    found = {}
    for name in gpus:
        values = told.get(name) if isinstance(told, dict) else None
        if isinstance(values, dict):
            try:
                made = replace(Utilization.from_dict(values), gpu=name, notes=[])
            except (InvalidValue, TypeError, ValueError):
                continue
            if _is_sensible(made):
                found[name] = made.to_dict()
    return found


def _is_sensible(made: Utilization) -> bool:
    shares = dict.fromkeys(("smact", "smocc", "drama", "tensor"), 1.0)
    most = shares | {"power_w": _MOST_WATTS} | dict.fromkeys(("step_s", "gpu_s", "host_s"), _LONGEST_STEP)
    for spec in fields(made):
        value, kind = getattr(made, spec.name), str(spec.type)
        if kind == "bool" and type(value) is not bool:
            return False
        if not kind.startswith(("int", "float")) or value is None and spec.default is None:
            continue
        if type(value) not in (int, float) or not 0 <= value <= most.get(spec.name, _LARGEST):
            return False
    if len(made.kernel_groups) > _MOST_GROUPS:
        return False
    figures = [figure for group in made.kernel_groups for figure in group]
    return made.step_s > 0 and all(type(figure) in (int, float) and 0 <= figure <= _LARGEST for figure in figures)


def work_id(uid: int, run: Sequence[str | None], predicted: Mapping[str, Any]) -> str:
    """By what a work is known: who runs what from where, and what was predicted. Arguments and variables that change
    nothing of a step do not matter: the elements of a sweep over seeds are one work."""
    return hashlib.sha256(json.dumps([uid, run, predicted], sort_keys=True).encode()).hexdigest()[:32]


def corrected(predicted: Utilization, measured: Mapping[str, float]) -> Utilization:
    """A prediction with what was measured in its place.

    How long a step takes is not measured. If the GPU works for less of the time than was predicted, a step has the same
    work and waits longer for the host, or for data; if for more of it, the work takes longer.

    >>> values = {"smocc": 0.2, "drama": 0.1, "tensor": 0.0, "power_w": 300.0, "energy_j": 60.0, "flops": 1.0}
    >>> rest = {"bytes": 1.0, "kernels": 9, "steady": True, "measured": True, "gpu": "H200"}
    >>> job = Utilization(step_s=0.2, gpu_s=0.2, host_s=0.05, smact=0.8, **values, **rest)
    >>> found = corrected(job, {"gract": 0.5, "smact": 0.4})
    >>> found.step_s, found.gpu_s, found.smact, found.waits_for_host
    (0.4, 0.2, 0.4, True)
    """
    figures: dict[str, Any] = {name: value for name, value in measured.items() if name in _ADD_UP or name == "power_w"}
    step_s, gpu_s, host_s = predicted.step_s, predicted.gpu_s, predicted.host_s
    busy = measured.get("gract", predicted.busy)
    if 0 < busy < predicted.busy:
        step_s = gpu_s / busy
        host_s = max(host_s, step_s)
    elif busy > predicted.busy:
        gpu_s = min(1.0, busy) * step_s
    found = replace(predicted, step_s=step_s, gpu_s=gpu_s, host_s=host_s, **figures)
    return replace(found, energy_j=found.power_w * step_s)


def learned(
    predicted: Utilization, before: Mapping[str, float], seen: Mapping[str, float], jobs: int = 1
) -> dict[str, float]:
    """What is known after another window of readings, of so many jobs together: a mean in which what was predicted and
    what was measured long ago count less and less.

    >>> values = {"smocc": 0.2, "drama": 0.1, "tensor": 0.0, "power_w": 300.0, "energy_j": 60.0, "flops": 1.0}
    >>> rest = {"bytes": 1.0, "kernels": 9, "steady": True, "measured": True, "gpu": "H200"}
    >>> job = Utilization(step_s=0.2, gpu_s=0.2, host_s=0.05, smact=0.8, **values, **rest)
    >>> once = learned(job, {}, {"smact": 0.4})
    >>> {name: round(value, 3) for name, value in once.items()}
    {'smact': 0.6, 'windows': 1}
    >>> round(learned(job, once, {"smact": 0.0})["smact"], 3)
    0.4
    """
    weight = 1 / min(before.get("windows", 0) + 2, _SLOWEST) / jobs
    after = dict(before)
    for name, value in seen.items():
        foretold = predicted.busy if name == "gract" else float(getattr(predicted, name))
        at = before.get(name, foretold)
        most = foretold * _FURTHEST if name == "power_w" else min(1.0, foretold * _FURTHEST + _SLACK)
        after[name] = min(max(at + weight * (value - at), foretold / _FURTHEST), most)
    return after | {"windows": before.get("windows", 0) + 1}


def _predicted(record: WorkRecord, gpu: str) -> Utilization | None:
    """What was predicted; None where an Ullage of another version, or nobody, has."""
    try:
        return Utilization.from_dict(record.predicted[gpu])
    except (KeyError, TypeError, InvalidValue):
        return None


def _now(record: WorkRecord, gpu: str) -> Utilization | None:
    """What is known of a work now."""
    predicted = _predicted(record, gpu)
    return None if predicted is None else corrected(predicted, record.measured.get(gpu, {}))


def _nearly(one: Utilization, other: Utilization | None) -> bool:
    """Whether two utilizations are the same for what jobs do to each other."""
    names = ("busy", *_ADD_UP)
    return other is not None and all(abs(getattr(one, name) - getattr(other, name)) < _NOTHING for name in names)


class Works:
    """The works of a daemon's jobs. `sharing` is how jobs share its GPUs: "mps" or "time-slicing"."""

    def __init__(self, store: JobStore, sharing: str) -> None:
        self._store, self._how = store, _HOW[sharing]
        self._alone: dict[tuple[str, str], tuple[int, Utilization | None]] = {}  # by GPU and work; numbered
        self._expected: dict[str, WorkRecord] = {}  # of submissions that are only tried
        self._numbers = itertools.count()
        self._together: dict[tuple[str | int, ...], Speeds | None] = {}  # by the GPU and the numbers of works

    def keep(self, uid: int, run: Sequence[str | None], predicted: dict[str, dict[str, Any]]) -> str | None:
        """The work of a job of which this was predicted; one that was seen before keeps what was measured of it."""
        if not predicted:
            return None
        id = work_id(uid, run, predicted)
        self._store.keep_work(self._store.work(id) or WorkRecord(id=id, predicted=predicted))
        return id

    def expect(self, uid: int, run: Sequence[str | None], predicted: dict[str, dict[str, Any]]) -> str | None:
        """The same for a job that nobody has submitted: what is predicted of it is kept in memory, for a while."""
        if not predicted:
            return None
        id = work_id(uid, run, predicted)
        self._expected.pop(id, None)
        while len(self._expected) >= _MOST_EXPECTED:
            del self._expected[next(iter(self._expected))]
        self._expected[id] = WorkRecord(id=id, predicted=predicted)
        return id

    def _work(self, id: str) -> WorkRecord | None:
        return self._store.work(id) or self._expected.get(id)

    def utilization(self, work: str, gpu: str) -> Utilization | None:
        """What a work does alone on a kind of GPU, as far as it is known now."""
        return self._numbered(work, gpu)[1]

    def _numbered(self, work: str, gpu: str) -> tuple[int, Utilization | None]:
        """The same with a number, which is another one when it has changed."""
        known = self._alone
        if (gpu, work) not in known:
            if len(known) >= _MOST_KNOWN:
                self._alone = known = {}
            record = self._work(work)
            known[gpu, work] = (next(self._numbers), None if record is None else _now(record, gpu))
        return known[gpu, work]

    def known(self, work: str) -> dict[str, dict[str, Any]]:
        """What a work does alone on each kind of GPU, as far as it is known now, ready for JSON."""
        record = self._store.work(work)
        found = {gpu: self.utilization(work, gpu) for gpu in (record.predicted if record else ())}
        return {gpu: each.to_dict() for gpu, each in found.items() if each is not None}

    def busy(self, work: str | None) -> float | None:
        """The SM activity to expect of a work, on the kind of GPU that it keeps busiest."""
        found = None if work is None else self._work(work)
        if found is None:
            return None
        alone = [self.utilization(found.id, gpu) for gpu in found.predicted]
        return max((each.smact for each in alone if each is not None), default=None)

    def shown(self, work: str | None, gpus: Iterable[str]) -> dict[str, Any] | None:
        """A few figures of a work on the first of these GPUs that it is known for, ready for JSON."""
        record = None if work is None else self._store.work(work)
        if record is None:
            return None
        for gpu in gpus:
            found = _now(record, gpu)
            if found is not None:
                names = ("step_s", "smact", "smocc", "drama", "power_w")
                windows = int(record.measured.get(gpu, {}).get("windows", 0))
                return {"gpu": gpu, **{name: getattr(found, name) for name in names}, "windows": windows}
        return None

    def predict(self, works: Sequence[str], slot: Slot) -> Speeds | None:
        """Predict the speeds of works that share a GPU (`ullage.manager.placement.Rules.predict`). Thread-safe."""
        known, alone = self._together, [self._numbered(work, slot.name) for work in works]
        alike = dict(alone)
        numbers = sorted([number for number, _ in alone])
        key: tuple[str | int, ...] = (slot.name, *numbers)
        if key not in known:
            if len(known) >= _MOST_KNOWN:
                self._together = known = {}
            known[key] = self._predict([alike[number] for number in numbers], slot.name)
        found = known[key]
        if found is None:
            return None
        speeds = dict(zip(numbers, found.shares, strict=True))  # the same work has the same speed
        return Speeds([speeds[number] for number, _ in alone], found.reason)

    def _predict(self, alone: Sequence[Utilization | None], gpu: str) -> Speeds | None:
        known = [each for each in alone if each is not None]
        if len(known) < len(alone):
            return None
        try:
            found = share_of(known, find_gpu(gpu), self._how)
        except UllageError:  # a GPU that is in no catalogue, say
            return None
        return Speeds([job.speed for job in found.jobs], found.reason)

    def speed(self, attempt: AttemptRecord, slots: Mapping[str, Slot]) -> float | None:
        """The share of its speed alone that an attempt is expected to have now; None where that is not known."""
        lowest = 1.0
        for place in attempt.slots:
            others = [each for each in list(self._store.attempts.values()) if place in each.slots]
            works = [self._store.job(each.job).work for each in others]
            own = self._store.job(attempt.job).work
            if len(others) < 2:
                continue
            known = [work for work in works if work is not None]
            found = self.predict(known, slots[place]) if len(known) == len(works) and place in slots else None
            if found is None or own is None:
                return None
            lowest = min(lowest, found.shares[known.index(own)])
        return lowest

    def learn(self, slot: Slot, works: Sequence[str], seen: Mapping[str, float]) -> None:
        """Take over what was measured on a slot while these works, and nothing else, were there."""
        alone = [self.utilization(work, slot.name) for work in works]
        known = [each for each in alone if each is not None]
        if not works or len(known) < len(works) or seen.get("smact", 0.0) < _IDLE:
            return
        with self._store.transaction():
            if len(works) == 1:
                self._learn(works[0], slot.name, seen, 1)
            elif seen["smact"] <= _FULL:
                self._learn_together(slot, works, known, seen)
        for work in set(works):
            before = self._alone.pop((slot.name, work))
            if before[1] is not None and _nearly(before[1], self.utilization(work, slot.name)):
                self._alone[slot.name, work] = before  # so that what follows from it holds

    def _learn_together(
        self, slot: Slot, works: Sequence[str], alone: Sequence[Utilization], seen: Mapping[str, float]
    ) -> None:
        """Nobody can tell who did how much. If all together did less or more than was expected, each is taken to have
        done so, by the same part."""
        speeds = self.predict(works, slot)
        if speeds is None:
            return
        factors = {}
        for name in _ADD_UP:
            expected = sum(getattr(each, name) * speed for each, speed in zip(alone, speeds.shares, strict=True))
            if name in seen and expected > _IDLE:
                factors[name] = seen[name] / expected
        if "smact" not in factors:
            return
        for work, each in dict(zip(works, alone, strict=True)).items():
            parts = {name: min(1.0, getattr(each, name) * factor) for name, factor in factors.items()}
            self._learn(work, slot.name, parts | {"gract": min(1.0, each.busy * factors["smact"])}, len(works))

    def _learn(self, work: str, gpu: str, seen: Mapping[str, float], jobs: int) -> None:
        record = self._store.work(work)
        predicted = None if record is None else _predicted(record, gpu)
        if record is not None and predicted is not None:
            after = learned(predicted, record.measured.get(gpu, {}), seen, jobs)
            self._store.keep_work(replace(record, measured=record.measured | {gpu: after}))


class WorkMeter:
    """Sees when what a GPU shows can be put down to works: the same running jobs, and nobody else, for long enough.
    `others` is how much memory of a slot belongs to none of our jobs.

    A window of readings is left out after each change, for a job that begins is loading.
    """

    def __init__(
        self,
        works: Works,
        store: JobStore,
        monitor: Monitor,
        others: Callable[[str], int],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._works, self._store, self._monitor, self._others, self._clock = works, store, monitor, others, clock
        self._there: dict[str, tuple[frozenset[str], float]] = {}  # by slot: tokens, and when the next window is over
        self.windows = 0  # that are over

    def look(self, slots: Iterable[Slot]) -> None:
        """Take over what was measured, of those slots of which a window is over."""
        now, window = self._clock(), self._monitor.seconds
        here: dict[str, list[AttemptRecord]] = {}
        for attempt in self._store.attempts.values():
            for place in attempt.slots:
                here.setdefault(place, []).append(attempt)
        for slot in slots:
            attempts = here.get(slot.id, [])
            tokens = frozenset(each.token for each in attempts)
            before, due = self._there.get(slot.id, (None, 0.0))
            strangers = slot.foreign or slot.lost or self._others(slot.id) > _UNNOTICED
            quiet = not strangers and all(each.state == RUNNING for each in attempts)
            if tokens != before or not quiet:
                self._there[slot.id] = (tokens, now + 2 * window)
            elif attempts and now >= due:
                self._there[slot.id] = (tokens, now + window)
                self.windows += 1
                works = [self._store.job(each.job).work for each in attempts]
                if None not in works and self._monitor.processes(slot.id) is not None:
                    self._works.learn(slot, [work for work in works if work is not None], self._seen(slot.id))

    def _seen(self, slot: str) -> dict[str, float]:
        """The means over the window of what is known; a reading that makes no sense is none."""
        window = self._monitor.window(slot)
        found = {name: window.mean(name) for name in _FIGURES if window.count(name) > 1}
        return {
            name: value
            for name, value in found.items()
            if value is not None and math.isfinite(value) and 0 <= value <= (_MOST_WATTS if name == "power_w" else 1)
        }
