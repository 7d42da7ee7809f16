"""A slot during one pass: what is left of it as jobs are put there, and what keeps jobs away."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ullage.manager.placement.ledger import Ledger
from ullage.manager.placement.outcome import SlotSummary
from ullage.manager.placement.rules import Rules, SlotRequest
from ullage.manager.placement.snapshot import Activity, Job, Running, Slot

Holder = tuple[Job | None, float, int]
"""A job on a slot, since when (None, and infinite: not known), and the bytes that it will give back."""


@dataclass(eq=False, slots=True)
class Candidate:
    """A slot and what a pass knows of it. `load` is the SM activity to expect now, None where it is unknown. `obstacle`
    keeps every job away, `too_busy` those whose speed there cannot be foretold.

    `position` counts slots by index. `jobs` are those there whose description is known, `count` all of them, who are
    the `holders`.
    """

    slot: Slot
    position: int
    free: int
    others: int
    load: float | None
    jobs: list[Job]
    count: int
    exclusive: bool
    holders: list[Holder]
    kept: int | None = None
    kept_until: float = math.inf
    obstacle: str | None = None
    too_busy: str | None = None
    rank: tuple[Any, ...] = ()  # by the policy, among those that take jobs
    company: tuple[object, ...] | None = None
    drifted: Activity | None = None

    def idle(self, rules: Rules) -> bool:
        """No job of ours, and others use so little that it does not count."""
        return self.count == 0 and self.others <= rules.idle_memory

    def fits(self, request: SlotRequest, rules: Rules) -> bool:
        """Whether the memory is there, and the solitude where it is asked for."""
        if request.alone:
            return self.idle(rules) and request.promise <= self.free
        return request.promise + (0 if self.idle(rules) else request.margin) <= self.free

    def offer(self, request: SlotRequest, rules: Rules) -> int:
        """The most that such a job could get here once our own jobs have ended (-1: nothing, ever).

        What others do is not in our hands: a slot that they keep too full or too busy offers nothing.
        """
        if self.slot.drained or self.slot.lost or (self.count == 0 and self.obstacle is not None):
            return -1
        if self.others <= rules.idle_memory:
            return self.capacity
        return -1 if request.alone else self.capacity - request.margin

    def offers_as(self, other: Candidate) -> bool:
        """Whether it offers what another view of the slot does."""
        closed = self.count == 0 and self.obstacle is not None
        if self.others != other.others or closed != (other.count == 0 and other.obstacle is not None):
            return False
        return self.slot.drained == other.slot.drained and self.slot.lost == other.slot.lost

    @property
    def capacity(self) -> int:
        """What is free once our own jobs have ended."""
        return self.slot.total - self.others

    def take(self, job: Job, promise: int, exclusive: bool, rules: Rules, now: float) -> None:
        """Put a job here."""
        self.free -= promise
        self.load = _with_newcomer(self.load, job, self.count, rules)
        self.jobs.append(job)
        self.count += 1
        self.exclusive = self.exclusive or exclusive
        self.holders.append((job, now, promise))
        self.company = None
        self.judge(rules)

    def expect(self, activity: Activity, load: float | None, rules: Rules) -> None:
        """Another SM activity than before, and nothing else. `drifted` has it until the next snapshot."""
        self.drifted, self.load, self.company = activity, load, None
        self.judge(rules)

    def met(self) -> tuple[object, ...]:
        """What speeds of a newcomer depend on here: the kind of GPU, and what those who are there do and accept."""
        if self.company is None:
            works = sorted([(job.work or "", -1.0 if job.min_speed is None else job.min_speed) for job in self.jobs])
            self.company = (self.slot.name, self.count, self.too_busy is None, *works)
        return self.company

    def judge(self, rules: Rules) -> None:
        """Find out what keeps jobs away."""
        self.obstacle, self.too_busy = _obstacle(self, rules), None
        busy = _too_busy(self, rules) if self.obstacle is None else None
        foreseeable = 0 < self.count == len(self.jobs) and self.others <= rules.idle_memory
        if rules.predict is not None and foreseeable:
            self.too_busy = busy
        else:
            self.obstacle = self.obstacle or busy

    def ready_at(self, request: SlotRequest, suits: bool, now: float) -> float:
        """When the job fits here at the latest, by the time limits of those who are here, whom it suits or not."""
        sociable = suits and not (request.alone or self.exclusive or self.slot.mig or self.slot.used is None)
        free, when, staying = self.free, now, self.count
        leaving = [
            (math.inf if job is None else job.ends_by(since, now), given_back)
            for job, since, given_back in self.holders
        ]
        for end, given_back in sorted(leaving):
            if sociable and request.promise + request.margin <= free:
                return when
            free, when, staying = free + given_back, max(end, now), staying - 1
        return when if staying == 0 else math.inf

    def summary(self, rules: Rules) -> SlotSummary:
        """What to tell those who wait."""
        known = len(self.jobs) == self.count
        given_back = [(job.id, size) for job, _, size in self.holders if job is not None] if known else ()
        return SlotSummary(
            self.slot, self.free, self.idle(rules), self.obstacle, self.kept, self.too_busy, tuple(self.jobs),
            tuple(given_back),
        )  # fmt: skip


def candidates(
    slots: Sequence[Slot], ledger: Ledger, running: Iterable[Running], rules: Rules, now: float
) -> list[Candidate]:
    """All slots as a pass finds them."""
    on_slot: dict[str, dict[int, Running]] = {slot.id: {} for slot in slots}
    for each in running:
        for slot_id in each.slots:
            on_slot.setdefault(slot_id, {})[each.job.id] = each
    ordered = sorted(slots, key=lambda slot: (slot.index, slot.id))
    return [candidate_of(slot, number, ledger, on_slot[slot.id], rules, now) for number, slot in enumerate(ordered)]


def _obstacle(candidate: Candidate, rules: Rules) -> str | None:
    """Why a slot takes no further job, whatever it needs and however busy the slot is; None where it takes some."""
    slot = candidate.slot
    if slot.lost:
        return "is lost: it does not answer"
    if slot.drained:
        return "is drained"
    if candidate.exclusive:
        return "belongs to one job alone"
    if slot.mig and candidate.count:
        return "is a MIG instance with a job"
    if slot.used is None and (candidate.count or rules.unmeasured == "never"):
        return "cannot be shared: its used memory is not measured"
    if rules.max_jobs_per_gpu is not None and candidate.count >= rules.max_jobs_per_gpu:
        return f"has {candidate.count} jobs, the most that are allowed"
    return None


def _too_busy(candidate: Candidate, rules: Rules) -> str | None:
    """Why a slot takes no further job whose speed there cannot be foretold."""
    if rules.smact_limit is None or (candidate.count == 0 and is_quiet(candidate.slot, rules)):
        return None
    if candidate.load is None:
        # Unknown activity is no reason to leave a slot empty where hardly any memory is in use (or where none is
        # measured: `unmeasured` has decided about that), but it is one not to add a second job.
        return None if candidate.idle(rules) else "has an SM activity that is not known"
    if candidate.load > rules.smact_limit:
        return f"has an SM activity of {candidate.load:.0%}, over the limit of {rules.smact_limit:.0%}"
    return None


def is_quiet(slot: Slot, rules: Rules) -> bool:
    """Measured, no foreign process, hardly any memory in use: nobody is there to keep it busy.

    The window's mean may still show a job that has just ended; that is no reason to leave the slot empty.
    """
    return slot.used is not None and slot.foreign == 0 and slot.used <= rules.idle_memory


def candidate_of(
    slot: Slot, position: int, ledger: Ledger, here: Mapping[int, Running], rules: Rules, now: float
) -> Candidate:
    """A slot as a pass finds it; `here` are the jobs on it, by number, as far as they are known."""
    counted, others, exclusive = ledger.standing(slot.id)
    holders: list[Holder] = []
    jobs: list[Job] = []
    for number, given_back in counted.items():
        each = here.get(number)
        if each is None:
            holders.append((None, math.inf, given_back))
        else:
            holders.append((each.job, each.since, given_back))
            jobs.append(each.job)
    # Where SM activity is not measured, that of the whole GPU counts, which is never below it.
    activity = slot.activity
    measured = activity.smact if activity.smact is not None else activity.gract
    candidate = Candidate(
        slot=slot,
        position=position,
        free=max(slot.total - others - sum(counted.values()), 0),
        others=others,
        load=expected_load(slot, measured, activity.age, holders, rules, now),
        jobs=jobs,
        count=len(holders),
        exclusive=exclusive,
        holders=holders,
    )
    candidate.judge(rules)
    return candidate


def expected_load(
    slot: Slot, measured: float | None, age: float | None, holders: Sequence[Holder], rules: Rules, now: float
) -> float | None:
    """The SM activity to expect, now that jobs are there which the window has not wholly seen."""
    if measured is None or rules.stale_after is not None and (age or 0.0) > rules.stale_after:
        known = [job.busy for job, _, _ in holders if job is not None and job.busy is not None]
        return sum(known) if holders and len(known) == len(holders) else None
    if not holders and is_quiet(slot, rules):
        return 0.0
    unseen, window = 0.0, rules.window
    for job, since, _ in holders:
        there = now - since
        if there < window:
            busy = rules.fresh_busy if job is None or job.busy is None else job.busy
            unseen += (1 - max(there / window, 0.0)) * busy
    return measured + unseen


def _with_newcomer(load: float | None, job: Job, count: int, rules: Rules) -> float | None:
    if load is None:
        return job.busy if count == 0 else None
    return load + (rules.fresh_busy if job.busy is None else job.busy)
