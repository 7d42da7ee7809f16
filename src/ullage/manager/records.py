"""A job and an attempt as they stand in the database, as values that do not change."""

from __future__ import annotations

import dataclasses
import json
import sqlite3
from dataclasses import dataclass, field
from typing import Any

from ullage.manager.states import Cause, State


@dataclass(frozen=True, kw_only=True)
class JobRecord:
    """A job. `spec` is what was asked for (`ullage.manager.submission.Spec` as a dict); unknown is `None`."""

    id: int
    submission: str
    part: int
    user: str
    uid: int
    gid: int
    name: str
    state: State
    submitted: float
    started: float | None = None
    ended: float | None = None
    priority: int = 0
    array_id: int | None = None
    array_index: int | None = None
    spec: dict[str, Any] = field(default_factory=dict, repr=False)
    estimate_key: str | None = None
    estimate_note: str | None = None
    need: int | None = None
    exclusive: bool = False
    recovery: bool = False
    memory_failures: int = 0
    other_failures: int = 0
    stop_reason: str | None = None
    cause: Cause | None = None
    detail: str | None = None
    exit_code: int | None = None
    ran: float = 0.0

    @property
    def label(self) -> str:
        """How people name it: its number, and for a part of an array the array's number and its index.

        >>> JobRecord(id=9, submission="k", part=0, user="a", uid=1, gid=1, name="x", state=State.QUEUED,
        ...           submitted=0.0, array_id=7, array_index=3).label
        '9 (7_3)'
        """
        return str(self.id) if self.array_id is None else f"{self.id} ({self.array_id}_{self.array_index})"


@dataclass(frozen=True, kw_only=True)
class AttemptRecord:
    """One time that a job was placed: where, with what promise, how it ended and why."""

    job: int
    number: int
    token: str
    state: str
    slots: tuple[str, ...]
    promised: int | None
    exclusive: bool
    placed: float
    started: float | None = None
    ended: float | None = None
    elapsed: float | None = None
    cause: Cause | None = None
    detail: str | None = None
    exit_code: int | None = None
    signal: int | None = None
    gpu_memory: int | None = None
    host_memory: int | None = None


STARTING, RUNNING, ENDED = "starting", "running", "over"
JOB_COLUMNS = tuple(found.name for found in dataclasses.fields(JobRecord))
ATTEMPT_COLUMNS = tuple(found.name for found in dataclasses.fields(AttemptRecord))


def job_of(row: sqlite3.Row) -> JobRecord:
    """The job of a row."""
    values = {name: row[name] for name in JOB_COLUMNS}
    values["state"] = State(values["state"])
    values["spec"] = json.loads(values["spec"])
    values["cause"] = values["cause"] and Cause(values["cause"])
    values["exclusive"], values["recovery"] = bool(values["exclusive"]), bool(values["recovery"])
    return JobRecord(**values)


def attempt_of(row: sqlite3.Row) -> AttemptRecord:
    """The attempt of a row."""
    values = {name: row[name] for name in ATTEMPT_COLUMNS}
    values["slots"] = tuple(json.loads(values["slots"]))
    values["cause"] = values["cause"] and Cause(values["cause"])
    values["exclusive"] = bool(values["exclusive"])
    return AttemptRecord(**values)


def stored(value: Any) -> Any:
    """A field as SQLite keeps it.

    >>> stored(("GPU-1", "GPU-2")), stored(State.DONE), stored(None)
    ('["GPU-1", "GPU-2"]', 'done', None)
    """
    if isinstance(value, dict | list | tuple):
        return json.dumps(value)
    return str(value) if isinstance(value, State | Cause) else value
