"""What a job can be, how it gets from one state to the next, and why an attempt ended.

    submit ─► estimating ─► queued ─► starting ─► running ─► done
                 │  ▲         │ ▲        │           │ ├───► failed
               hold release   │ └─retry──┴───────────┤ └───► cancelled
                 ▼  │         │                      ▼
                 held ◄───────┘                   stopping ─► cancelled, failed, or queued again

A transition has a name and is in the table below, or it does not happen.
"""

from __future__ import annotations

from enum import StrEnum

from ullage.errors import InvalidValue


class State(StrEnum):
    """The state of a job."""

    ESTIMATING = "estimating"
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
        """Nothing will happen to the job any more.

        >>> State.DONE.is_over, State.HELD.is_over
        (True, False)
        """
        return self in OVER

    @property
    def is_live(self) -> bool:
        """A process of the job may be alive.

        >>> State.STARTING.is_live
        True
        """
        return self in LIVE


OVER = frozenset({State.DONE, State.FAILED, State.CANCELLED})
LIVE = frozenset({State.STARTING, State.RUNNING, State.STOPPING})
WAITING = frozenset({State.ESTIMATING, State.QUEUED, State.HELD})


class Cause(StrEnum):
    """Why an attempt ended, by evidence; docs/manager.md says by which."""

    FINISHED = "finished"
    OWN_FAILURE = "failed by itself"
    GPU_MEMORY = "out of GPU memory"
    HOST_MEMORY = "out of host memory"
    KILLED = "killed"
    TIME_LIMIT = "time limit"
    SLOT_ENDED = "time slot ended"
    CANCELLED = "cancelled"
    OVER_PROMISE = "took more than promised"
    MPS_LOST = "MPS server lost"
    GPU_LOST = "GPU lost"
    NOT_STARTED = "not started"
    SUPERVISOR_LOST = "watching process lost"
    HOST_RESTARTED = "host restarted"


# Nothing the program itself did; tried again without a larger promise.
INFRASTRUCTURE = frozenset(
    {Cause.MPS_LOST, Cause.GPU_LOST, Cause.NOT_STARTED, Cause.SUPERVISOR_LOST, Cause.HOST_RESTARTED, Cause.KILLED}
)
MEMORY = frozenset({Cause.GPU_MEMORY, Cause.HOST_MEMORY, Cause.OVER_PROMISE})

TRANSITIONS: dict[str, tuple[frozenset[State], frozenset[State]]] = {
    "estimated": (frozenset({State.ESTIMATING}), frozenset({State.QUEUED})),
    "hold": (frozenset({State.ESTIMATING, State.QUEUED}), frozenset({State.HELD})),
    "release": (frozenset({State.HELD}), frozenset({State.ESTIMATING, State.QUEUED})),
    "place": (frozenset({State.QUEUED}), frozenset({State.STARTING})),
    "run": (frozenset({State.STARTING}), frozenset({State.RUNNING})),
    "stop": (frozenset({State.STARTING, State.RUNNING, State.STOPPING}), frozenset({State.STOPPING})),
    "end": (LIVE, OVER),
    "retry": (LIVE, frozenset({State.QUEUED, State.HELD})),
    "withdraw": (WAITING, frozenset({State.CANCELLED})),
}


def check_transition(name: str, before: State, after: State) -> None:
    """Refuse what is not in the table.

    >>> check_transition("place", State.QUEUED, State.STARTING)
    >>> check_transition("place", State.DONE, State.STARTING)
    Traceback (most recent call last):
    ...
    ullage.errors.InvalidValue: cannot place: needed a job that is queued; found one that is done
    """
    sources, targets = TRANSITIONS[name]
    if before not in sources or after not in targets:
        needed = " or ".join(sorted(sources))
        raise InvalidValue(f"cannot {name}: needed a job that is {needed}; found one that is {before}")
