"""The host during one pass: what is left of its cores and memory as jobs are put there, and for whom some is kept."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from ullage.manager.placement.ledger import Ledger, sum_shares
from ullage.manager.placement.outcome import HostSummary
from ullage.manager.placement.snapshot import NO_SHARE, HostShare, Job, Running


@dataclass
class HostInPass:
    """What jobs may have of the host in all (None: it is not counted), what is free, and who gives back what when.

    `kept` are shares of jobs that have waited too long, each with the time from which it is needed at the latest.
    What is kept is left alone by jobs that may still run then, so that it comes free as others end.
    """

    total: HostShare | None
    free: HostShare
    leaving: list[tuple[float, HostShare]]
    now: float
    kept: list[tuple[float, HostShare]] = field(default_factory=list)
    keeper: int | None = None

    @classmethod
    def of(cls, ledger: Ledger, running: Iterable[Running], now: float) -> HostInPass:
        """The host as a pass finds it."""
        if ledger.host is None:
            return cls(None, NO_SHARE, [], now)
        ends = {each.job.id: each.job.ends_by(each.since, now) for each in running}
        held = ledger.on_host()
        leaving = [(ends.get(job, math.inf), share) for job, share in held.items() if share != NO_SHARE]
        # Below zero where more is held than there is: a setting was lowered, and all of that must come back first.
        return cls(ledger.host, ledger.host.minus(sum_shares(held.values())), leaving, now)

    def fits(self, job: Job) -> bool:
        """Whether its share is free and not kept for another at a time when it may still run."""
        if self.total is None or job.host == NO_SHARE:
            return True
        end = job.ends_by(self.now, self.now)
        kept = sum_shares(share for until, share in self.kept if not end <= until < math.inf)
        return self.free.minus(kept).holds(job.host)

    def could_ever(self, job: Job) -> bool:
        """Whether its share could be had once all others are gone."""
        return self.total is None or self.total.holds(job.host)

    def take(self, job: Job) -> None:
        """Give the job its share."""
        if self.total is not None and job.host != NO_SHARE:
            self.free = self.free.minus(job.host)
            self.leaving.append((job.ends_by(self.now, self.now), job.host))

    def keep(self, job: Job, until: float) -> None:
        """Keep the job's share for it, from that time on at the latest."""
        if self.total is not None and job.host != NO_SHARE:
            self.kept.append((until, job.host))
            self.keeper = self.keeper or job.id

    def ready_at(self, job: Job) -> float:
        """When its share is free at the latest, by the time limits of those who hold some."""
        if self.total is None:
            return self.now
        free, when = self.free, self.now
        for end, given_back in sorted(self.leaving):
            if free.holds(job.host):
                return when
            free, when = free.plus(given_back), end
        return when if free.holds(job.host) else math.inf

    def summary(self) -> HostSummary | None:
        """What to tell those who wait."""
        if self.total is None:
            return None
        return HostSummary(self.total, self.free, sum_shares(share for _, share in self.kept), self.keeper)
