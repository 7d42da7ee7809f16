"""Workloads: the predicted activity and shared speeds of jobs on GPUs, and the needs of earlier runs.

Jobs of one user with the same script in the same folder and the same prediction share a workload, such as those of an
array. Jobs repeat an earlier run if user, command, folder, environment and number of GPUs are the same.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, NamedTuple

from ullage.errors import InvalidValue, UllageError
from ullage.hardware import gpu as find_gpu
from ullage.manager.placement import Slot, Speeds
from ullage.manager.storage.job_store import JobStore
from ullage.manager.storage.records import AttemptRecord, WorkRecord
from ullage.performance.result import Utilization
from ullage.performance.sharing import share_of
from ullage.sandbox.recording import OF_A_SESSION
from ullage.units import format_bytes

_LONGEST_STEP, _LARGEST, _MOST_WATTS = 86400.0, 1e24, 1e5
_MOST_GROUPS = 200  # bounds of kernel lengths
_MOST_KNOWN = 100_000  # predictions in memory
_MARGIN, _LEAST_MARGIN = 0.1, 512 << 20  # added to earlier runs (share, bytes): memory is only sampled


BY_CLASS = "class"  # in place of a GPU, where only the class of the SM activity is known
OF_A_RUN = {"command", "cwd", "venv", "conda", "env", "gpus"}
"""The fields of `JobSpec` that decide how much a run needs."""


class EarlierRuns(NamedTuple):
    """The last runs of the same command: their number, the most bytes on one GPU, and the most seconds."""

    runs: int
    used: int
    elapsed: float

    @property
    def promise(self) -> int:
        return self.used + max(int(self.used * _MARGIN), _LEAST_MARGIN)

    @property
    def note(self) -> str:
        """Return the source of the promise in words."""
        where = "an earlier run" if self.runs == 1 else f"the largest of {self.runs} earlier runs"
        return f"measured: {format_bytes(self.used)} in {where}, plus {format_bytes(self.promise - self.used)}"


def run_key(uid: int, request: Mapping[str, Any]) -> str:
    """Return the key of all runs that need as much as this one; variables of a terminal session do not matter."""
    known = {name: request[name] for name in OF_A_RUN}
    known["env"] = {name: value for name, value in (known["env"] or {}).items() if not OF_A_SESSION.fullmatch(name)}
    return hashlib.sha256(json.dumps([uid, known], sort_keys=True).encode()).hexdigest()


def read_utilization(prediction: Any, gpus: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Return an estimate's activity by GPU, ready for JSON. It comes from a process of the user, so invalid values are
    dropped."""
    by_gpu = {}
    for name in gpus:
        values = prediction.get(name) if isinstance(prediction, dict) else None
        if isinstance(values, dict):
            try:
                made = replace(Utilization.from_dict(values), gpu=name, notes=[])
            except (InvalidValue, TypeError, ValueError):
                continue
            if _is_sensible(made):
                by_gpu[name] = made.to_dict()
    return by_gpu


def _is_sensible(made: Utilization) -> bool:
    shares = dict.fromkeys(("smact", "smocc", "drama", "tensor"), 1.0)
    most = shares | {"power_w": _MOST_WATTS} | dict.fromkeys(("step_s", "gpu_s", "host_s"), _LONGEST_STEP)
    for spec in fields(made):
        value = getattr(made, spec.name)
        if spec.type is bool and type(value) is not bool:
            return False
        if spec.type not in (int, float, int | None, float | None) or value is None and spec.default is None:
            continue
        if type(value) not in (int, float) or not 0 <= value <= most.get(spec.name, _LARGEST):
            return False
    if len(made.kernel_groups) > _MOST_GROUPS:
        return False
    figures = [figure for group in made.kernel_groups for figure in group]
    return made.step_s > 0 and all(type(figure) in (int, float) and 0 <= figure <= _LARGEST for figure in figures)


class WorkloadProfiles:
    """The workloads of a daemon's jobs. `sharing` is "mps" or "time-slicing"."""

    def __init__(self, store: JobStore, sharing: str) -> None:
        self._store, self._how = store, sharing
        self._alone: dict[tuple[str, str], Utilization] = {}  # by workload and GPU
        self._together: dict[tuple[str, ...], Speeds | None] = {}  # by GPU and workloads

    def earlier_runs(self, uid: int, request: Mapping[str, Any]) -> EarlierRuns | None:
        """Return the last runs of a request; `None` if there were none."""
        runs = self._store.runs(run_key(uid, request))
        if not runs:
            return None
        return EarlierRuns(len(runs), max(used for used, _ in runs), max(elapsed for _, elapsed in runs))

    def keep(self, uid: int, run: Sequence[str | None], predicted: dict[str, dict[str, Any]]) -> str | None:
        """Store a prediction, and return the id of its workload. Arguments and variables do not matter if the
        prediction is the same."""
        if not predicted:
            return None
        id = hashlib.sha256(json.dumps([uid, run, predicted], sort_keys=True).encode()).hexdigest()[:32]
        self._store.keep_work(WorkRecord(id=id, predicted=predicted))
        return id

    def utilization(self, work: str, gpu: str) -> Utilization | None:
        if (work, gpu) not in self._alone:
            record = self._store.work(work)
            try:
                made = Utilization.from_dict((record.predicted if record else {})[gpu])
            except (KeyError, TypeError, InvalidValue):
                return None
            if len(self._alone) >= _MOST_KNOWN:
                self._alone = {}
            self._alone[work, gpu] = made
        return self._alone.get((work, gpu))

    def known(self, work: str | None) -> dict[str, Utilization]:
        record = None if work is None else self._store.work(work)
        by_gpu = {gpu: self.utilization(record.id, gpu) for gpu in record.predicted} if record else {}
        return {gpu: each for gpu, each in by_gpu.items() if each is not None}

    def busy(self, work: str | None) -> float | None:
        """Return the highest SM activity of a workload on any GPU model, or the middle of its class."""
        record = None if work is None else self._store.work(work)
        by_class = record.predicted.get(BY_CLASS, {}).get("smact") if record else None
        return max((each.smact for each in self.known(work).values()), default=by_class)

    def shown(self, work: str | None, gpus: Iterable[str]) -> dict[str, Any] | None:
        """Return a workload's figures on the first of these GPUs with a prediction, ready for JSON."""
        known, names = self.known(work), ("step_s", "smact", "smocc", "drama", "power_w")
        gpu = next((gpu for gpu in gpus if gpu in known), None)
        return None if gpu is None else {"gpu": gpu, **{name: getattr(known[gpu], name) for name in names}}

    def predict(self, works: Sequence[str], slot: Slot) -> Speeds | None:
        """Predict the speeds of workloads that share a GPU (`ullage.manager.placement.Rules.predict`). Thread-safe."""
        ordered = sorted(works)
        key, known = (slot.name, *ordered), self._together
        if key not in known:
            if len(known) >= _MOST_KNOWN:
                self._together = known = {}
            known[key] = self._predict(ordered, slot.name)
        speeds = known[key]
        if speeds is None:
            return None
        share_of_work = dict(zip(ordered, speeds.shares, strict=True))  # copies of a workload have the same speed
        return Speeds([share_of_work[work] for work in works], speeds.reason)

    def _predict(self, works: Sequence[str], gpu: str) -> Speeds | None:
        alone = [self.utilization(work, gpu) for work in works]
        known = [each for each in alone if each is not None]
        if len(known) < len(alone):
            return None
        try:
            shares = share_of(known, find_gpu(gpu), self._how)
        except UllageError:  # for example, the GPU is not in the catalogue
            return None
        return Speeds([job.speed for job in shares.jobs], shares.reason)

    def speed(self, attempt: AttemptRecord, slots: Mapping[str, Slot]) -> float | None:
        """Return the predicted present speed of an attempt, as a share of its speed alone; `None` if unknown."""
        own, lowest = self._store.job(attempt.job).work, 1.0
        for place in attempt.slots:
            there = [each.job for each in list(self._store.attempts.values()) if place in each.slots]
            beside = [self._store.job(job).work for job in there if job != attempt.job]
            share = self.speed_beside(own, beside, slots.get(place))
            if share is None:
                return None
            lowest = min(lowest, share)
        return lowest

    def speed_beside(self, work: str | None, others: Sequence[str | None], slot: Slot | None) -> float | None:
        if not others:
            return 1.0
        works = [each for each in (work, *others) if each is not None]
        if slot is None or len(works) <= len(others):
            return None
        speeds = self.predict(works, slot)
        return None if speeds is None else speeds.shares[0]
