"""Jobs, attempts and GPUs as orders show them: plain values, ready for JSON."""

import contextlib
import dataclasses
import json
from collections.abc import Iterable, Mapping
from typing import Any

from ullage.manager.core.context import ManagerContext
from ullage.manager.core.intake import Intake
from ullage.manager.core.limits import share_of
from ullage.manager.core.watchdog import MOST_CRASHES
from ullage.manager.identity import Caller
from ullage.manager.monitor.readings import GPUReading
from ullage.manager.placement import HostShare, Ledger, Slot
from ullage.manager.storage.records import WAITING, AttemptRecord, JobRecord, State
from ullage.units import format_bytes

HIDDEN = "only its owner and operators see this"
_OF_REQUEST = [
    "command",
    "cwd",
    "venv",
    "conda",
    "memory",
    "host_memory",
    "model",
    "batch_size",
    "sequence_length",
    "time_limit",
    "resumable",
    "mps_threads",
    "mps_memory",
    "begin",
    "retries",
    "requeue",
    "on_end",
]

_TO_BE_ESTIMATED = "waits to be estimated"

# Why a job waits, for states in which placement does not decide.
_REASONS = {
    State.HELD: "is held; release it with 'ullage edit --release'",
    State.QUEUED: "has just come",
}


def job_shown(job: JobRecord, reason: str | None, now: float, whole: bool, mine: bool) -> dict[str, Any]:
    """Return a job; with `whole`, also its command, folder and names of variables. If it is not `mine`, leave out all
    texts that may quote its command or output."""
    request = job.request if whole and mine else job.spec["asked"]
    is_poisonous = job.state is State.HELD and job.crashes >= MOST_CRASHES
    shown: dict[str, Any] = {
        "id": job.id,
        "name": job.name,
        "user": job.user,
        "state": job.state.value,
        "priority": job.priority,
        "array_id": job.array_id,
        "array_index": job.array_index,
        "gpus": request["gpus"],
        "estimate": job.estimate_note if mine or job.estimate_note is None else HIDDEN,
        "exclusive": job.exclusive,
        "recovery": job.recovery,
        "submitted": job.submitted,
        "started": job.started,
        "ended": job.ended,
        "waited": _span(job.submitted, job.started or job.ended or now),
        "ran": job.ran,
        "completion": _span(job.submitted, job.ended),
        "cause": job.cause,
        "detail": job.detail if mine else None,
        "exit_code": job.exit_code,
        "reason": job.detail if is_poisonous else reason or _REASONS.get(job.state),
    }
    if whole and mine:
        variables = request.get("env") or job.spec.get("variables", [])
        shown |= {name: request.get(name) for name in _OF_REQUEST} | {"env": sorted(variables)}
        shown["breakdown"] = None if job.breakdown is None else json.loads(job.breakdown)
    return shown


def attempt_shown(attempt: AttemptRecord, mine: bool) -> dict[str, Any]:
    shown = dataclasses.asdict(attempt)
    shown.pop("token")
    return shown if mine else shown | {"detail": None}


def gpu_shown(slot: Slot, ledger: Ledger, drained: str | None, latest: GPUReading | None) -> dict[str, Any]:
    """Return a GPU with its promises and its power."""
    shown = dataclasses.asdict(slot)
    shown |= {
        "activity": slot.activity._asdict(),
        "promised": ledger.promised(slot.id),
        "free": ledger.free(slot.id),
        "jobs": list(ledger.holders(slot.id)),
        "alone": ledger.exclusive(slot.id),
        "drain_reason": drained,
        "power_w": latest.power_w if latest else None,
    }
    return shown


def _span(begin: float | None, end: float | None) -> float | None:
    """Return the seconds between two times of the wall clock, which may have been changed meanwhile."""
    return None if begin is None or end is None else max(0.0, end - begin)


def folded(jobs: Iterable[JobRecord]) -> list[list[JobRecord]]:
    """Group jobs into rows: array jobs that wait in the same state share one."""
    rows: dict[tuple[object, ...], list[JobRecord]] = {}
    for job in jobs:
        alike = job.array_id is not None and job.state in WAITING
        is_estimated = job.estimate_key is None
        key = (job.array_id, job.state, job.priority, job.recovery, is_estimated) if alike else (job.id,)
        rows.setdefault(key, []).append(job)
    return list(rows.values())


def ranges(indices: Iterable[int]) -> str:
    """Return indices in short form, as `parse_array` reads them.

    >>> ranges([1, 2, 3, 7, 9, 10])
    '1-3,7,9-10'
    """
    spans: list[list[int]] = []
    for index in sorted(indices):
        if spans and index == spans[-1][1] + 1:
            spans[-1][1] = index
        else:
            spans.append([index, index])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)


class JobViews:
    """Jobs as a caller may see them. Thread-safe."""

    def __init__(self, context: ManagerContext, intake: Intake) -> None:
        self._context, self._intake = context, intake

    def folded(self, caller: Caller, row: list[JobRecord]) -> dict[str, Any]:
        """Return a row of `folded`: its first job, the number of `jobs`, and their indices."""
        shown = self.shown(caller, row[0]) | {"jobs": len(row), "indices": None}
        if len(row) > 1:
            known = [job.promise for job in row if job.promise is not None]
            shown["promise"] = max(known) if len(known) == len(row) else None
            shown["indices"] = ranges(job.array_index for job in row if job.array_index is not None)
        return shown

    def shown(self, caller: Caller, job: JobRecord, whole: bool = False) -> dict[str, Any]:
        context, mine = self._context, caller.may_change(job.uid)
        shown = job_shown(job, self._reason(job, mine), context.clock(), whole, mine)
        attempt = context.store.attempts.get(job.id)
        held = context.used.get(attempt.token) if attempt else None
        used = max(held.values()) if held else None
        pid = context.pids.get(job.id) if attempt else None
        host = None if pid is None else context.slot_reader.monitor.host(pid)
        share = share_of(job.spec["asked"], context.settings.host)
        if attempt is not None:
            share = HostShare(attempt.cores, attempt.host_promise)
        return shown | {
            "ran": job.ran + ((_span(attempt.started, context.clock()) if attempt else None) or 0.0),
            "gpus_used": list(attempt.slots) if attempt else [],
            "alone": attempt.exclusive if attempt else None,
            "promise": attempt.promise if attempt else job.promise,
            "used": used,
            "estimating": self.estimating(job),
            "promises": list(attempt.promises if attempt else job.promises),
            "over_promise": attempt is not None and self._is_over_promise(attempt, held or {}),
            "cores": share.cores,
            "host_promise": share.memory,
            "after": [need.reference(context.store.name_of) for need in context.store.dependencies.get(job.id, ())],
            "throttle": None if job.array_id is None else context.store.throttles.get(job.array_id),
            **self._speeds(job, attempt),
            "host_memory_used": host.ram if host else None,
            "host_cores_used": host.cpu if host else None,
        }

    def _speeds(self, job: JobRecord, attempt: AttemptRecord | None) -> dict[str, Any]:
        context, own = self._context, job.option("min_speed")
        slots = {slot.id: slot for slot in context.slots} if attempt or job.work else {}  # queues are long
        names = [slots[place].name for place in attempt.slots if place in slots] if attempt else []
        return {
            "utilization": context.works.shown(job.work, [*names, *(slot.name for slot in slots.values())]),
            "speed": context.works.speed(attempt, slots) if attempt and attempt.slots else None,
            "min_speed": context.settings.placing.min_speed if own is None else own,
        }

    def _is_over_promise(self, attempt: AttemptRecord, held: Mapping[str, int]) -> bool:
        if attempt.promise is None or attempt.exclusive:
            return False
        promised, tolerance = attempt.memory, self._context.settings.running.tolerance
        return any(used > promised.get(slot, 0) + tolerance for slot, used in held.items())

    def estimating(self, job: JobRecord) -> str | None:
        """Return the progress of a pending estimate, in words that follow "its memory"; `None` if there is none."""
        if job.estimate_key is None or job.state.is_over:
            return None
        with contextlib.suppress(KeyError, RuntimeError):  # the loop's thread may change estimates meanwhile
            return self._intake.standing(job) or _TO_BE_ESTIMATED
        return _TO_BE_ESTIMATED

    def _reason(self, job: JobRecord, mine: bool) -> str | None:
        """Return why a job waits, if that is not clear from its state, or a warning while it runs."""
        if job.state is State.QUEUED:
            return self._context.reason(job.id)
        if job.state is State.HELD and job.detail and mine:
            return f"is held: {job.detail}; 'ullage edit --release' starts it all the same"
        return self._overbooked(job) if job.state.is_live else None

    def _overbooked(self, job: JobRecord) -> str | None:
        """Return a warning if promises exceed the memory of a GPU where the job runs."""
        ledger = self._context.ledger
        for slot in self._context.slots:
            lacking = ledger.promised(slot.id) - slot.total
            if lacking > 0 and job.id in ledger.holders(slot.id):
                return (
                    f"GPU {slot.index} has {format_bytes(lacking)} less than its jobs are promised, since an estimate "
                    "came while its job ran; nothing is stopped, and a job that runs out of memory is tried again"
                )
        return None
