"""What a decision says: who goes where, and why the others wait."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from ullage.units import format_bytes


class Ask(NamedTuple):
    """What a job asks of each of its slots: `bytes` to be promised, `margin` left free beside neighbours, or all of
    it `alone`. `known` is False where the job's need is not known and the site's rule stands in for it."""

    gpus: int
    bytes: int
    margin: int
    alone: bool
    known: bool

    @property
    def text(self) -> str:
        """The ask in words.

        >>> Ask(2, 12 << 30, 2 << 30, alone=False, known=True).text
        '12.0 GiB on each of 2 GPUs'
        """
        where = "a GPU" if self.gpus == 1 else f"each of {self.gpus} GPUs"
        if self.alone:
            idle = "an idle GPU" if self.gpus == 1 else f"{self.gpus} idle GPUs"
            return f"{idle} to itself" + (
                f" with {format_bytes(self.bytes)}" if self.known else " (its need is unknown)"
            )
        return f"{format_bytes(self.bytes)} on {where}" + ("" if self.known else " (its need is unknown)")


class Sight(NamedTuple):
    """What a slot had at the end of a pass; `obstacle` says why it takes no job at all, `kept` for which job it is."""

    gpu: int
    total: int
    free: int
    idle: bool
    obstacle: str | None
    kept: int | None


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
    """A job that waits. `reason` says what it needs and what the best slot had; `never`: no slot could ever hold it.

    The sentence is made when it is asked for: a queue has thousands of jobs and people read a few. That is also why
    this is a tuple.

    >>> sights = (Sight(0, 40 << 30, 8 << 30, False, None, None), Sight(1, 40 << 30, 0, False, None, None))
    >>> Waiting(7, Ask(1, 12 << 30, 0, alone=False, known=True), sights).reason
    'needs 12.0 GiB on a GPU; GPU 0 has the most free, 8.00 GiB'
    """

    job: int
    ask: Ask
    sights: tuple[Sight, ...]
    behind: int | None = None

    @property
    def never(self) -> bool:
        """Whether no GPU here could hold the job even if everything else went away."""
        return sum(sight.total >= self.ask.bytes for sight in self.sights) < self.ask.gpus

    @property
    def reason(self) -> str:
        """One sentence for a person."""
        if self.never:
            return f"needs {self.ask.text}; that can never be: {self._largest()}"
        if self.behind is not None:
            return f"needs {self.ask.text}; job {self.behind} is before it in the queue and must wait"
        return f"needs {self.ask.text}; {self._best()}"

    def __repr__(self) -> str:
        return f"Waiting(job={self.job}, reason={self.reason!r})"

    def _largest(self) -> str:
        if len(self.sights) < self.ask.gpus:
            return f"there are {len(self.sights)} GPUs"
        largest = max(self.sights, key=lambda sight: sight.total)
        return f"the largest GPU has {format_bytes(largest.total)}"

    def _best(self) -> str:
        suited = [sight for sight in self.sights if self._fits(sight)]
        ready = [sight for sight in suited if sight.obstacle is None and sight.kept is None]
        if len(ready) >= self.ask.gpus:
            return f"GPU {ready[0].gpu} has room, but the jobs would slow each other down too much"
        found = f"{len(ready)} of the {self.ask.gpus} GPUs are ready; " if self.ask.gpus > 1 else ""
        hindered = [sight for sight in suited if sight not in ready]
        if hindered:
            best = max(hindered, key=lambda sight: (sight.obstacle is None, sight.free))
            why = best.obstacle or f"is kept for job {best.kept}, which has waited longer"
            return f"{found}GPU {best.gpu} has {format_bytes(best.free)} free but {why}"
        rest = [sight for sight in self.sights if sight not in ready]
        best = max(rest, key=lambda sight: (sight.obstacle is None, sight.free))
        most = f"GPU {best.gpu} has the most free, {format_bytes(best.free)}"
        if self.ask.alone and not best.idle:
            return f"{found}none is idle: {most}"
        if best.obstacle is not None:
            return f"{found}{most}, and {best.obstacle}"
        beside = f", and {format_bytes(self.ask.margin)} are to stay free" if best.free >= self.ask.bytes else ""
        return f"{found}{most}{beside}"

    def _fits(self, sight: Sight) -> bool:
        if self.ask.alone:
            return sight.idle and sight.free >= self.ask.bytes
        return sight.free >= self.ask.bytes + (0 if sight.idle else self.ask.margin)


@dataclass(frozen=True)
class Outcome:
    """All of one pass: `placed` in the order to start them, `waiting` in the order of the queue.

    >>> Outcome((Decision(7, ("GPU-1",), 0, False),), ()).placed[0].job
    7
    """

    placed: tuple[Decision, ...]
    waiting: tuple[Waiting, ...]
