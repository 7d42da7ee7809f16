"""One pass over the queue: which jobs start now, and where.

Memory and users' explicit wishes can refuse a job. Measured activity can admit one. A prediction ranks GPUs and can
admit a job, but never refuses it. So while a GPU is idle and a waiting job fits into its memory, a job starts, unless
an owner's `--min-speed` or the room kept for a job that has waited too long forbids it.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from typing import NamedTuple

from ullage.manager.placement.fairness import came, waited
from ullage.manager.placement.gpus import Gpu, HostLeft
from ullage.manager.placement.policies import Policy, find_policy
from ullage.manager.placement.rules import Rules, SlotRequest
from ullage.manager.placement.snapshot import Decision, Job

_COMPARED = 64  # suitable GPUs, best rank first, for which speeds are predicted; the rest are rarely much better


class Refusal(Enum):
    """The reason a GPU rejects a job."""

    LOST = auto()
    DRAINED = auto()
    ALONE = auto()
    MIG = auto()
    UNMEASURED = auto()
    CROWDED = auto()
    BOOKED = auto()
    MEMORY = auto()
    KEPT = auto()
    SPEED = auto()
    BUSY = auto()


class Room(NamedTuple):
    """Room kept for one job that has waited too long. `places` has, by the position of each GPU, the job's request
    there and the present refusal. By time limits, all these GPUs are free for it at `until` at the latest. Jobs that
    started after the `deadline` were admitted next to it."""

    job: Job
    places: Mapping[int, tuple[SlotRequest, Refusal | None]]
    deadline: float
    until: float

    def is_left_by(self, newcomer: Job, request: SlotRequest, gpu: Gpu, rules: Rules, now: float) -> bool:
        """Whether a newcomer leaves the room free: it ends in time, or fits next to the job and all others admitted
        since."""
        if gpu.position not in self.places or newcomer.ends_by(now, now) <= self.until < math.inf:
            return True
        own, refusal = self.places[gpu.position]
        if own.alone or request.alone or refusal in (Refusal.BUSY, Refusal.SPEED):
            return False
        beside = [each for each in gpu.holders if each.since >= self.deadline]
        taken = sum(each.memory for each in beside) + request.promise + own.promise + own.margin
        if taken > gpu.capacity or len(beside) + 2 > (rules.max_jobs_per_gpu or math.inf):
            return False
        jobs = [each.job for each in beside if each.job is not None]
        return not _is_slowed([*jobs, newcomer, self.job], gpu, rules)


class Situation(NamedTuple):
    """The input of a pass. `holders` are the jobs that hold a promise, `arrays` counts the running jobs of each array,
    and `last` is the position of the GPU that got the last job."""

    queue: Sequence[Job]
    gpus: Sequence[Gpu]
    host: HostLeft
    holders: frozenset[int]
    arrays: Mapping[int | None, int]
    last: int
    rules: Rules
    now: float


@dataclass
class PassPlan:
    """The outcome of a pass: the jobs `placed`, those `left` (with the job that each must wait for, if it is a single
    one), the GPUs and the host afterwards, the `room` kept, and the jobs that a custom policy `refused`."""

    policy: Policy
    gpus: list[Gpu]
    host: HostLeft
    arrays: Counter[int | None]
    placed: list[Decision] = field(default_factory=list)
    left: list[tuple[Job, int | None]] = field(default_factory=list)
    room: Room | None = None
    refused: set[int] = field(default_factory=set)


def best_plan(situation: Situation, policy: Policy) -> PassPlan:
    """Return the policy's plan, or that of its `at_least` policy if that starts more jobs."""
    first = plan(situation, policy)
    if policy.at_least is None or not first.left:
        return first
    other = plan(situation, replace(find_policy(policy.at_least), keeps_speeds=True))
    return other if len(other.placed) > len(first.placed) else first


def plan(situation: Situation, policy: Policy) -> PassPlan:
    """Plan each job in turn. GPUs only get fuller in a pass, so a request that failed once fails again."""
    queue, gpus, host, holders, arrays, last, rules, now = situation
    made = PassPlan(policy, list(gpus), host, Counter(arrays))
    backfills = policy.backfills if rules.backfill is None else rules.backfill
    booked = any(gpu.slot.bookings for gpu in gpus)
    started: set[int] = set()
    hopeless: dict[object, int] = {}  # smallest request without a GPU, by kind
    never: dict[object, int] = {}  # smallest one that waiting would not help
    turns = iter(queue)
    for job in turns:
        if job.id in holders or job.id in started:
            made.left.append((job, job.id))  # its last attempt still holds memory
            continue
        if job.throttle is not None and made.arrays[job.array] >= job.throttle:
            made.left.append((job, None))
            continue
        request = policy.request(job, rules)
        kind = _kind(job, request, rules, booked or made.room is not None)
        size = request.least.promise
        chosen: Sequence[Gpu] | None = None
        if made.host.fits(job, now) and size < hopeless.get(kind, math.inf):
            chosen = _choose(job, request, made, rules, last, now)
            if chosen is None and not request.promises and job.id not in made.refused:
                hopeless[kind] = size
        if chosen is not None:
            promise = min((gpu.free for gpu in chosen), default=0) if request.alone else request.promise
            slots = tuple(gpu.slot.id for gpu in chosen)
            decision = Decision(job.id, slots, promise, request.alone, job.host, request.promises)
            for gpu, memory in zip(chosen, decision.memory.values(), strict=True):
                made.gpus[gpu.position] = gpu.joined(job, memory, request.alone, rules, now)
                last = gpu.position
            made.host = made.host.taken(job, now)
            made.placed.append(decision)
            made.arrays[job.array] += 1
            started.add(job.id)
            continue
        made.left.append((job, None))
        holds_up = not backfills and not job.recovery
        may_keep = made.room is None and waited(job, now) >= rules.patience and job.id not in made.refused
        if (holds_up or may_keep) and size < never.get(kind, math.inf):
            room = _keep_room(job, request, made, rules, now)
            if room is None:
                never[kind] = size
            elif holds_up:
                made.left += [(other, job.id) for other in turns]
            else:
                made.room, made.host = room, made.host.keeping(job, room.until)
    return made


def _kind(job: Job, request: SlotRequest, rules: Rules, has_limits: bool) -> object:
    """Return everything that decides about a job except the size of its request."""
    speeds = None if rules.predict is None or request.alone else (job.work, job.min_speed)
    limits = (job.bookings, job.time_limit) if has_limits else None
    return request.gpus, request.alone, request.known, speeds, limits


def _choose(
    job: Job, request: SlotRequest, made: PassPlan, rules: Rules, last: int, now: float
) -> Sequence[Gpu] | None:
    """Return the GPUs for a job in the order of its ranks; None if there are too few."""
    if request.gpus == 0:
        return ()
    policy = made.policy
    suited = [gpu for gpu in made.gpus if why_not(job, request.least, gpu, made, rules, now) is None]
    if len(suited) < request.gpus:
        return None
    suited.sort(key=lambda gpu: (*policy.rank(gpu, last), gpu.position))
    if policy.predicts and rules.predict is not None:
        best = suited[: max(_COMPARED, request.gpus)]
        best.sort(key=lambda gpu: _lost(job, gpu, rules))
        suited[: len(best)] = best
    if policy.choose is not None:
        suited = list(policy.choose(job, request, suited, rules, now))
        if len(suited) < request.gpus:
            made.refused.add(job.id)
            return None
    first = suited[: request.gpus]
    if not request.promises or all(
        why_not(job, request.of_rank(rank), gpu, made, rules, now) is None for rank, gpu in enumerate(first)
    ):
        return first
    places: dict[int, Gpu] = {}
    for rank in request.largest_first:
        need = request.of_rank(rank)
        place = next((gpu for gpu in suited if why_not(job, need, gpu, made, rules, now) is None), None)
        if place is None:
            return None
        places[rank] = place
        suited.remove(place)
    return [places[rank] for rank in range(request.gpus)]


def why_not(job: Job, request: SlotRequest, gpu: Gpu, made: PassPlan, rules: Rules, now: float) -> Refusal | None:
    """Return the reason the GPU rejects the job now; None if it accepts the job."""
    barrier = closed(job, gpu, rules, now)
    if barrier is not None:
        return barrier
    if not gpu.fits(request, rules):
        return Refusal.MEMORY
    room, policy, here = made.room, made.policy, gpu.jobs
    if room is not None and job.id != room.job.id and not room.is_left_by(job, request, gpu, rules, now):
        return Refusal.KEPT
    heeds_speeds = here and (policy.predicts or policy.keeps_speeds)
    if heeds_speeds and _is_slowed([*here, job], gpu, rules):
        return Refusal.SPEED
    if not is_busy(gpu, policy, rules):
        return None
    known = 0 < gpu.job_count == len(here) and gpu.others <= rules.idle_memory
    admitted = policy.predicts and known and rules.gains(here, job, gpu.slot)
    return None if admitted else Refusal.BUSY


def closed(job: Job, gpu: Gpu, rules: Rules, now: float) -> Refusal | None:
    """Return the reason the GPU rejects the job, however much memory is free."""
    slot, count = gpu.slot, gpu.job_count
    if slot.lost:
        return Refusal.LOST
    if slot.drained:
        return Refusal.DRAINED
    if gpu.exclusive:
        return Refusal.ALONE
    if slot.mig and count:
        return Refusal.MIG
    if slot.used is None and (count or rules.unmeasured == "never"):
        return Refusal.UNMEASURED
    if rules.max_jobs_per_gpu is not None and count >= rules.max_jobs_per_gpu:
        return Refusal.CROWDED
    if slot.bookings and slot.booked(job, now):
        return Refusal.BOOKED
    return None


def is_busy(gpu: Gpu, policy: Policy, rules: Rules) -> bool:
    """Whether measured activity and that of young jobs are too high for another job."""
    if rules.smact_limit is None or gpu.is_quiet(rules):
        return False
    activity = policy.activity(gpu)
    if activity is None:
        # If activity is unknown, an idle GPU (or one without measured memory, which `unmeasured` has allowed) gets a
        # job, but no second one.
        return not gpu.is_idle(rules)
    if policy.predicts and gpu.busy_soon is not None:
        activity = min(activity, gpu.busy_soon)
    return activity > rules.smact_limit


def _is_slowed(jobs: Sequence[Job], gpu: Gpu, rules: Rules) -> bool:
    """Whether one of the jobs on the GPU would fall below its owner's minimum speed."""
    has_minimum = any(job.min_speed for job in jobs)  # no speed is below 0
    return has_minimum and rules.side_by_side(jobs, gpu.slot).slowed is not None


def _lost(job: Job, gpu: Gpu, rules: Rules) -> float:
    """Return the sum of speeds lost on the GPU by adding the job, rounded to a percent."""
    here = gpu.jobs
    if not here:
        return 0.0
    return round(rules.side_by_side([*here, job], gpu.slot).lost - rules.side_by_side(here, gpu.slot).lost, 2)


def _keep_room(job: Job, request: SlotRequest, made: PassPlan, rules: Rules, now: float) -> Room | None:
    """Choose the GPUs to keep for a waiting job: those ready soonest by time limits, then those with the fewest bytes
    to be freed. None if waiting for our own jobs does not help.

    Newcomers leave these bytes free, so a chosen GPU only gets freer, and the choice does not change between passes.
    """
    if not made.host.could_ever(job):
        return None
    deadline = came(job) + rules.patience
    ranked = []
    for gpu in made.gpus:
        barrier = closed(job, gpu, rules, now)
        foreign = barrier is not None or is_busy(gpu, made.policy, rules)  # we cannot wait for the activity of others
        if barrier in (Refusal.LOST, Refusal.DRAINED, Refusal.BOOKED) or (foreign and not gpu.holders):
            continue
        offer = gpu.offer(request, rules)
        if offer < request.least.promise:
            continue
        suits = not _is_slowed([*gpu.jobs, job], gpu, rules)
        missing = gpu.capacity - gpu.free
        if not request.alone:
            beside = sum(each.memory for each in gpu.holders if each.since >= deadline)
            needs = request.promise + request.margin
            missing = max(needs - gpu.free - (beside if beside + needs <= gpu.capacity else 0), 0)
        ranked.append((gpu.ready_at(request, suits, now), missing, gpu.job_count, gpu.position, offer))
    ranked.sort()
    places, ready = dict[int, tuple[SlotRequest, Refusal | None]](), made.host.ready_at(job, now)
    for rank in request.largest_first:
        need = request.of_rank(rank)
        place = next((each for each in ranked if each[-1] >= need.promise), None)
        if place is None:
            return None
        ranked.remove(place)
        gpu = made.gpus[place[3]]
        places[gpu.position] = (need, why_not(job, need, gpu, made, rules, now))
        ready = max(ready, place[0])
    return Room(job, places, deadline, ready)
