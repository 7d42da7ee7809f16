"""Exports what each job did, in enough detail to run it again in a simulation (`ullage.manager.simulation.history`)."""

import contextlib
import dataclasses
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from ullage.errors import InvalidValue
from ullage.manager.core.context import ManagerContext
from ullage.manager.core.report import OTHERS, Others, times_asked
from ullage.manager.core.scheduler import rules_of
from ullage.manager.core.works import WorkloadProfiles
from ullage.manager.identity import Caller
from ullage.manager.storage.database import FILE, LOGS, Database
from ullage.manager.storage.job_store import JobStore
from ullage.manager.storage.records import AttemptRecord, JobRecord


def trace(
    context: ManagerContext, caller: Caller, since: float | None, until: float | None, user: str | None, there: bool
) -> dict[str, Any]:
    """Return the jobs submitted between two times (the last seven days) that the caller may see; with `there`, also
    earlier jobs that had not finished."""
    begin, end = times_asked(context, since, until)
    others: Others = "all" if caller.operator else context.settings.access.report
    jobs = [job for job in context.store.history.submitted_between(begin, end, there) if user in (None, job.user)]
    visible = [job for job in jobs if others != "own" or job.user == caller.user]
    contents = _contents(context.store, context.works, visible, lambda job: others == "all" or job.user == caller.user)
    return {"since": begin, "until": end, **site(context), "all": others != "own", **contents}


def stored_trace(place: Path, since: float = 0.0, until: float | None = None) -> dict[str, Any]:
    """Return the same for all jobs in the database of a stopped daemon: its file, a copy, or its folder. A copy is
    read, so that the database stays unchanged."""
    files = (place, place / FILE, place / "manager" / FILE)
    file = next((each for each in files if each.is_file()), None)
    if file is None:
        raise InvalidValue(f"{place} must be the database of a daemon, {FILE}, or a folder that has it, got neither")
    with tempfile.TemporaryDirectory(prefix="ullage-") as name:
        try:
            shutil.copyfile(file, Path(name) / FILE)
            if (log := file.with_name(file.name + LOGS[0])).exists():  # the last changes of a killed daemon
                shutil.copyfile(log, Path(name) / (FILE + LOGS[0]))
        except OSError as error:
            raise InvalidValue(f"cannot read the database {file}: {error.strerror}") from None
        with contextlib.closing(Database(Path(name))) as database:
            return _stored(JobStore(database, time.time), file, since, time.time() if until is None else until)


def _stored(store: JobStore, file: Path, since: float, until: float) -> dict[str, Any]:
    there = store.site()
    if there is None:
        raise InvalidValue(
            f"{file} was written by an Ullage that did not keep the GPUs and rules with the jobs; "
            "start the daemon there once with this version, or ask the daemon itself: --from-history --save-history"
        )
    visible = store.history.submitted_between(since, until, False)
    contents = _contents(store, WorkloadProfiles(store, there["sharing"]), visible, lambda job: True)
    return {"since": since, "until": until, **there, "all": True, **contents}


def site(context: ManagerContext) -> dict[str, Any]:
    settings = context.settings
    rules = dataclasses.asdict(rules_of(settings, virtual=context.cards is not None))
    del rules["predict"]
    return {
        "policy": context.policy.name,
        "sharing": context.sharing.name,
        "estimator": settings.estimating.estimator,
        "min_speed": settings.placing.min_speed,
        "rules": rules,
        "reading_s": settings.monitoring.interval,
        "gpus": [
            {"id": slot.id, "index": slot.index, "name": slot.name, "total": slot.total, "mig": slot.mig}
            for slot in context.slots
        ],
    }


def _contents(
    store: JobStore, works: WorkloadProfiles, jobs: Sequence[JobRecord], named: Callable[[JobRecord], bool]
) -> dict[str, Any]:
    """Return jobs and their workloads; jobs that are not `named` stay anonymous."""
    numbers = [job.id for job in jobs]
    attempts, queued = store.history.attempts(numbers), store.history.queued(numbers)
    used = sorted({job.work for job in jobs if job.work is not None})
    return {
        "works": {work: {gpu: each.to_dict() for gpu, each in works.known(work).items()} for work in used},
        "jobs": [_job(job, attempts.get(job.id, ()), queued.get(job.id), named(job)) for job in jobs],
    }


def _job(job: JobRecord, attempts: Iterable[AttemptRecord], queued: float | None, named: bool) -> dict[str, Any]:
    names = ("placed", "started", "ended", "elapsed", "slots", "promise", "exclusive", "used", "energy", "cause")
    return {
        "id": job.id,
        "array_id": job.array_id,
        "array_index": job.array_index,
        "user": job.user if named else OTHERS,
        "name": job.name if named else f"({OTHERS})",
        "state": job.state.value,
        "submitted": job.submitted,
        "queued": queued,
        "gpus": job.option("gpus"),
        "priority": job.priority,
        "time_limit": job.option("time_limit"),
        "promise": job.promise,
        "work": job.work,
        "attempts": [{name: getattr(attempt, name) for name in names} for attempt in attempts],
    }
