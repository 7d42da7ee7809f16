"""One pass over the queue."""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Mapping, Sequence

from ullage.placement.fairness import fair_order, waited
from ullage.placement.ledger import Ledger
from ullage.placement.outcome import Ask, Decision, Outcome, Waiting
from ullage.placement.places import Place, places
from ullage.placement.policies import Policy, find_policy
from ullage.placement.rules import Rules
from ullage.placement.snapshot import Job, Running, Slot


def decide(
    policy: str,
    waiting: Sequence[Job],
    running: Sequence[Running],
    slots: Sequence[Slot],
    ledger: Ledger,
    rules: Rules,
    now: float,
    usage: Mapping[str, float] | None = None,
) -> Outcome:
    """Who goes where now. Changes nothing: write each `Decision` down with `ledger.accept(decision)`.

    `usage` is what each user used of late, in GPU-seconds, for the fair order. `slots` is the newest snapshot, which
    also counts for the ledger. A running job that the ledger does not know is counted with its need.

    >>> from ullage.placement import Activity
    >>> slot = Slot("GPU-1", 0, "A100-40GB", total=40 << 30, used=0, activity=Activity(smact=0.1))
    >>> jobs = [Job(1, "ada", 0.0, need=30 << 30), Job(2, "ada", 1.0, need=30 << 30)]
    >>> outcome = decide("ullage", jobs, [], [slot], Ledger(), Rules(), now=2.0)
    >>> outcome.placed
    (Decision(job=1, slots=('GPU-1',), bytes=32212254720, exclusive=False),)
    >>> outcome.waiting
    (Waiting(job=2, reason='needs 30.0 GiB on a GPU; GPU 0 has the most free, 10.0 GiB'),)
    """
    chosen = find_policy(policy)
    book = ledger.copy()
    book.see(slots)
    known = book.jobs()
    for each in running:
        if each.job.id not in known:
            book.adopt(each.job.id, dict.fromkeys(each.slots, each.job.need or 0), each.job.exclusive)
    seen = places(slots, book, running, rules, now)
    last = next((place.position for place in seen if place.slot.id == ledger.last), -1)
    return _Pass(chosen, rules, seen, last, now).over(fair_order(waiting, rules, now, usage))


class _Pass:
    """The state of one pass. Places only get fuller in it, so what failed once fails again."""

    def __init__(self, policy: Policy, rules: Rules, seen: list[Place], last: int, now: float) -> None:
        self.policy, self.rules, self.seen, self.last, self.now = policy, rules, seen, last, now
        self.backfills = policy.backfills if rules.backfill is None else rules.backfill
        self.open = sorted((place for place in seen if place.obstacle is None), key=self.rank)
        self.short_only: list[Place] = []  # kept for a job, but until a known time: open to jobs that end before it
        self.failed: dict[tuple[int, bool, bool], int] = {}  # the smallest ask of this kind that found no place
        self.reservations = rules.reservations
        self.predict = rules.slowdown if policy.predicts else None
        self.offers: dict[tuple[int, bool], list[int]] = {}

    def rank(self, place: Place) -> tuple[object, ...]:
        return self.policy.rank(place, self.last)

    def over(self, queue: Sequence[Job]) -> Outcome:
        """Give each job its turn."""
        placed: list[Decision] = []
        left: list[tuple[int, Ask, int | None]] = []
        behind: int | None = None
        for job in queue:
            ask = self.ask(job)
            decision = None if behind is not None else self.place(job, ask)
            if decision is not None:
                placed.append(decision)
                continue
            left.append((job.id, ask, behind))
            if behind is None and self._could_ever(ask):
                if not self.backfills and not job.recovery:
                    behind = job.id
                elif self.reservations and waited(job, self.now) >= self.rules.patience:
                    self.reserve(job, ask)
        sights = tuple(place.sight(self.rules) for place in self.seen)
        return Outcome(tuple(placed), tuple([Waiting(number, ask, sights, ahead) for number, ask, ahead in left]))

    def ask(self, job: Job) -> Ask:
        """What the job needs under this policy and these rules."""
        need = job.true if self.policy.oracle else job.need
        rules = self.rules
        if self.policy.alone or job.exclusive or (need is None and rules.unknown == "exclusive"):
            return Ask(job.gpus, need or 0, 0, True, need is not None)
        if need is None:
            return Ask(job.gpus, rules.free_floor or 0, 0, False, False)
        return Ask(job.gpus, need, rules.margin, False, True)

    def place(self, job: Job, ask: Ask) -> Decision | None:
        """Put the job on the best places that suit it, on as many as it asks for, or nowhere."""
        kind = (ask.gpus, ask.alone, ask.known)
        lent = self._lent(job) if self.short_only else []
        if not lent and (len(self.open) < ask.gpus or ask.bytes >= self.failed.get(kind, math.inf)):
            return None
        pool = sorted(self.open + lent, key=self.rank) if lent else self.open
        suited = self._suited(job, ask, pool)
        if len(suited) < ask.gpus:
            if self.predict is None and not lent:
                self.failed[kind] = ask.bytes
            return None
        chosen = suited[: ask.gpus]
        promise = min(place.free for place in chosen) if ask.alone else ask.bytes
        for place in chosen:
            self._take(place, job, promise, ask.alone)
        return Decision(job.id, tuple(place.slot.id for place in chosen), promise, ask.alone)

    def reserve(self, job: Job, ask: Ask) -> None:
        """Keep places for a job that has waited too long: nobody joins there, so they come free as jobs end.

        Those are kept that are ready soonest by time limits, then those with the least missing. A place that is kept
        only gets freer, so the choice cannot wander for ever. Where the time is known, jobs that end before it may
        still go there.
        """
        able = [place for place in self.seen if place.kept is None and place.offer(ask, self.rules) >= ask.bytes]
        if len(able) < ask.gpus:
            self.reservations = 0  # those before it hold the places; later jobs must not overtake it by reserving
            return
        times = {place.slot.id: place.ready_at(ask, self.rules, self.now) for place in able}
        held = {place.slot.id: place.capacity - place.free if ask.alone else -place.free for place in able}
        able.sort(key=lambda place: (times[place.slot.id], held[place.slot.id], place.count, place.position))
        kept = able[: ask.gpus]
        until = max(times[place.slot.id] for place in kept)
        for place in kept:
            place.kept, place.kept_until = job.id, until
            if place in self.open:
                self.open.remove(place)
                if until < math.inf:
                    self.short_only.append(place)
        self.reservations -= 1

    def _suited(self, job: Job, ask: Ask, pool: list[Place]) -> list[Place]:
        """Places of the pool that suit the job, best first; no more than needed where the order is the pool's."""
        suited: list[Place] = []
        slow: dict[int, float] = {}  # by position
        for place in pool:
            if not place.fits(ask, self.rules):
                continue
            if self.predict is None:
                suited.append(place)
                if len(suited) == ask.gpus:
                    break
            elif (slowdown := self._slowdown(job, place)) <= self.rules.slowdown_limit:
                suited.append(place)
                slow[place.position] = slowdown
        if self.predict is not None:
            suited.sort(key=lambda place: slow[place.position])
        return suited

    def _slowdown(self, job: Job, place: Place) -> float:
        """The predicted slowdown; an unknown one is taken for the worst that is allowed, never for none."""
        if place.count == 0 or self.predict is None:
            return 1.0
        everyone_known = len(place.jobs) == place.count
        found = self.predict(job, tuple(place.jobs), place.slot) if everyone_known else None
        return self.rules.slowdown_limit if found is None else found

    def _take(self, place: Place, job: Job, promise: int, alone: bool) -> None:
        pool = self.open if place.kept is None else self.short_only
        pool.remove(place)
        place.take(job, promise, alone, self.rules, self.now)
        self.last = place.position
        if place.obstacle is None:
            if place.kept is None:
                insort(pool, place, key=self.rank)
            else:
                pool.append(place)
        if self.policy.cyclic:
            self.open.sort(key=self.rank)

    def _lent(self, job: Job) -> list[Place]:
        """Kept places that the job may use, because it ends before they are needed."""
        if job.time_limit is None:
            return []
        end = self.now + job.time_limit
        return [place for place in self.short_only if end <= place.kept_until]

    def _could_ever(self, ask: Ask) -> bool:
        """Whether waiting for our own jobs helps; a job that nothing here can hold must not hold up the others."""
        offers = self.offers.get((ask.margin, ask.alone))
        if offers is None:
            offers = sorted((place.offer(ask, self.rules) for place in self.seen), reverse=True)
            self.offers[ask.margin, ask.alone] = offers
        return len(offers) >= ask.gpus and offers[ask.gpus - 1] >= ask.bytes
