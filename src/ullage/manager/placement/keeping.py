"""When slots are kept for a job that finds no room.

To keep a slot costs: nobody else joins there until those who are there have ended. So a job lets others pass for as
long as that would take, and keeps slots then. It waits at most about twice as long as if it had kept them at once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from ullage.manager.placement.candidates import Candidate
from ullage.manager.placement.fairness import came, waited
from ullage.manager.placement.rules import Rules, SlotRequest
from ullage.manager.placement.snapshot import Job

_SAMPLE = 64  # slots that are asked how long they take to come free


def time_to_come_free(slots: Sequence[Candidate], request: SlotRequest, rules: Rules, now: float) -> float:
    """How long it takes until all who are on a slot have ended, on half of those that could hold the job.

    Nobody knows when jobs end. But it is known since when they are there, and seen over some time both are alike: read
    backwards, the time since the oldest came is the time until the last one goes.
    """
    sample = slots[:: -(-len(slots) // _SAMPLE) or 1]
    ages = sorted(
        max([now - since for _, since, _ in each.holders if since < math.inf], default=0.0)
        for each in sample
        if each.offer(request, rules) >= request.least
    )
    return ages[(len(ages) - 1) // 2] if ages else 0.0


class Patient(NamedTuple):
    """A job that found no room, and for how long it lets others pass."""

    job: Job
    request: SlotRequest
    patience: float

    def is_passed(self, other: Job, now: float) -> bool:
        """Whether it has come to the end of its patience with another job, whose turn is after its own.

        Its owner's jobs of the same priority may pass if they came soon enough after it, however long it has waited.
        """
        job = self.job
        if (other.user, other.priority, other.recovery) == (job.user, job.priority, job.recovery):
            return came(other) > came(job) + self.patience
        return waited(job, now) >= self.patience


def patience_of(request: SlotRequest, slots: Sequence[Candidate], rules: Rules, grows: bool, now: float) -> float:
    """For how long a job lets others pass that finds no room now."""
    if not grows or rules.longest_patience <= rules.patience:
        return rules.patience
    return max(rules.patience, min(time_to_come_free(slots, request, rules, now), rules.longest_patience))
