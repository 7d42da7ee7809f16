"""What a job asks of a slot: its need, or what the site's rule puts in the place of an unknown one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from ullage.placement.rules import Rules
from ullage.placement.snapshot import Job
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
        unknown = "" if self.known else " (its need is unknown)"
        if self.alone:
            idle = "an idle GPU" if self.gpus == 1 else f"{self.gpus} idle GPUs"
            return f"{idle} to itself" + (f" with {format_bytes(self.bytes)}" if self.known else unknown)
        where = "a GPU" if self.gpus == 1 else f"each of {self.gpus} GPUs"
        return f"{format_bytes(self.bytes)} on {where}{unknown}"


@dataclass(frozen=True)
class Asking:
    """How asks are made under a policy: an `oracle` knows true memory, `alone` gives every job slots of its own.

    >>> Asking(Rules(unknown="floor"), oracle=False, alone=False).of(Job(1, "ada", 0.0)).text
    '5.00 GiB on a GPU (its need is unknown)'
    """

    rules: Rules
    oracle: bool
    alone: bool

    def of(self, job: Job) -> Ask:
        """What the job asks for. The floor is a condition and a promise in one, so no margin is added to it."""
        need, rules = job.true if self.oracle else job.need, self.rules
        if self.alone or job.exclusive or (need is None and rules.unknown == "exclusive"):
            return Ask(job.gpus, need or 0, 0, True, need is not None)
        if need is None:
            return Ask(job.gpus, rules.free_floor or 0, 0, False, False)
        return Ask(job.gpus, need, rules.margin, False, True)
