"""Who may join a slot that is kept for a job: one beside whom that job fits as well, so that it waits for nobody more.

A job that waits for a slot waits for those who were there when it began to keep it. Who came later is a guest. A guest
is let in only if the job for whom the slot is kept fits beside him and all other guests, in memory and by predicted
speeds: it starts as soon as those before them have ended, whenever the guests end.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from ullage.manager.placement.candidates import Candidate
from ullage.manager.placement.rules import Rules, SlotRequest
from ullage.manager.placement.snapshot import Job


class Kept(NamedTuple):
    """A slot that is kept for a job, what that asks for, and since when it is kept."""

    candidate: Candidate
    job: Job
    request: SlotRequest
    since: float

    def room(self, rules: Rules) -> int:
        """The most that a guest can ask for; -1 where none is let in."""
        candidate, request = self.candidate, self.request
        if rules.predict is None or request.alone or candidate.obstacle is not None or candidate.kept_until < math.inf:
            return -1  # where it is known when the slot is ready, those who end before it go there
        guests, most = self._guests(), rules.max_jobs_per_gpu
        if any(job is None for job, _ in guests) or most is not None and len(guests) + 2 > most:
            return -1
        return candidate.capacity - sum(memory for _, memory in guests) - request.promise - request.margin

    def welcomes(self, job: Job, request: SlotRequest, rules: Rules) -> bool:
        """Whether the job may be a guest."""
        return request.promise <= self.room(rules) and self._suits(rules, job)

    def given_back(self, rules: Rules) -> int:
        """What guests hold: the job need not wait for it."""
        guests = self._guests()
        return sum(memory for _, memory in guests) if guests and self.room(rules) >= 0 and self._suits(rules) else 0

    def _guests(self) -> list[tuple[Job | None, int]]:
        return [(job, memory) for job, since, memory in self.candidate.holders if since >= self.since]

    def _suits(self, rules: Rules, *more: Job) -> bool:
        guests = [*(job for job, _ in self._guests() if job is not None), *more]
        slot = self.candidate.slot
        if any(rules.side_by_side([each, self.job], slot).slowed for each in guests):
            return False
        together = rules.joining(guests, self.job, slot)
        return together.slowed is None and together.pays and together.foretold


class Guests:
    """The slots that are kept in one pass, and which guests they take. They only get fuller in it."""

    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        self._kept: list[Kept] = []
        self._refused: dict[object, int] = {}  # by kind of job, the smallest that was no guest anywhere
        self.room = -1  # the most that one can ask for

    def keep(self, kept: Kept) -> None:
        """A slot is kept from now on."""
        self._kept.append(kept)
        self.count()

    def count(self) -> None:
        """A guest has come, or there is another slot."""
        self.room = max([each.room(self._rules) for each in self._kept], default=-1)

    def may_take(self, gpus: int, alone: bool, promise: int, kind: object) -> bool:
        """A quick answer: whether it is worth to ask for a job of this kind."""
        return gpus == 1 and not alone and promise <= self.room and promise < self._refused.get(kind, math.inf)

    def refuse(self, promise: int, kind: object) -> None:
        """No slot took such a job."""
        self._refused[kind] = promise

    def slots_for(self, job: Job, request: SlotRequest) -> Sequence[Candidate]:
        """The slots where the job would be welcome."""
        return [each.candidate for each in self._kept if each.welcomes(job, request, self._rules)]
