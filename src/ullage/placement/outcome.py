"""What a decision says: who goes where, and why the others wait."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from ullage.placement.rules import Ask, Asking
from ullage.placement.snapshot import Job
from ullage.units import format_bytes


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


class Sight(NamedTuple):
    """What a slot had at the end of a pass; `obstacle` says why it takes no job at all, `kept` for which job it is."""

    gpu: int
    total: int
    free: int
    idle: bool
    obstacle: str | None
    kept: int | None

    def fits(self, ask: Ask) -> bool:
        """Whether its memory would do."""
        if ask.alone:
            return self.idle and self.free >= ask.bytes
        return self.free >= ask.bytes + (0 if self.idle else ask.margin)


@dataclass(frozen=True)
class View:
    """What those who wait are told from: how asks are made, and all slots at the end of the pass."""

    asking: Asking
    sights: tuple[Sight, ...]


class Waiting(NamedTuple):
    """A job that waits. `reason` says what it needs and what the best slot had; `never`: no slot could ever hold it.

    The sentence is made when it is asked for: a queue has thousands of jobs and people read a few. That is also why
    this is a tuple: thousands are made in every pass. `behind` is the job that it has to wait for, if it is one.
    """

    job: int
    asked: Job
    view: View
    behind: int | None = None

    @property
    def ask(self) -> Ask:
        """What the job asks for."""
        return self.view.asking.of(self.asked)

    @property
    def never(self) -> bool:
        """Whether no GPU here could hold the job even if everything else went away."""
        ask = self.ask
        return sum(sight.total >= ask.bytes for sight in self.view.sights) < ask.gpus

    @property
    def reason(self) -> str:
        """One sentence for a person."""
        if self.never:
            return f"needs {self.ask.text}; that can never be: {_largest(self.ask, self.view.sights)}"
        if self.behind == self.job:
            return f"needs {self.ask.text}; its last run still holds memory"
        if self.behind is not None:
            return f"needs {self.ask.text}; job {self.behind} is before it in the queue and must wait"
        return f"needs {self.ask.text}; {_best(self.ask, self.view.sights)}"

    def __repr__(self) -> str:
        return f"Waiting(job={self.job}, reason={self.reason!r})"


@dataclass(frozen=True)
class Outcome:
    """All of one pass: `placed` in the order to start them, `waiting` in the order of the queue.

    >>> Outcome((Decision(7, ("GPU-1",), 0, False),), ()).placed[0].job
    7
    """

    placed: tuple[Decision, ...]
    waiting: tuple[Waiting, ...]


def _largest(ask: Ask, sights: tuple[Sight, ...]) -> str:
    if len(sights) < ask.gpus:
        return f"there are {len(sights)} GPUs"
    enough = sum(sight.total >= ask.bytes for sight in sights)
    return f"{enough or 'no'} GPU has as much, and the largest has {format_bytes(max(sight.total for sight in sights))}"


def _best(ask: Ask, sights: tuple[Sight, ...]) -> str:
    """What the slot had that came nearest."""
    suited = [sight for sight in sights if sight.fits(ask)]
    ready = [sight for sight in suited if sight.obstacle is None and sight.kept is None]
    if len(ready) >= ask.gpus:
        return f"GPU {ready[0].gpu} has room, but the jobs would slow each other down too much"
    found = f"{len(ready)} of the {ask.gpus} GPUs are ready; " if ask.gpus > 1 else ""
    hindered = [sight for sight in suited if sight not in ready]
    if hindered:
        best = max(hindered, key=lambda sight: (sight.obstacle is None, sight.free))
        why = best.obstacle or f"is kept for job {best.kept}, which has waited longer"
        return f"{found}GPU {best.gpu} has {format_bytes(best.free)} free but {why}"
    rest = [sight for sight in sights if sight not in ready]
    best = max(rest, key=lambda sight: (sight.obstacle is None, sight.free))
    most = f"GPU {best.gpu} has the most free, {format_bytes(best.free)}"
    if ask.alone and not best.idle:
        return f"{found}none is idle: {most}"
    if best.obstacle is not None:
        return f"{found}{most}, and {best.obstacle}"
    beside = f", and {format_bytes(ask.margin)} are to stay free" if best.free >= ask.bytes else ""
    return f"{found}{most}{beside}"
