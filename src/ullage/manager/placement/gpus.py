"""The GPUs and the host during a pass: free memory, jobs, activity and cores. `Gpu` and `HostLeft` are immutable, so
that a pass can be repeated from the same state."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from ullage.manager.placement.ledger import Ledger, sum_shares
from ullage.manager.placement.rules import Rules, SlotRequest
from ullage.manager.placement.snapshot import NO_SHARE, HostShare, Job, Running, Slot

_STARTUP = 10.0  # start-up seconds of a job: 9 to 14 on an H200 with 16 cores


class Holder(NamedTuple):
    """A job on a GPU (None: unknown), its start (infinite: unknown), and the bytes that its end frees."""

    job: Job | None
    since: float
    memory: int


class Gpu(NamedTuple):
    """A slot during a pass. `position` counts slots by index, `free` bytes are not promised, and `others` are used by
    foreign processes. `load` is the SM activity over the monitor's window, `busy_now` over the last few seconds,
    each including that of young jobs; `busy_soon` is the activity expected when a job that starts now has begun to
    work. None is unknown."""

    slot: Slot
    position: int
    free: int
    others: int
    holders: tuple[Holder, ...]
    exclusive: bool
    load: float | None
    busy_now: float | None
    busy_soon: float | None

    @property
    def jobs(self) -> list[Job]:
        """Return the jobs here whose description is known."""
        return [each.job for each in self.holders if each.job is not None]

    @property
    def job_count(self) -> int:
        """Return the number of jobs here."""
        return len(self.holders)

    @property
    def capacity(self) -> int:
        """Return the bytes free once our own jobs have ended."""
        return self.slot.total - self.others

    def is_idle(self, rules: Rules) -> bool:
        """Whether the GPU has none of our jobs, and others use hardly any memory."""
        return not self.holders and self.others <= rules.idle_memory

    def is_quiet(self, rules: Rules) -> bool:
        """Whether the GPU has no job, no foreign process and hardly any used memory. Its mean activity may still
        include a job that has just ended, which is no reason to leave the GPU empty."""
        slot = self.slot
        return not self.holders and slot.used is not None and slot.foreign == 0 and slot.used <= rules.idle_memory

    def fits(self, request: SlotRequest, rules: Rules) -> bool:
        """Whether the memory is free, and the GPU idle if the job is exclusive."""
        idle = self.is_idle(rules)
        if request.alone:
            return idle and request.promise <= self.free
        return request.promise + (0 if idle else request.margin) <= self.free

    def offer(self, request: SlotRequest, rules: Rules) -> int:
        """Return the most memory that a job could get here once our own jobs have ended (-1: none, ever)."""
        if self.slot.drained or self.slot.lost:
            return -1
        if self.others <= rules.idle_memory:
            return self.capacity
        return -1 if request.alone else self.capacity - request.margin

    def joined(self, job: Job, promise: int, exclusive: bool, rules: Rules, now: float) -> "Gpu":
        """Return the GPU with one more job."""
        expected = rules.fresh_busy if job.busy is None else job.busy
        unknown = job.busy if not self.holders else None  # for a GPU whose activity is not measured
        return self._replace(
            free=self.free - promise,
            holders=(*self.holders, Holder(job, now, promise)),
            exclusive=self.exclusive or exclusive,
            load=unknown if self.load is None else self.load + expected,
            busy_now=unknown if self.busy_now is None else self.busy_now + expected,
            busy_soon=None if self.busy_soon is None else self.busy_soon + expected,
        )

    def ready_at(self, request: SlotRequest, suits: bool, now: float) -> float:
        """Return when the job fits here at the latest, by the time limits of the jobs here."""
        sociable = suits and not (request.alone or self.exclusive or self.slot.mig or self.slot.used is None)
        free, when, staying = self.free, now, self.job_count
        leaving = [
            (math.inf if each.job is None else each.job.ends_by(each.since, now), each.memory) for each in self.holders
        ]
        for end, memory in sorted(leaving):
            if sociable and request.promise + request.margin <= free:
                return when
            free, when, staying = free + memory, max(end, now), staying - 1
        return when if staying == 0 else math.inf


def gpus_of(slots: Sequence[Slot], ledger: Ledger, running: Iterable[Running], rules: Rules, now: float) -> list[Gpu]:
    """Return all slots as a pass starts with them."""
    on_slot: dict[str, dict[int, Running]] = {slot.id: {} for slot in slots}
    for each in running:
        for slot_id in each.slots:
            on_slot.setdefault(slot_id, {})[each.job.id] = each
    ordered = sorted(slots, key=lambda slot: (slot.index, slot.id))
    return [gpu_of(slot, number, ledger, on_slot[slot.id], rules, now) for number, slot in enumerate(ordered)]


def gpu_of(slot: Slot, position: int, ledger: Ledger, here: Mapping[int, Running], rules: Rules, now: float) -> Gpu:
    """Return one slot as a pass starts with it; `here` are the known jobs on it, by number."""
    counted, others, exclusive = ledger.standing(slot.id)
    holders = tuple(
        Holder(here[job].job, here[job].since, memory) if job in here else Holder(None, math.inf, memory)
        for job, memory in counted.items()
    )
    free = max(slot.total - others - sum(counted.values()), 0)
    gpu = Gpu(slot, position, free, others, holders, exclusive, None, None, None)
    # If SM activity is not measured, GPU activity counts, which is never below it.
    activity = slot.activity
    mean = activity.smact if activity.smact is not None else activity.gract
    if rules.stale_after is not None and (activity.age or 0.0) > rules.stale_after:
        mean = None
    recent = mean if slot.busy_now is None else slot.busy_now
    load = _expected(gpu, mean, rules.window, rules, now)
    busy_now, busy_soon = _expected(gpu, recent, rules.busy_window, rules, now), _expected_soon(gpu, recent, rules, now)
    return gpu._replace(load=load, busy_now=busy_now, busy_soon=busy_soon)


def _expected(gpu: Gpu, measured: float | None, window: float, rules: Rules, now: float) -> float | None:
    """Return the SM activity to expect: the mean, plus the part of young jobs that it does not include yet."""
    if measured is None:
        known = [job.busy for job in gpu.jobs if job.busy is not None]
        return sum(known) if gpu.holders and len(known) == gpu.job_count else None
    if gpu.is_quiet(rules):
        return 0.0
    unseen = 0.0
    for job, since, _ in gpu.holders:
        if now - since < window:
            unseen += (1 - max((now - since) / window, 0.0)) * rules.busy_of(job)
    return measured + unseen


def _expected_soon(gpu: Gpu, measured: float | None, rules: Rules, now: float) -> float | None:
    """Return the SM activity to expect once a job that starts now has begun to work.

    By then young jobs work, too, and some older ones have ended: of jobs of unknown length, half end before they have
    run twice as long as now.
    """
    if measured is None or gpu.others > rules.idle_memory or not gpu.holders:
        return None
    ages = [max(now - each.since, 0.0) for each in gpu.holders]
    old = [age for age in ages if age >= _STARTUP]
    left = sum(age / (age + _STARTUP) for age in old) / max(len(old), 1)
    young = [each for each, age in zip(gpu.holders, ages, strict=True) if age < _STARTUP]
    return measured * left + sum(rules.busy_of(each.job) for each in young)


class HostLeft(NamedTuple):
    """The host during a pass: its `total` (None: not counted), the `free` part, and the shares of `leaving` jobs with
    their ends. `reserved` is the share kept for job `keeper`, which needs it at `reserved_until` at the latest; jobs
    that may still run then cannot use it."""

    total: HostShare | None = None
    free: HostShare = NO_SHARE
    leaving: tuple[tuple[float, HostShare], ...] = ()
    reserved: HostShare = NO_SHARE
    reserved_until: float = math.inf
    keeper: int | None = None

    @classmethod
    def of(cls, ledger: Ledger, running: Iterable[Running], now: float) -> "HostLeft":
        """Return the host as a pass starts with it."""
        if ledger.host is None:
            return cls()
        ends = {each.job.id: each.job.ends_by(each.since, now) for each in running}
        held = ledger.on_host()
        leaving = tuple((ends.get(job, math.inf), share) for job, share in held.items() if share != NO_SHARE)
        # Negative if jobs hold more than the total, after a setting was lowered; they must free all of that first.
        return cls(ledger.host, ledger.host.minus(sum_shares(held.values())), leaving)

    def fits(self, job: Job, now: float) -> bool:
        """Whether the job's share is free, and not kept for another job that needs it before this one's end."""
        if self.total is None or job.host == NO_SHARE:
            return True
        lent = job.ends_by(now, now) <= self.reserved_until < math.inf
        return self.free.minus(NO_SHARE if lent else self.reserved).holds(job.host)

    def could_ever(self, job: Job) -> bool:
        """Whether the job's share would be free without all other jobs."""
        return self.total is None or self.total.holds(job.host)

    def taken(self, job: Job, now: float) -> "HostLeft":
        """Return the host without the job's share."""
        if self.total is None or job.host == NO_SHARE:
            return self
        leaving = (*self.leaving, (job.ends_by(now, now), job.host))
        return self._replace(free=self.free.minus(job.host), leaving=leaving)

    def keeping(self, job: Job, until: float) -> "HostLeft":
        """Return the host with the job's share kept for it from `until` on at the latest."""
        if self.total is None or job.host == NO_SHARE:
            return self
        return self._replace(reserved=job.host, reserved_until=until, keeper=job.id)

    def ready_at(self, job: Job, now: float) -> float:
        """Return when the job's share is free at the latest, by the time limits of other jobs."""
        free, when = self.free, now
        for end, share in sorted(self.leaving):
            if free.holds(job.host):
                return when
            free, when = free.plus(share), end
        return when if self.total is None or free.holds(job.host) else math.inf
