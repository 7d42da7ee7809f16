"""The reasons why jobs wait, in a sentence: the job's needs, and what the best GPU has free."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ullage.manager.placement.gpus import Gpu
from ullage.manager.placement.plan import PassPlan, Refusal, why_not
from ullage.manager.placement.rules import Rules, SlotRequest
from ullage.manager.placement.snapshot import NO_SHARE, Decision, Job
from ullage.units import format_bytes

_MOST_NAMED = 3  # most jobs that a reason names

JobName = Callable[[int], str]
"""Names a job by its number."""


@dataclass(frozen=True)
class PassSummary:
    """The state at the end of a pass, for reasons. `name` names a job; `cache` has reasons by request."""

    plan: PassPlan
    rules: Rules
    now: float
    name: JobName = field(default=str, compare=False, repr=False)
    cache: dict[object, str] = field(default_factory=dict, compare=False, repr=False)

    @property
    def keeper(self) -> int | None:
        """Return the job for which room is kept."""
        return None if self.plan.room is None else self.plan.room.job.id


class Waiting(NamedTuple):
    """A waiting job. `reason` says what it needs and what the best GPU had; it is built when read, since queues are
    long. `never`: no GPU could ever hold it. `behind` is the job that it must wait for, if it is a single one."""

    job: int
    details: Job
    at_the_end: PassSummary
    behind: int | None = None

    @property
    def request(self) -> SlotRequest:
        return self.at_the_end.plan.policy.request(self.details, self.at_the_end.rules)

    @property
    def never(self) -> bool:
        """Whether no GPU could hold the job even without all other jobs."""
        return not self.at_the_end.plan.host.could_ever(self.details) or self._never_on_gpus(self.request)

    def _never_on_gpus(self, request: SlotRequest) -> bool:
        return not request.fits_in(sorted([gpu.slot.total for gpu in self.at_the_end.plan.gpus], reverse=True))

    @property
    def reason(self) -> str:
        """Return the reason in one sentence."""
        details, end = self.details, self.at_the_end
        alike = (
            self.request,
            details.array if details.throttle is not None else None,
            details.throttle,
            "itself" if self.behind == self.job else self.behind,
            self.job in end.plan.refused,
            self.job == end.keeper,
            details.host,
            details.bookings,
            details.time_limit,
            details.work,
            details.min_speed,
        )
        if alike not in end.cache:
            end.cache[alike] = self._reason()
        return end.cache[alike]

    def _reason(self) -> str:
        request, end, job = self.request, self.at_the_end, self.details
        plan = end.plan
        if self._never_on_gpus(request):
            return f"needs {request.text}; that can never be: {_largest(request, plan.gpus)}"
        lack = _lack_on_host(job, plan, end.name)
        if self.never and lack is not None:
            return lack
        if self.behind == self.job:
            return f"needs {request.text}; its last run still holds memory"
        if job.throttle is not None and plan.arrays[job.array] >= job.throttle:
            return f"of array {job.array} at most {job.throttle} run at once"
        if self.behind is not None:
            return f"needs {request.text}; job {end.name(self.behind)} is before it in the queue and must wait"
        if self.job in plan.refused:
            return f"needs {request.text}; there is room, but the site's policy lets it wait"
        refusals = [(gpu, why_not(job, request.least, gpu, plan, end.rules, end.now)) for gpu in plan.gpus]
        if lack is not None and sum(refusal is None for _, refusal in refusals) >= request.gpus:
            return lack
        also = "" if lack is None else f"; it also {lack}"
        return f"needs {request.text}; {_slowed(job, refusals, end) or _best(job, request, refusals, end)}{also}"

    def __repr__(self) -> str:
        return f"Waiting(job={self.job}, reason={self.reason!r})"


@dataclass(frozen=True)
class PassOutcome:
    """The outcome of a pass: `placed` in the order of starts, `waiting` in the order of the queue."""

    placed: tuple[Decision, ...]
    waiting: tuple[Waiting, ...]


Refusals = Sequence[tuple[Gpu, Refusal | None]]


def _lack_on_host(job: Job, plan: PassPlan, name: JobName) -> str | None:
    """Return the host share that a job lacks, in words; None if it lacks none."""
    host, share = plan.host, job.host
    if host.total is None:
        return None
    held = NO_SHARE if host.keeper == job.id else host.reserved
    for which, text, unit in (
        ("cores", str, "core" if share.cores == 1 else "cores"),
        ("memory", format_bytes, "of host memory"),
    ):
        need, free, total, reserved = (getattr(part, which) for part in (share, host.free, host.total, held))
        needs = f"needs {text(need)} {unit}"
        if need > total:
            return f"{needs}; that can never be: jobs have {text(total)} here"
        if need > free:
            return f"{needs}; {text(max(free, 0))} of {text(total)} are free"
        if need and need > free - reserved:
            keeper = f"{text(reserved)} are kept for job {name(host.keeper or 0)}, which has waited longer"
            return f"{needs}; {text(free)} are free, but {keeper}"
    return None


def _largest(request: SlotRequest, gpus: Sequence[Gpu]) -> str:
    if len(gpus) < request.gpus:
        return f"there are {len(gpus)} GPUs"
    enough = sum(gpu.slot.total >= request.promise for gpu in gpus)
    largest = max(gpu.slot.total for gpu in gpus)
    return f"{enough or 'no'} GPU has as much, and the largest has {format_bytes(largest)}"


def _slowed(job: Job, refusals: Refusals, end: PassSummary) -> str | None:
    """If a minimum speed forbids the job, return in words which job would be too slow on the best GPU."""
    refused = [gpu for gpu, refusal in refusals if refusal is Refusal.SPEED]
    pairs = [(gpu, end.rules.side_by_side([*gpu.jobs, job], gpu.slot)) for gpu in refused]
    tried = [(gpu, both, both.slowed, both.slowed.least_speed) for gpu, both in pairs if both.slowed is not None]
    if not tried:
        return None
    gpu, both, slowed, least = max(tried, key=lambda each: each[1].speed - each[3])
    beside = _jobs([each.id for each in gpu.jobs], end.name)
    who, beside = ("it", beside) if slowed.id == job.id else (f"job {end.name(slowed.id)}", "it")
    why = f" ({both.reason})" if both.reason else ""
    would = f"on GPU {gpu.slot.index} {who} would run at {both.speed:.0%} of its speed next to {beside}{why}"
    return f"{would}; its --min-speed is {least:.0%}"


def _best(job: Job, request: SlotRequest, refusals: Refusals, end: PassSummary) -> str:
    if request.gpus == 0:
        return "it has just come"
    ready = sum(refusal is None for _, refusal in refusals)
    if ready >= request.gpus:
        return "the GPUs with room hold only some of its ranks"
    rest = [(gpu, refusal) for gpu, refusal in refusals if refusal is not None]
    hindered = [each for each in rest if each[0].fits(request, end.rules)]
    gpu, refusal = max(hindered or rest, key=lambda each: (each[1] in _PASSING, each[0].free))
    words = _words(job, gpu, refusal, end)
    later = _later(job, request, rest, gpu, end) if request.gpus == ready + 1 else ""
    some = f"{ready} of the {request.gpus} GPUs are ready; " if request.gpus > 1 else ""
    if hindered:
        return f"{some}GPU {gpu.slot.index} has {format_bytes(gpu.free)} free but {words}{later}"
    most = f"GPU {gpu.slot.index} has the most free, {format_bytes(gpu.free)}"
    if request.alone and not gpu.is_idle(end.rules):
        return f"{some}none is idle: {most}{later}"
    if refusal not in _PASSING:
        return f"{some}{most}, and {words}{later}"
    beside = f", and {format_bytes(request.margin)} are to stay free" if gpu.free >= request.promise else ""
    return f"{some}{most}{beside}{later}"


_PASSING = (Refusal.MEMORY, Refusal.KEPT, Refusal.SPEED)  # refusals of this job only; the GPU may take others


def _words(job: Job, gpu: Gpu, refusal: Refusal, end: PassSummary) -> str:
    """Return a refusal, in words that follow 'GPU 0 has 3 GiB free but'."""
    if refusal is Refusal.BOOKED:
        booking = gpu.slot.booked(job, end.now)
        return "" if booking is None else booking.text
    if refusal is Refusal.BUSY:
        activity, limit = end.plan.policy.activity(gpu), end.rules.smact_limit or 0.0
        if activity is None:
            return "has an SM activity that is not known"
        return f"has an SM activity of {activity:.0%}, over the limit of {limit:.0%}"
    return {
        Refusal.LOST: "is lost: it does not answer",
        Refusal.DRAINED: "is drained",
        Refusal.ALONE: "belongs to one job alone",
        Refusal.MIG: "is a MIG instance with a job",
        Refusal.UNMEASURED: "cannot be shared: its used memory is not measured",
        Refusal.CROWDED: f"has {gpu.job_count} jobs, the most that are allowed",
        Refusal.KEPT: f"is kept for job {end.name(end.keeper or 0)}, which has waited longer",
    }.get(refusal, "would slow a job there")


def _later(job: Job, request: SlotRequest, refusals: Refusals, best: Gpu, end: PassSummary) -> str:
    """Return in words which GPU will have room after the fewest jobs end, preferably the best one; "" if unknown."""
    ends = [(_fits_without(request, gpu, refusal), gpu) for gpu, refusal in refusals if refusal is not None]
    named = [(gone, gpu) for gone, gpu in ends if 0 < len(gone) <= _MOST_NAMED]
    if not named:
        return ""
    gone, gpu = min(named, key=lambda each: (len(each[0]), each[1] is not best))
    ending = "ends" if len(gone) == 1 else "end"
    return f"; GPU {gpu.slot.index} will have room when {_jobs(sorted(gone), end.name)} {ending}"


def _fits_without(request: SlotRequest, gpu: Gpu, refusal: Refusal) -> list[int]:
    """Return the fewest jobs that must end to make room here; none if unknown."""
    if refusal in (Refusal.DRAINED, Refusal.LOST, Refusal.KEPT, Refusal.BOOKED) or gpu.slot.foreign and request.alone:
        return []
    if len(gpu.jobs) < gpu.job_count:
        return []
    free, gone = gpu.free, list[int]()
    for each in sorted(gpu.holders, key=lambda each: -each.memory):
        if each.job is not None:
            free, gone = free + each.memory, [*gone, each.job.id]
        is_empty = len(gone) == gpu.job_count
        margin = 0 if is_empty else request.margin
        if free >= request.promise + margin and (is_empty or not request.alone and refusal in _PASSING):
            return gone
    return []


def _jobs(numbers: list[int], name: JobName) -> str:
    """Return the names of jobs for a sentence.

    >>> _jobs([12], str), _jobs([12, 15, 17], str)
    ('job 12', 'jobs 12, 15 and 17')
    """
    *first, last = map(name, numbers)
    return f"jobs {', '.join(first)} and {last}" if first else f"job {last}"
