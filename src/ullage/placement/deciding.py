"""One pass over the queue."""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Mapping, Sequence
from itertools import chain, repeat

from ullage.placement.fairness import fair_order, waited
from ullage.placement.ledger import Ledger
from ullage.placement.outcome import Decision, Outcome, View, Waiting
from ullage.placement.places import Place, places
from ullage.placement.policies import Policy, find_policy
from ullage.placement.rules import Ask, Asking, Rules
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
    return _Pass(chosen, rules, seen, last, now).over(fair_order(waiting, rules, now, usage), book.jobs())


class _Pass:
    """The state of one pass. Places only get fuller in it, so what failed once fails again."""

    def __init__(self, policy: Policy, rules: Rules, seen: list[Place], last: int, now: float) -> None:
        self.policy, self.rules, self.seen, self.last, self.now = policy, rules, seen, last, now
        self.backfills = policy.backfills if rules.backfill is None else rules.backfill
        self.open = sorted((place for place in seen if place.obstacle is None), key=self.rank)
        self.short_only: list[Place] = []  # kept for a job, but until a known time: open to jobs that end before it
        self.lent_free, self.lent_until = -1, -math.inf  # the most that a job can find there, and for how long
        self.asking = Asking(rules, policy.oracle, policy.alone)
        self.failed: dict[tuple[int, bool, bool], int] = {}  # the smallest ask of this kind that found no place
        self.impossible: dict[tuple[int, bool, bool], int] = {}  # the smallest that no waiting would help
        self.reservations = rules.reservations
        self.predict = rules.slowdown if policy.predicts else None
        self.offers: dict[tuple[int, bool], list[int]] = {}

    def rank(self, place: Place) -> tuple[object, ...]:
        return self.policy.rank(place, self.last)

    def over(self, queue: Sequence[Job], holders: set[int]) -> Outcome:
        """Give each job its turn, until no further one can be placed; none that still holds a promise."""
        placed: list[Decision] = []
        left: list[Job] = []
        behind: int | None = None
        turns = iter(queue)
        for job in turns:
            if self._hopeless(job) or job.id in holders:
                left.append(job)
                continue
            ask = self.asking.of(job)
            decision = self.place(job, ask)
            if decision is not None:
                placed.append(decision)
                holders.add(job.id)
                continue
            left.append(job)
            if not self.backfills and not job.recovery and self._could_ever(ask):
                behind = job.id
                break
            if self._may_reserve(job) and self._could_ever(ask):
                self.reserve(job, ask)
            if not self.open and not self.short_only:
                break
        view = View(self.asking, tuple([place.sight(self.rules) for place in self.seen]))
        waits_for = [job.id if job.id in holders else None for job in left]
        left += turns
        fields = zip([job.id for job in left], left, repeat(view), chain(waits_for, repeat(behind)), strict=False)
        # What Waiting(*each) does, without a call into Python for each of thousands.
        return Outcome(tuple(placed), tuple(map(tuple.__new__, repeat(Waiting), fields)))

    def place(self, job: Job, ask: Ask) -> Decision | None:
        """Put the job on the best places that suit it, on as many as it asks for, or nowhere."""
        kind = (ask.gpus, ask.alone, ask.known)
        suited: list[Place] = []
        if ask.bytes < self.failed.get(kind, math.inf):
            suited = self._suited(job, ask, self.open)
            if len(suited) < ask.gpus and self.predict is None:
                self.failed[kind] = ask.bytes
        if len(suited) < ask.gpus:
            suited = self._suited_with_lent(job, ask) if self.short_only else []
        if not suited:
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
                    self.lent_free, self.lent_until = max(self.lent_free, place.free), max(self.lent_until, until)
        self.reservations -= 1

    def _hopeless(self, job: Job) -> bool:
        """A quick no, for the long tail of a queue: one that asked for less has found nothing, and nothing is lent."""
        need = job.true if self.policy.oracle else job.need
        known, alone = need is not None, self.policy.alone or job.exclusive
        if need is None:
            alone = alone or self.rules.unknown == "exclusive"
            need = 0 if alone else self.rules.free_floor or 0
        kind = (job.gpus, alone, known)
        if need < self.failed.get(kind, math.inf):
            return False
        limit = job.time_limit
        if limit is not None and need <= self.lent_free and self.now + limit <= self.lent_until:
            return False
        if need >= self.impossible.get(kind, math.inf):
            return True
        return (self.backfills or job.recovery) and not self._may_reserve(job)

    def _may_reserve(self, job: Job) -> bool:
        return self.reservations != 0 and waited(job, self.now) >= self.rules.patience

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
        if place.kept is not None:
            self.lent_free = max((lent.free for lent in self.short_only), default=-1)
        if self.policy.cyclic:
            self.open.sort(key=self.rank)

    def _suited_with_lent(self, job: Job, ask: Ask) -> list[Place]:
        """Enough places for the job, kept ones among them that it may use because it ends before they are needed."""
        if job.time_limit is None:
            return []
        end = self.now + job.time_limit
        lent = [place for place in self.short_only if end <= place.kept_until and place.fits(ask, self.rules)]
        if not lent:
            return []
        suited = self._suited(job, ask, sorted(lent if ask.gpus == 1 else self.open + lent, key=self.rank))
        return suited if len(suited) >= ask.gpus else []

    def _could_ever(self, ask: Ask) -> bool:
        """Whether waiting for our own jobs helps; a job that nothing here can hold must not hold up the others."""
        offers = self.offers.get((ask.margin, ask.alone))
        if offers is None:
            offers = sorted((place.offer(ask, self.rules) for place in self.seen), reverse=True)
            self.offers[ask.margin, ask.alone] = offers
        if len(offers) >= ask.gpus and offers[ask.gpus - 1] >= ask.bytes:
            return True
        kind = (ask.gpus, ask.alone, ask.known)
        self.impossible[kind] = min(ask.bytes, self.impossible.get(kind, ask.bytes))
        return False
