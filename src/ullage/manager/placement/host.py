"""The host during a pass: the cores and memory left as jobs are placed, and the share kept for one of them."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

from ullage.manager.placement.ledger import Ledger, sum_shares
from ullage.manager.placement.snapshot import NO_SHARE, HostShare, Job, Running


class HostLeft(NamedTuple):
    """The `total` of the host that jobs may have (None: it is not counted), the part that is `free`, and the shares
    given back by jobs that are `leaving`, with the times. `kept` is the share of job `keeper`, which has waited too
    long and needs it at `kept_until` at the latest.

    Jobs that may still run then leave it alone, so that it comes free as others end.
    """

    total: HostShare | None = None
    free: HostShare = NO_SHARE
    leaving: tuple[tuple[float, HostShare], ...] = ()
    kept: HostShare = NO_SHARE
    kept_until: float = math.inf
    keeper: int | None = None

    @classmethod
    def of(cls, ledger: Ledger, running: Iterable[Running], now: float) -> HostLeft:
        """The host as a pass starts with it."""
        if ledger.host is None:
            return cls()
        ends = {each.job.id: each.job.ends_by(each.since, now) for each in running}
        held = ledger.on_host()
        leaving = tuple((ends.get(job, math.inf), share) for job, share in held.items() if share != NO_SHARE)
        # Below zero if more is held than there is: a setting was lowered, and all of that must come back first.
        return cls(ledger.host, ledger.host.minus(sum_shares(held.values())), leaving)

    def fits(self, job: Job, now: float) -> bool:
        """Whether the job's share is free and not kept for another one at a time when it may still run."""
        if self.total is None or job.host == NO_SHARE:
            return True
        lent = job.ends_by(now, now) <= self.kept_until < math.inf
        return self.free.minus(NO_SHARE if lent else self.kept).holds(job.host)

    def could_ever(self, job: Job) -> bool:
        """Whether the job's share would be free if all others were gone."""
        return self.total is None or self.total.holds(job.host)

    def taken(self, job: Job, now: float) -> HostLeft:
        """Return the host with the job's share given away."""
        if self.total is None or job.host == NO_SHARE:
            return self
        leaving = (*self.leaving, (job.ends_by(now, now), job.host))
        return self._replace(free=self.free.minus(job.host), leaving=leaving)

    def keeping(self, job: Job, until: float) -> HostLeft:
        """Return the host with the job's share kept for it, from that time on at the latest."""
        if self.total is None or job.host == NO_SHARE:
            return self
        return self._replace(kept=job.host, kept_until=until, keeper=job.id)

    def ready_at(self, job: Job, now: float) -> float:
        """When the job's share is free at the latest, by the time limits of those who hold some."""
        free, when = self.free, now
        for end, share in sorted(self.leaving):
            if free.holds(job.host):
                return when
            free, when = free.plus(share), end
        return when if self.total is None or free.holds(job.host) else math.inf
