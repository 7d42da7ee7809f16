"""What jobs really did, job by job: enough to run them again in a simulation (`ullage.simulation.history`)."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

from ullage.manager.core.context import ManagerContext
from ullage.manager.core.report import OTHERS, Others, times_asked
from ullage.manager.core.scheduler import rules_of
from ullage.manager.identity import Caller
from ullage.manager.storage.records import AttemptRecord, JobRecord


def trace(
    context: ManagerContext, caller: Caller, since: float | None, until: float | None, user: str | None, there: bool
) -> dict[str, Any]:
    """The jobs that were submitted between two times (the last seven days), as far as the caller may see them; with
    `there`, those too that had been submitted before and were not over yet."""
    begin, end = times_asked(context, since, until)
    others: Others = "all" if caller.operator else context.settings.access.report
    history, settings = context.store.history, context.settings
    jobs = [job for job in history.submitted_between(begin, end, there) if user in (None, job.user)]
    seen = [job for job in jobs if others != "own" or job.user == caller.user]
    numbers = [job.id for job in seen]
    attempts, queued = history.attempts(numbers), history.queued(numbers)
    works = {job.work for job in seen if job.work is not None}
    return {
        "since": begin, "until": end, "policy": context.policy.name, "sharing": context.sharing.name,
        "estimator": settings.estimating.estimator, "min_speed": settings.placing.min_speed, "rules": _rules(context),
        "reading_s": settings.monitoring.interval, "all": others != "own",
        "gpus": [
            {"id": slot.id, "index": slot.index, "name": slot.name, "total": slot.total, "mig": slot.mig}
            for slot in context.slots
        ],
        "works": {work: context.works.known(work) for work in sorted(works)},
        "jobs": [
            _job(job, attempts.get(job.id, ()), queued.get(job.id), others == "all" or job.user == caller.user)
            for job in seen
        ],
    }  # fmt: skip


def _rules(context: ManagerContext) -> dict[str, Any]:
    """The settings of `ullage.placement.Rules`."""
    found = dataclasses.asdict(rules_of(context.settings, virtual=context.cards is not None))
    del found["predict"]
    return found


def _job(job: JobRecord, attempts: Iterable[AttemptRecord], queued: float | None, named: bool) -> dict[str, Any]:
    """A job; one of others that only their totals may be seen of has no names."""
    names = ("placed", "started", "ended", "elapsed", "slots", "promise", "exclusive", "used", "energy", "cause")
    return {
        "id": job.id, "user": job.user if named else OTHERS, "name": job.name if named else f"({OTHERS})",
        "state": job.state.value, "submitted": job.submitted, "queued": queued, "gpus": job.asked("gpus"),
        "priority": job.priority, "time_limit": job.asked("time_limit"), "promise": job.promise, "work": job.work,
        "attempts": [{name: getattr(attempt, name) for name in names} for attempt in attempts],
    }  # fmt: skip
