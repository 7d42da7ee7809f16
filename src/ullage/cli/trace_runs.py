"""Runs a trace through a daemon: each job is submitted at its time as a stand-in with its memory, activity and work."""

import contextlib
import os
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from ullage.errors import InvalidValue, UllageError
from ullage.hardware import gpu
from ullage.jobs.job_files import JobSpec, make_job, read_job
from ullage.manager.client import Client
from ullage.manager.simulation.history import as_it_was
from ullage.manager.simulation.known import MEASURED_ON, promise_of
from ullage.manager.simulation.result import SimulationResult
from ullage.manager.simulation.trace import JobTrace, TraceJob
from ullage.virtual.shared_card.stand_in import StandIn

FASTEST = 10_000.0
_LOOK = 0.3  # seconds between two looks at the queue


def execute(
    trace: JobTrace,
    client: Client,
    speed: float = 1.0,
    estimator: str | None = None,
    progress: Callable[[int, int], None] = lambda submitted, over: None,
) -> SimulationResult:
    """Run the jobs of a trace on a daemon, `speed` times faster than recorded, and return the outcome in their time.

    Promises are those of the `estimator`, as in a simulation; None: the daemon's estimates of what the job files
    describe. If anything interrupts the run, its jobs are cancelled. Energy and activity are predicted.
    """
    if not 0 < speed <= FASTEST:
        raise InvalidValue(f"speed must be above 0 and at most {FASTEST:g}, got {speed:g}")
    specs = [_spec(job, speed, estimator) for job in trace.jobs]
    for device in client.call("gpus"):
        gpu(device["name"])  # refused now, not after the run
    run, numbers, since, over = secrets.token_hex(16), list[int](), time.time(), 0

    def submit() -> None:
        place = len(numbers)
        numbers.extend(client.submit_spec(specs[place], key=f"{run} {place}")["jobs"])

    try:
        while over < len(specs):
            rest = (
                trace.jobs[len(numbers)].arrival / speed + since - time.time() if len(numbers) < len(specs) else _LOOK
            )
            if rest <= 0:
                submit()
                continue
            waiting = {job["id"] for job in client.queue()}
            over = sum(number not in waiting for number in numbers)
            progress(len(numbers), over)
            time.sleep(min(_LOOK, rest))
    except BaseException:
        client.close()  # an answer may be under way
        with contextlib.suppress(UllageError):
            if len(numbers) < len(specs):
                submit()  # it may be known already, and is the same job then
            client.cancel(*{job["id"] for job in client.queue()}.intersection(numbers))
        raise
    jobs = dict(zip(numbers, trace.jobs, strict=True))
    result = as_it_was(_rescaled(client.trace(since - 1.0), since, speed, jobs))
    label = f"{client.ping()['policy']}, executed"
    return replace(result, trace=trace.name, scenario=result.scenario.but(label=label))


def _spec(job: TraceJob, speed: float, estimator: str | None) -> JobSpec:
    kind = job.kind
    alone = kind.alone.get(MEASURED_ON)
    gract, smact = (1.0, 1.0) if alone is None else (round(alone.busy, 3), round(alone.smact, 3))
    own = {
        "command": StandIn(job.id, kind.memory, job.work_s, gract, smact, speed).command,
        "name": kind.name,
        "cwd": os.getcwd(),
        "env": dict(os.environ),
        "gpus": job.gpus,
        "measured": kind.memory,
        "time_limit": job.time_limit and job.time_limit / speed,
    }
    if estimator is None and kind.file is not None:
        return read_job(kind.file).spec.with_changes(**own, conda=None, venv=None)
    promise = None if estimator is None else promise_of(kind, estimator)
    return make_job({**own, "memory": promise, "estimator": "none"}, kind.name)


def _rescaled(history: dict[str, Any], begin: float, speed: float, jobs: dict[int, TraceJob]) -> dict[str, Any]:
    """Return the history of these jobs in the time of the trace, with the known activity of their kinds."""

    def moments(record: Mapping[str, Any], *names: str) -> dict[str, Any]:
        return {name: record[name] and begin + (record[name] - begin) * speed for name in names}

    def attempt_of(attempt: Mapping[str, Any]) -> dict[str, Any]:
        lasted = attempt["elapsed"] and attempt["elapsed"] * speed
        scaled = moments(attempt, "placed", "started", "ended")
        return {**attempt, **scaled, "elapsed": lasted, "energy": None}  # a stand-in draws other power than its job

    shown = [
        {
            **job,
            **moments(job, "submitted", "queued"),
            "work": jobs[job["id"]].kind.name,
            "attempts": [attempt_of(attempt) for attempt in job["attempts"]],
        }
        for job in history["jobs"]
        if job["id"] in jobs
    ]
    kinds = [job.kind for job in jobs.values()]
    works = {kind.name: {name: known.to_dict() for name, known in kind.alone.items()} for kind in kinds}
    return {**history, "jobs": shown, "works": works}
