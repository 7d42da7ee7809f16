"""The order of the queue: priority, recovery, fair share, arrival; and the recent usage of users."""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from operator import attrgetter
from typing import NamedTuple

from ullage.manager.placement.rules import Rules
from ullage.manager.placement.snapshot import Job

_ID, _SUBMITTED, _USER = attrgetter("id"), attrgetter("submitted"), attrgetter("user")
_KIND = attrgetter("recovery", "priority")
_LEAST_PART = 1 / 16  # of a GPU: the least that a job counts for in fair shares
_USUAL_SPEED = 0.5  # share of its speed alone; a job that asks for more keeps others away


def came(job: Job) -> float:
    """Return when a job last came into the queue."""
    return job.submitted if job.queued is None else job.queued


def waited(job: Job, now: float) -> float:
    """Return how long a job has been in the queue since it last came into it."""
    return now - came(job)


def effective_priority(job: Job, rules: Rules, now: float) -> int:
    """Return the priority, plus one for every `rules.ageing` seconds of waiting."""
    return job.priority + (0 if rules.ageing is None else max(int(waited(job, now) / rules.ageing), 0))


def fair_order(jobs: Sequence[Job], rules: Rules, now: float, usage: Mapping[str, float] | None = None) -> list[Job]:
    """Return jobs in the order in which they are placed: by priority, then recovery first, fair share and arrival.

    Fair share: every user has an account that starts at the user's recent `usage` (GPU-seconds). Each of the user's
    jobs, in order, gets the level of the account divided by the user's share, and raises the account by `rules.turn`
    for each GPU, or for the `part` of it that the job will hold. So users with equal shares alternate, eight jobs that
    share a GPU are one turn, a user with twice the share has two turns, and one with much recent use comes later.
    """
    if len(jobs) < 2:
        return list(jobs)
    queue = sorted(jobs, key=_ID)
    queue.sort(key=_SUBMITTED)
    # The queue is sorted by arrival: if its first job has not aged, which is the usual case, none has.
    aged = rules.ageing is not None and now - queue[0].submitted >= rules.ageing
    classes: dict[tuple[int, bool], list[Job]] = defaultdict(list)
    if not aged and len(set(map(_KIND, queue))) == 1:  # usual, and fast for thousands of jobs
        classes[0, False] = queue
    else:
        for job in queue:
            priority = effective_priority(job, rules, now) if aged else job.priority
            classes[-priority, not job.recovery].append(job)
    accounts = dict(usage or {})
    ordered: list[Job] = []
    for rank in sorted(classes):
        ordered += _taking_turns(classes[rank], accounts, rules.turn) if rules.fair else classes[rank]
    return ordered


def _taking_turns(queue: list[Job], accounts: dict[str, float], turn: float) -> list[Job]:
    """Sort one class of the queue by the level of each job, equal levels by arrival."""
    users = set(map(_USER, queue))
    if len(users) == 1:  # a single user needs no turns
        user = users.pop()
        accounts[user] = accounts.get(user, 0.0) + turn * sum([(job.gpus or 1) * job.part for job in queue])
        return queue
    levels = []
    for job in queue:
        account = accounts.get(job.user, 0.0)
        accounts[job.user] = account + turn * (job.gpus or 1) * job.part  # jobs without a GPU take turns, too
        levels.append(account / job.share)
    return [queue[number] for number in sorted(range(len(queue)), key=levels.__getitem__)]


def in_order(
    waiting: Sequence[Job],
    arrays: Mapping[int | None, int],
    rules: Rules,
    now: float,
    usage: Mapping[str, float] | None,
) -> list[Job]:
    """Return jobs in the fair order, with jobs of throttled arrays at the end."""
    first, later = _by_throttle(waiting, arrays)
    return fair_order(first, rules, now, usage) + fair_order(later, rules, now, usage)


def _by_throttle(waiting: Sequence[Job], arrays: Mapping[int | None, int]) -> tuple[Sequence[Job], Sequence[Job]]:
    """Return the jobs that may start, and those that must wait for others of their throttled array. The latter come
    last, so that a long array does not use up the turns of its user."""
    throttled = [job for job in waiting if job.throttle is not None]
    if not throttled:
        return waiting, ()
    counts, later = Counter(arrays), set()
    for job in sorted(throttled, key=lambda job: (not job.recovery, -job.priority, job.submitted, job.id)):
        counts[job.array] += 1
        if counts[job.array] > (job.throttle or 0):
            later.add(job.id)
    return [job for job in waiting if job.id not in later], [job for job in throttled if job.id in later]


def part_of_gpu(promise: int | None, total: int, alone: bool, busy: float = 0.0) -> float:
    """Return the part of a GPU that a job holds, 0 to 1: of its memory or of its activity, whichever is more.

    All promised memory counts, since no other job can have it. `busy` is the job's share of the GPU's activity, or its
    claim: a job that needs little memory but keeps the GPU busy leaves no room for others either. An exclusive job
    holds all of its GPU.

    >>> part_of_gpu(5 << 30, 40 << 30, alone=False), part_of_gpu(5 << 30, 40 << 30, alone=False, busy=0.6)
    (0.125, 0.6)
    """
    if alone or promise is None or not total:
        return 1.0
    return min(1.0, max(promise / total, busy, _LEAST_PART))


def claimed(min_speed: float | None, usual: float | None) -> float:
    """Return the part of a GPU, 0 to 1, that a job claims by a minimum speed above the `usual` one. A `min_speed` of
    None claims nothing; a `usual` of None means one half."""
    usual = _USUAL_SPEED if usual is None else usual
    if min_speed is None or usual >= 1.0:
        return 0.0
    return max(0.0, (min_speed - usual) / (1.0 - usual))


def decay(used: float, seconds: float, half_life: float) -> float:
    """Return the weight of GPU-seconds some time after their use; it halves with each half-life."""
    return used * float(0.5 ** (max(seconds, 0.0) / half_life))


def held(gpus: float, seconds: float, half_life: float) -> float:
    """Return the weight, at its end, of a time on a number of GPUs; each second decays by itself."""
    return gpus * half_life / math.log(2.0) * (1.0 - decay(1.0, seconds, half_life))


class Account(NamedTuple):
    """A user's usage in GPU-seconds, as weighted `at` a time."""

    used: float
    at: float

    def worth(self, now: float, half_life: float) -> float:
        """Return its present weight."""
        return decay(self.used, now - self.at, half_life)

    def charged(self, used: float, at: float, half_life: float) -> "Account":
        """Return the account with GPU-seconds added, both weighted at the later of the two times."""
        late = max(at, self.at)
        return Account(self.worth(late, half_life) + decay(used, late - at, half_life), late)


class UsageAccounts:
    """The recent usage of users, kept up by reports of each change of their GPUs."""

    def __init__(self, half_life: float) -> None:
        self._half_life = half_life
        self._accounts: dict[str, tuple[Account, float]] = {}  # account and GPUs held since its time, by user

    def hold(self, user: str, gpus: float, now: float) -> None:
        """Add to a user's GPUs, or remove with a negative number."""
        account, before = self._charged(user, now)
        self._accounts[user] = account, before + gpus

    def usage(self, now: float, users: Iterable[str] | None = None) -> dict[str, float]:
        """Return present usage in GPU-seconds, of all users or of `users`."""
        names = self._accounts.keys() if users is None else self._accounts.keys() & users
        return {user: self._charged(user, now)[0].used for user in names}

    def _charged(self, user: str, now: float) -> tuple[Account, float]:
        account, gpus = self._accounts.get(user, (Account(0.0, now), 0.0))
        used = held(gpus, now - account.at, self._half_life)
        return account.charged(used, now, self._half_life), gpus
