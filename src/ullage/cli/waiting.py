"""Waits for jobs to be over; `ullage wait` and `ullage submit --wait`."""

from __future__ import annotations

from typing import Any

from ullage.cli.job_client import label, print_json
from ullage.errors import InvalidValue
from ullage.units import format_duration

DONE, FAILED = 0, 1


def wait_for(daemon: Any, jobs: list[str], timeout: float | None = None) -> list[dict[str, Any]]:
    """The jobs once all are over; a daemon that goes away meanwhile is waited for too."""
    import time

    from ullage.errors import NoDaemon

    deadline = None if timeout is None else time.monotonic() + timeout
    last = None
    while True:
        try:
            last = daemon.call("ping")["last_event"] if last is None else last
            found = {one["id"]: one for job in jobs for one in daemon.call("status", job=job)}
            if all(one["ended"] for one in found.values()):
                return list(found.values())
            last = daemon.call("events", since=last, wait=5.0)["last"]
        except NoDaemon:
            if last is None:
                raise
            time.sleep(0.2)
        if deadline is not None and time.monotonic() > deadline:
            raise InvalidValue(f"waited {format_duration(timeout)}; the jobs are not over")


def exit_code(jobs: list[dict[str, Any]]) -> int:
    """0 if all are done; a single job's own code; else 1."""
    if all(job["state"] == "done" for job in jobs):
        return DONE
    return int(jobs[0]["exit_code"] or FAILED) if len(jobs) == 1 else FAILED


def tell(jobs: list[dict[str, Any]], as_json: bool) -> None:
    """Say how jobs ended."""
    if as_json:
        print_json(jobs)
        return
    for job in jobs:
        print(f"job {label(job)} is {job['state']}" + (f": {job['detail']}" if job["state"] != "done" else ""))
