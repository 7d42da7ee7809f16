"""Jobs, attempts and GPUs as answers show them: plain values, ready for JSON."""

from __future__ import annotations

import dataclasses
from typing import Any

from ullage.manager.records import AttemptRecord, JobRecord
from ullage.manager.states import State
from ullage.placement import Ledger, Slot

# Said for a state in which placement was not asked.
_REASONS = {
    State.ESTIMATING: "is being estimated",
    State.HELD: "is held; 'ullage release' lets it go",
    State.QUEUED: "has just come",
}


def job_shown(job: JobRecord, reason: str | None, now: float, whole: bool) -> dict[str, Any]:
    """A job. With `whole`, its command, folder and environment's names too."""
    asked = job.spec["asked"]
    shown: dict[str, Any] = {
        "id": job.id, "name": job.name, "user": job.user, "state": job.state.value, "priority": job.priority,
        "array_id": job.array_id, "array_index": job.array_index, "gpus": asked["gpus"],
        "need": job.need, "estimate": job.estimate_note, "exclusive": job.exclusive, "recovery": job.recovery,
        "submitted": job.submitted, "started": job.started, "ended": job.ended,
        "waited": _span(job.submitted, job.started or job.ended or now),
        "ran": job.ran if not job.state.is_live else job.ran + (_span(job.started, now) or 0.0),
        "completion": _span(job.submitted, job.ended),
        "cause": job.cause, "detail": job.detail, "exit_code": job.exit_code,
        "reason": (reason if job.state is State.QUEUED else None) or _REASONS.get(job.state),
    }  # fmt: skip
    if whole:
        names = ("command", "cwd", "venv", "conda", "memory", "host_memory", "model", "batch_size", "time_limit",
                 "resumable", "mps_threads", "mps_memory")  # fmt: skip
        shown |= {name: asked[name] for name in names} | {"env": sorted(asked["env"])}
    return shown


def attempt_shown(attempt: AttemptRecord) -> dict[str, Any]:
    """An attempt; its token stays between the daemon and its processes."""
    shown = dataclasses.asdict(attempt)
    shown.pop("token")
    return shown


def gpu_shown(slot: Slot, ledger: Ledger, drained: str | None) -> dict[str, Any]:
    """A GPU, with what the ledger says about it."""
    shown = dataclasses.asdict(slot)
    shown |= {
        "promised": ledger.promised(slot.id), "free": ledger.free(slot.id), "jobs": list(ledger.holders(slot.id)),
        "alone": ledger.exclusive(slot.id), "drain_reason": drained,
    }  # fmt: skip
    return shown


def _span(begin: float | None, end: float | None) -> float | None:
    """Seconds between two times of the wall clock, which may have been set back meanwhile."""
    return None if begin is None or end is None else max(0.0, end - begin)
