"""What a decision says: who goes where, and why the others wait."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from ullage.manager.placement.rules import RequestMaker, SideBySide, SlotRequest
from ullage.manager.placement.snapshot import NO_SHARE, HostShare, Job, Slot
from ullage.units import format_bytes

_MOST_NAMED = 3  # jobs whose ends a reason names

JobName = Callable[[int], str]
"""How people call a job, by its number."""


@dataclass(frozen=True)
class Decision:
    """Put the job on these slots and promise it `promise` bytes on each; `exclusive`: nobody else may join it there.

    `host` is what it is promised of the host. Where its ranks take different memory, `promises` has what it is promised
    on each of the slots. The first slot is that of its first rank.

    >>> Decision(7, ("GPU-1", "GPU-2"), 12, exclusive=False, promises=(5, 12)).memory
    {'GPU-1': 5, 'GPU-2': 12}
    """

    job: int
    slots: tuple[str, ...]
    promise: int
    exclusive: bool
    host: HostShare = NO_SHARE
    promises: tuple[int, ...] = ()

    @property
    def memory(self) -> dict[str, int]:
        """What is promised, by slot."""
        return by_slot(self.slots, self.promise, self.promises)


def by_slot(slots: Sequence[str], promise: int | None, promises: Sequence[int]) -> dict[str, int]:
    """What a job is promised on each of its slots: the same on all, or what its ranks take in their order.

    >>> by_slot(["GPU-1", "GPU-2"], 12, []), by_slot(["GPU-1", "GPU-2"], 12, [5, 12])
    ({'GPU-1': 12, 'GPU-2': 12}, {'GPU-1': 5, 'GPU-2': 12})
    """
    return dict(zip(slots, promises, strict=True)) if promises else dict.fromkeys(slots, promise or 0)


class Keeping(NamedTuple):
    """The slots that are kept for a job, by name, each with the time since when; when they were `chosen`, and when all
    of them are ready at the latest.

    >>> Keeping(100.0, {"GPU-1": 40.0}).until
    inf
    """

    chosen: float
    since: Mapping[str, float]
    until: float = math.inf


class HostSummary(NamedTuple):
    """What the host had at the end of a pass: in all, free, and of that kept for a job that has waited longer."""

    total: HostShare
    free: HostShare
    kept: HostShare
    keeper: int | None

    def lack(self, asked: HostShare, name: JobName) -> str | None:
        """What is missing for a job, in words; None where nothing is."""
        left = self.free.minus(self.kept)
        for which, of in (("cores", str), ("memory", format_bytes)):
            need, free, total = (getattr(share, which) for share in (asked, self.free, self.total))
            what = "of host memory" if which == "memory" else "core" if need == 1 else "cores"
            if need > total:
                return f"needs {of(need)} {what}; that can never be: jobs have {of(total)} here"
            if need > free:
                return f"needs {of(need)} {what}; {of(max(free, 0))} of {of(total)} are free"
            if need and need > getattr(left, which):
                kept, keeper = of(getattr(self.kept, which)), name(self.keeper or 0)
                free_but = f"{of(free)} are free, but {kept} are kept for job {keeper}, which has waited longer"
                return f"needs {of(need)} {what}; {free_but}"
        return None


class SlotSummary(NamedTuple):
    """What a slot had at the end of a pass; `obstacle` says why it takes no job at all, `kept` for which job it is.
    `too_busy` says why it takes none whose speed there cannot be foretold. `jobs` are those there whose description is
    known; `given_back` has what each will give back at its end, where all are known."""

    slot: Slot
    free: int
    idle: bool
    obstacle: str | None
    kept: int | None
    too_busy: str | None = None
    jobs: tuple[Job, ...] = ()
    given_back: tuple[tuple[int, int], ...] = ()

    @property
    def gpu(self) -> int:
        """Its index."""
        return self.slot.index

    @property
    def total(self) -> int:
        """What jobs can use of it."""
        return self.slot.total

    def fits(self, request: SlotRequest) -> bool:
        """Whether its memory would do."""
        if request.alone:
            return self.idle and self.free >= request.promise
        return self.free >= request.promise + (0 if self.idle else request.margin)

    def fits_without(self, request: SlotRequest) -> list[int]:
        """The fewest jobs of ours at whose end the job fits here; none where that is not known."""
        if self.slot.drained or self.slot.lost or self.kept is not None or self.slot.foreign and request.alone:
            return []
        free, gone = self.free, list[int]()
        for job, size in sorted(self.given_back, key=lambda each: -each[1]):
            free, gone = free + size, [*gone, job]
            empty = len(gone) == len(self.given_back)
            margin = 0 if empty else request.margin
            if free >= request.promise + margin and (empty or not (request.alone or self.obstacle)):
                return gone
        return []


@dataclass(frozen=True)
class PassSummary:
    """What those who wait are told from: how asks are made, all slots at the end of the pass, how many jobs of each
    throttled array run, what the host has, which jobs the site's own policy `refused` a place, and how a job is called
    in a sentence. `told` are the reasons that were made already: jobs that ask for the same wait for the same."""

    requests: RequestMaker
    slots: tuple[SlotSummary, ...]
    arrays: Mapping[int | None, int]
    host: HostSummary | None = None
    now: float = 0.0
    refused: frozenset[int] = frozenset()
    name: JobName = field(default=str, compare=False, repr=False)
    told: dict[tuple[object, ...], str] = field(default_factory=dict, compare=False, repr=False)

    def for_job(self, job: Job) -> tuple[SlotSummary, ...]:
        """The slots as a job finds them: those that are booked for others, or too busy for it, are in its way."""
        found = []
        for each in self.slots:
            booking = each.slot.booked(job, self.now)
            obstacle = each.obstacle if booking is None else booking.text
            if obstacle is None and each.too_busy is not None and not self._foretold(job, each):
                obstacle = each.too_busy
            given_back = each.given_back if booking is None else ()
            kept = None if each.kept == job.id else each.kept
            found.append(each._replace(obstacle=obstacle, kept=kept, given_back=given_back))
        return tuple(found)

    @cached_property
    def kept(self) -> frozenset[int]:
        """The jobs that slots are kept for."""
        return frozenset(each.kept for each in self.slots if each.kept is not None)

    def _foretold(self, job: Job, there: SlotSummary) -> bool:
        return self.requests.rules.side_by_side([*there.jobs, job], there.slot).foretold

    def lack_on_host(self, job: Job) -> str | None:
        """What the host lacks for a job, in words."""
        return None if self.host is None else self.host.lack(job.host, self.name)


class Waiting(NamedTuple):
    """A job that waits. `reason` says what it needs and what the best slot had; `never`: no slot could ever hold it.

    The sentence is made when it is asked for: a queue has thousands of jobs and people read a few. That is also why
    this is a tuple: thousands are made in every pass. `behind` is the job that it has to wait for, if it is one.
    """

    job: int
    asked: Job
    at_the_end: PassSummary
    behind: int | None = None

    @property
    def request(self) -> SlotRequest:
        """What the job asks for."""
        return self.at_the_end.requests.of(self.asked)

    @property
    def never(self) -> bool:
        """Whether nothing here could hold the job even if everything else went away."""
        request, host = self.request, self.at_the_end.host
        if host is not None and not host.total.holds(self.asked.host):
            return True
        return self._never_on_gpus(request)

    def _never_on_gpus(self, request: SlotRequest) -> bool:
        if request.promises:
            return not request.fits_in(sorted((each.total for each in self.at_the_end.slots), reverse=True))
        return sum(summary.total >= request.promise for summary in self.at_the_end.slots) < request.gpus

    @property
    def reason(self) -> str:
        """One sentence for a person."""
        asked, end = self.asked, self.at_the_end
        behind = "itself" if self.behind == self.job else self.behind
        own = self.job if self.job in end.kept else None
        alike = (self.request, asked.array if asked.throttle is not None else None, asked.throttle, behind,
                 self.job in end.refused, own, asked.host, asked.bookings, asked.work, asked.min_speed)  # fmt: skip
        found = end.told.get(alike)
        if found is None:
            found = end.told[alike] = self._reason()
        return found

    def _reason(self) -> str:
        request, end = self.request, self.at_the_end
        if self._never_on_gpus(request):
            return f"needs {request.text}; that can never be: {_largest(request, end.slots)}"
        lack = end.lack_on_host(self.asked)
        if self.never and lack is not None:
            return lack
        if self.behind == self.job:
            return f"needs {request.text}; its last run still holds memory"
        if self.asked.throttle is not None and end.arrays[self.asked.array] >= self.asked.throttle:
            return f"of array {self.asked.array} at most {self.asked.throttle} run at once"
        if self.behind is not None:
            return f"needs {request.text}; job {end.name(self.behind)} is before it in the queue and must wait"
        if self.job in end.refused:
            return f"needs {request.text}; there is room, but the site's policy lets it wait"
        slots = end.for_job(self.asked)
        if lack is not None and _ready(request, slots) >= request.gpus:
            return lack
        also = "" if lack is None else f"; it also {lack}"
        return f"needs {request.text}; {self._slowed(request, slots) or _best(request, slots, end.name)}{also}"

    def _slowed(self, request: SlotRequest, slots: tuple[SlotSummary, ...]) -> str | None:
        """That a slot has room, but somebody would be slowed there more than his owner accepts, where it comes nearest
        to that; or that too little would be gained, where it would be fastest."""
        ready, rules = [each for each in slots if _is_ready(each, request)], self.at_the_end.requests.rules
        if not 0 < request.gpus <= len(ready) or rules.predict is None:
            return None
        tried = [(each, rules.joining(each.jobs, self.asked, each.slot)) for each in ready]
        refused = [(where, found, found.slowed) for where, found in tried if found.slowed is not None]
        if not refused:
            return self._in_vain([(where, found) for where, found in tried if not found.pays])
        where, found, slowed = max(refused, key=lambda each: each[1].speed - each[2].least_speed)
        own = slowed.id == self.asked.id
        name = self.at_the_end.name
        who, beside = ("it", _jobs([job.id for job in where.jobs], name)) if own else (f"job {name(slowed.id)}", "it")
        would = f"on GPU {where.gpu} {who} would run at {found.speed:.0%} of its speed beside {beside}{_why(found)}"
        said = "its --min-speed is" if slowed.min_speed is not None else "every job keeps at least"
        return f"{would}; {said} {slowed.least_speed:.0%}"

    def _in_vain(self, refused: Sequence[tuple[SlotSummary, SideBySide]]) -> str | None:
        if not refused:
            return None
        where, found = max(refused, key=lambda each: each[1].speed)
        beside = _jobs([job.id for job in where.jobs], self.at_the_end.name)
        would = f"on GPU {where.gpu} it would run at {found.speed:.0%} of its speed beside {beside}{_why(found)}"
        return f"{would}; the GPU would hardly get more done"

    def __repr__(self) -> str:
        return f"Waiting(job={self.job}, reason={self.reason!r})"


def _why(found: SideBySide) -> str:
    return f" ({found.reason})" if found.reason else ""


@dataclass(frozen=True)
class PassOutcome:
    """All of one pass: `placed` in the order to start them, `waiting` in the order of the queue. `kept` are the slots
    that are kept for jobs, by job: the next pass is to be told of them.

    >>> PassOutcome((Decision(7, ("GPU-1",), 0, False),), ()).placed[0].job
    7
    """

    placed: tuple[Decision, ...]
    waiting: tuple[Waiting, ...]
    kept: Mapping[int, Keeping] = field(default_factory=dict)


def _largest(request: SlotRequest, summaries: tuple[SlotSummary, ...]) -> str:
    if len(summaries) < request.gpus:
        return f"there are {len(summaries)} GPUs"
    enough = sum(summary.total >= request.promise for summary in summaries)
    largest = max(summary.total for summary in summaries)
    return f"{enough or 'no'} GPU has as much, and the largest has {format_bytes(largest)}"


def _ready(request: SlotRequest, summaries: tuple[SlotSummary, ...]) -> int:
    """How many slots could take the job."""
    return sum(_is_ready(each, request) for each in summaries)


def _is_ready(summary: SlotSummary, request: SlotRequest) -> bool:
    return summary.fits(request) and summary.obstacle is None and summary.kept is None


def _jobs(numbers: list[int], name: JobName) -> str:
    """Jobs by their numbers, in a sentence.

    >>> _jobs([12], str), _jobs([12, 15, 17], str)
    ('job 12', 'jobs 12, 15 and 17')
    """
    *first, last = map(name, numbers)
    return f"jobs {', '.join(first)} and {last}" if first else f"job {last}"


def _best(request: SlotRequest, summaries: tuple[SlotSummary, ...], name: JobName) -> str:
    """What the slot had that came nearest."""
    if request.gpus == 0:
        return "it has just come"
    suited = [summary for summary in summaries if summary.fits(request)]
    ready = [summary for summary in suited if summary.obstacle is None and summary.kept is None]
    if len(ready) >= request.gpus:
        return f"GPU {ready[0].gpu} has room, but the jobs would slow each other down too much"
    found = f"{len(ready)} of the {request.gpus} GPUs are ready; " if request.gpus > 1 else ""
    hindered = [summary for summary in suited if summary not in ready]
    rest = [summary for summary in summaries if summary not in ready]
    best = max(hindered or rest, key=lambda summary: (summary.obstacle is None, summary.free))
    later = _later(request, rest, best, name) if request.gpus == len(ready) + 1 else ""
    if hindered:
        why = best.obstacle or f"is kept for job {name(best.kept or 0)}, which has waited longer"
        return f"{found}GPU {best.gpu} has {format_bytes(best.free)} free but {why}{later}"
    most = f"GPU {best.gpu} has the most free, {format_bytes(best.free)}"
    if request.alone and not best.idle:
        return f"{found}none is idle: {most}{later}"
    if best.obstacle is not None:
        return f"{found}{most}, and {best.obstacle}{later}"
    beside = f", and {format_bytes(request.margin)} are to stay free" if best.free >= request.promise else ""
    return f"{found}{most}{beside}{later}"


def _later(request: SlotRequest, summaries: list[SlotSummary], best: SlotSummary, name: JobName) -> str:
    """Which slot will take the job when the fewest others have ended, the best one if it is one of them; "" where none
    can be named."""
    ends = [(summary.fits_without(request), summary) for summary in summaries]
    named = [(gone, summary) for gone, summary in ends if 0 < len(gone) <= _MOST_NAMED]
    if not named:
        return ""
    gone, there = min(named, key=lambda each: (len(each[0]), each[1] is not best))
    return f"; GPU {there.gpu} will have room when {_jobs(sorted(gone), name)} {'ends' if len(gone) == 1 else 'end'}"
