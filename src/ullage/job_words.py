"""A job of the daemon's answers in words, for the command line and for the page."""

from __future__ import annotations

from typing import Any

from ullage.units import format_bytes

Job = dict[str, Any]


def memory(size: int | None) -> str:
    """A size in a table."""
    return "unknown" if size is None else format_bytes(size)


def label(job: Job) -> str:
    """How a job is called in a sentence: its number, with its place in an array."""
    return str(job["id"]) if job["array_id"] is None else f"{job['id']} ({reference(job)})"


def reference(job: Job) -> str:
    """How a job is called on the command line; jobs of an array in one row have one name.

    >>> reference({"id": 12, "array_id": 12, "array_index": 5, "jobs": 3, "indices": "5-7"})
    '12_[5-7]'
    """
    if job["array_id"] is None:
        return str(job["id"])
    return f"{job['array_id']}_{job['array_index'] if job.get('jobs', 1) == 1 else '[' + job['indices'] + ']'}"


def why(job: Job) -> str:
    """Why it waits, where it runs, or why it ended."""
    if job["ended"] is not None:
        cause, more = job["cause"] or "", job["detail"] or ""
        return cause if job["state"] == "done" or more in ("", cause) else f"{cause}: {more}" if cause else more
    if job["alone"] is None:  # it has no live attempt
        return ("again, " if job["recovery"] else "") + (job["reason"] or "")
    places = ", ".join(f"GPU {place}" for place in job["places"])
    over = f"USES {memory(job['used'])}, MORE THAN PROMISED" if job["over_promise"] else ""
    where = f"on {places}" if places else "without a GPU"
    if (job.get("speed") or 1.0) < 0.995:
        where += f" at {job['speed']:.0%} of its speed"
    return ", ".join(filter(None, (over, where, "alone" if job["alone"] else "", host_share(job))))


def host_share(job: Job) -> str:
    """What a job is promised of the host, in words; "" where it is nothing."""
    cores = f"{job['cores']} core{'' if job['cores'] == 1 else 's'}" if job["cores"] else ""
    return ", ".join(filter(None, (cores, f"{memory(job['host_promise'])} host memory" if job["host_promise"] else "")))
