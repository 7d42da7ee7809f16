"""What a decision says: who goes where, and why the others wait."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True)
class Decision:
    """Put the job on these slots and promise it `bytes` on each; `exclusive`: nobody else may join it there.

    >>> Decision(7, ("GPU-1",), 12 << 30, exclusive=False).slots
    ('GPU-1',)
    """

    job: int
    slots: tuple[str, ...]
    bytes: int
    exclusive: bool


class Waiting(NamedTuple):
    """A job that waits; `reason` says what it needed and what the best slot had. `never`: no slot could ever hold it."""

    job: int
    reason: str
    never: bool = False


@dataclass(frozen=True)
class Outcome:
    """All of one pass: `placed` in the order to start them, `waiting` in the order of the queue."""

    placed: tuple[Decision, ...]
    waiting: tuple[Waiting, ...]
