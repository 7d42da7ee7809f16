"""The records of jobs and attempts in the database, the states of jobs, and the causes of ends.

    submit ─► queued ─► starting ─► running ─► done
               │ ▲  ▲        │           │ ├───► failed
               │ │  └─retry──┴───────────┤ └───► cancelled
            hold release                 ▼
               ▼ │                    stopping ─► cancelled, failed, or queued again
               held

A finished job can be queued again (requeue).

Only the named transitions in the table `TRANSITIONS` can happen. Records are immutable.
"""

import dataclasses
import json
import sqlite3
import zlib
from collections.abc import Callable
from dataclasses import MISSING, dataclass, field
from enum import StrEnum
from types import NoneType, UnionType
from typing import Any, NamedTuple, get_args

from ullage.errors import DamagedRecord, InvalidValue
from ullage.manager.placement import by_slot
from ullage.units import format_moment


class State(StrEnum):
    """The state of a job."""

    QUEUED = "queued"
    HELD = "held"
    STARTING = "starting"
    RUNNING = "running"
    STOPPING = "stopping"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def is_over(self) -> bool:
        """Whether the job has finished."""
        return self in OVER

    @property
    def is_live(self) -> bool:
        """Whether a process of the job may be alive."""
        return self in LIVE


OVER = frozenset({State.DONE, State.FAILED, State.CANCELLED})
LIVE = frozenset({State.STARTING, State.RUNNING, State.STOPPING})
WAITING = frozenset({State.QUEUED, State.HELD})


class Cause(StrEnum):
    """The cause of an attempt's end; docs/how-to/run-jobs.md lists the evidence for each."""

    FINISHED = "finished"
    OWN_FAILURE = "failed by itself"
    GPU_MEMORY = "out of GPU memory"
    HOST_MEMORY = "out of host memory"
    KILLED = "killed"
    TIME_LIMIT = "time limit"
    SLOT_ENDED = "time slot ended"
    CANCELLED = "cancelled"
    REQUEUED = "requeued"
    OVER_PROMISE = "took more than promised"
    MPS_LOST = "MPS server lost"
    GPU_LOST = "GPU lost"
    NOT_STARTED = "not started"
    SUPERVISOR_LOST = "watching process lost"
    HOST_RESTARTED = "host restarted"


# Not the program's fault; retried with the same promise.
INFRASTRUCTURE = frozenset(
    {Cause.MPS_LOST, Cause.GPU_LOST, Cause.NOT_STARTED, Cause.SUPERVISOR_LOST, Cause.HOST_RESTARTED, Cause.KILLED}
)
MEMORY = frozenset({Cause.GPU_MEMORY, Cause.HOST_MEMORY, Cause.OVER_PROMISE})

TRANSITIONS: dict[str, tuple[frozenset[State], frozenset[State]]] = {
    "hold": (frozenset({State.QUEUED}), frozenset({State.HELD})),
    "release": (frozenset({State.HELD}), frozenset({State.QUEUED})),
    "place": (frozenset({State.QUEUED}), frozenset({State.STARTING})),
    "run": (frozenset({State.STARTING}), frozenset({State.RUNNING})),
    "stop": (frozenset({State.STARTING, State.RUNNING, State.STOPPING}), frozenset({State.STOPPING})),
    "end": (LIVE, OVER),
    "retry": (LIVE, frozenset({State.QUEUED, State.HELD})),
    "withdraw": (WAITING, frozenset({State.CANCELLED})),
    "edit": (WAITING, WAITING),
    "requeue": (OVER, WAITING),
}


def check_transition(name: str, before: State, after: State) -> None:
    """Refuse a transition that is not in the table.

    >>> check_transition("place", State.DONE, State.STARTING)
    Traceback (most recent call last):
    ullage.errors.InvalidValue: cannot place: the job must be queued, but it is done
    """
    sources, targets = TRANSITIONS[name]
    if before not in sources or after not in targets:
        needed = " or ".join(sorted(sources))
        raise InvalidValue(f"cannot {name}: the job must be {needed}, but it is {before}")


class Need(NamedTuple):
    """A job to wait for, or the `whole` array of that number: until it is done (`ok`) or over (`any`)."""

    job: int
    whole: bool
    kind: str

    def text(self, name: Callable[[int], str]) -> str:
        """Return the dependency for a sentence; `name` names a job by its number."""
        return f"array {self.job}" if self.whole else f"job {name(self.job)}"

    def reference(self, name: Callable[[int], str]) -> str:
        """Return the dependency as a submitter writes it."""
        return f"{'any:' if self.kind == 'any' else ''}{f'{self.job}_all' if self.whole else name(self.job)}"


@dataclass(frozen=True, kw_only=True)
class JobRecord:
    """A job; unknown is `None`. `spec` is the request, shared by an array; `request` is the job's own. `work` is its
    workload's id, `breakdown` (JSON) the parts of its estimate in bytes. If ranks differ, `promises` has the promise of
    each, and `promise` the largest; `estimate_note` names its source. While an estimate is pending, `estimate_key` is
    set."""

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
    spec_id: int | None = None
    spec: dict[str, Any] = field(default_factory=dict, repr=False)
    estimate_key: str | None = None
    estimate_note: str | None = None
    breakdown: str | None = None
    work: str | None = None
    promise: int | None = None
    promises: tuple[int, ...] = ()
    exclusive: bool = False
    recovery: bool = False
    memory_failures: int = 0
    other_failures: int = 0
    own_failures: int = 0
    crashes: int = 0
    stop_reason: str | None = None
    cause: Cause | None = None
    detail: str | None = None
    exit_code: int | None = None
    ran: float = 0.0

    def option(self, name: str) -> Any:
        """Return an option of its submission by the name in `JobSpec`; `None` if an earlier Ullage did not know it."""
        return self.spec.get("asked", {}).get(name)

    @property
    def request(self) -> dict[str, Any]:
        """Return the request, as `JobSpec` accepts it, with the job's array index for `{index}` in the command."""
        values: dict[str, Any] = self.spec["asked"]
        if self.array_index is None:
            return values
        return {**values, "command": [word.replace("{index}", str(self.array_index)) for word in values["command"]]}

    def with_changes(self, changes: dict[str, Any]) -> "JobRecord":
        """Return the job with other values, like `dataclasses.replace`, but fast enough for ten thousand jobs."""
        return new_job({**self.__dict__, **changes})

    @property
    def reference(self) -> str:
        """Return the reference to the job: its number, or the array's number and its index."""
        return str(self.id) if self.array_id is None else f"{self.array_id}_{self.array_index}"


_DEFAULTS = {column.name: column.default for column in dataclasses.fields(JobRecord) if column.default is not MISSING}


def new_job(values: dict[str, Any]) -> JobRecord:
    """Return a job with these values, without the cost of a frozen dataclass's `__init__`, for large arrays."""
    job = object.__new__(JobRecord)
    job.__dict__.update(_DEFAULTS)
    job.__dict__.update(values)
    return job


@dataclass(frozen=True, kw_only=True)
class AttemptRecord:
    """One placement of a job. If ranks differ, `promises` has the promise on each of its slots."""

    job: int
    number: int
    token: str
    state: str
    slots: tuple[str, ...]
    promise: int | None
    exclusive: bool
    placed: float
    started: float | None = None
    ended: float | None = None
    elapsed: float | None = None
    cause: Cause | None = None
    detail: str | None = None
    exit_code: int | None = None
    signal: int | None = None
    used: int | None = None
    host_memory: int | None = None
    cores: int = 0
    host_promise: int = 0
    gpu_part: float | None = None
    waited: float | None = None
    energy: float | None = None
    promises: tuple[int, ...] = ()

    @property
    def memory(self) -> dict[str, int]:
        """Return the promise by slot; 0 if unknown."""
        return by_slot(self.slots, self.promise, self.promises)


@dataclass(frozen=True, kw_only=True)
class WorkRecord:
    """A workload: its predicted activity by GPU as plain values, and when it was last stored."""

    id: str
    predicted: dict[str, dict[str, Any]]
    changed: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Drain:
    """A time from `begin` until `until` (`None`: until resumed) in which a GPU gets only jobs of some users and
    groups."""

    id: int
    gpu: str
    begin: float
    until: float | None
    users: tuple[str, ...]
    groups: tuple[str, ...]
    reason: str

    @property
    def text(self) -> str:
        who = " and ".join((*self.users, *(f"group {name}" for name in self.groups)))
        until = "" if self.until is None else f" until {format_moment(self.until)}"
        reason = f" ({self.reason})" if self.reason else ""
        return f"is drained{f' for all but {who}' if who else ''} from {format_moment(self.begin)}{until}{reason}"

    @property
    def is_plain(self) -> bool:
        """Whether the drain has no exceptions and no end."""
        return self.until is None and not self.users and not self.groups

    def closes(self, now: float) -> bool:
        """Whether the drain keeps all new jobs off the GPU now."""
        return self.is_plain and self.begin <= now


@dataclass(frozen=True, kw_only=True)
class Notification:
    """A pending notification of a job's end: its kind (hook or command), its target, and the facts."""

    id: int
    job: int
    uid: int
    gid: int
    kind: str
    target: dict[str, Any]
    facts: dict[str, Any]


STARTING, RUNNING, ENDED = "starting", "running", "over"
JOB_COLUMNS = tuple(column.name for column in dataclasses.fields(JobRecord) if column.name != "spec")
ATTEMPT_COLUMNS = tuple(column.name for column in dataclasses.fields(AttemptRecord))


_KINDS: dict[Any, tuple[type, ...]] = {int: (int,), float: (int, float), bool: (int,), NoneType: (NoneType,)}


def _types(record: type) -> dict[str, tuple[type, ...]]:
    """Return the types that SQLite may return, by column; fields that are stored in another form are text."""
    types = {}
    for each in dataclasses.fields(record):
        kinds = get_args(each.type) if isinstance(each.type, UnionType) else [each.type]
        types[each.name] = tuple(one for kind in kinds for one in _KINDS.get(kind, (str,)))
    return types


_JOB_TYPES, _ATTEMPT_TYPES = _types(JobRecord), _types(AttemptRecord)
_JOB_TYPES.pop("spec")


def spec_from_text(text: str) -> dict[str, Any]:
    """Parse a request as the table `specs` stores it; raise `ValueError` for anything else."""
    spec: dict[str, Any] = _object(text, "spec", dict)
    if not isinstance(spec.get("asked"), dict):
        raise ValueError("spec does not say what was asked for")
    return spec


def job_from_row(row: sqlite3.Row, spec: dict[str, Any] | ValueError) -> JobRecord:
    """Return the job of a row of `jobs`; raise `DamagedRecord` for an invalid one. `spec` is that of its `spec_id`."""
    try:
        values = _values(row, _JOB_TYPES)
        if isinstance(spec, ValueError):
            raise spec
        values["spec"], values["state"] = spec, State(values["state"])
        values["promises"] = _promises(values, spec.get("gpus"))
        values["cause"] = values["cause"] and Cause(values["cause"])
    except ValueError as error:
        raise DamagedRecord(row["id"], str(error)) from None
    values["exclusive"], values["recovery"] = bool(values["exclusive"]), bool(values["recovery"])
    return new_job(values)


def attempt_from_row(row: sqlite3.Row) -> AttemptRecord:
    """Return the attempt of a row; raise the `DamagedRecord` of its job for an invalid one."""
    try:
        values = _values(row, _ATTEMPT_TYPES)
        values["slots"] = tuple(_object(values["slots"], "slots", list))
        values["promises"] = _promises(values, len(values["slots"]))
        values["cause"] = values["cause"] and Cause(values["cause"])
    except ValueError as error:
        raise DamagedRecord(row["job"], f"its attempt {row['number']}: {error}") from None
    values["exclusive"] = bool(values["exclusive"])
    return AttemptRecord(**values)


def work_from_row(row: sqlite3.Row) -> WorkRecord:
    """Return the workload of a row of `works`, without a prediction if the row is unreadable."""
    try:
        predicted = _object(row["predicted"], "predicted", dict)
    except ValueError:
        predicted = {}
    return WorkRecord(id=row["id"], changed=row["changed"], predicted=predicted)


def _values(row: sqlite3.Row, types: dict[str, tuple[type, ...]]) -> dict[str, Any]:
    values = {}
    for name, kinds in types.items():
        values[name] = value = row[name]
        if not isinstance(value, kinds):
            raise ValueError(f"{name} is {'missing' if value is None else f'of the type {type(value).__name__}'}")
    return values


def _promises(values: dict[str, Any], gpus: Any) -> tuple[int, ...]:
    if values["promises"] == "[]":
        return ()
    promises = _object(values["promises"], "promises", list)
    if len(promises) != gpus or not all(type(each) is int and each >= 0 for each in promises):
        raise ValueError(f"promises are not bytes on {gpus} GPUs")
    return tuple(promises)


def _object(text: str, name: str, kind: type) -> Any:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        raise ValueError(f"{name} is not JSON") from None
    if not isinstance(value, kind):
        raise ValueError(f"{name} is not a {kind.__name__}")
    return value


def stored(value: Any) -> Any:
    if isinstance(value, dict | list | tuple):
        return json.dumps(value)
    return str(value) if isinstance(value, State | Cause) else value


def packed(value: dict[str, Any]) -> bytes:
    return zlib.compress(json.dumps(value).encode())


def unpacked(blob: bytes) -> dict[str, Any]:
    return dict(json.loads(zlib.decompress(blob)))
