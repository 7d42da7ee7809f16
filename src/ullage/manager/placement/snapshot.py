"""The input of a decision: GPUs as they are now, waiting jobs, running jobs.

All of it is plain data: bytes as int, times as seconds on one clock, unknown as None. Nothing here measures.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ullage.errors import InvalidValue
from ullage.units import format_bytes

LEAST_SPEED = 0.25  # share of its speed alone that a job without a minimum speed keeps


class HostShare(NamedTuple):
    """Processor cores and bytes of host memory: the total for jobs, the request of one job, or the free part."""

    cores: int = 0
    memory: int = 0

    def plus(self, other: "HostShare") -> "HostShare":
        return HostShare(self.cores + other.cores, self.memory + other.memory)

    def minus(self, other: "HostShare") -> "HostShare":
        """Return the difference, which may be negative."""
        return HostShare(self.cores - other.cores, self.memory - other.memory)

    def holds(self, other: "HostShare") -> bool:
        """Whether both are enough; a request of zero always fits."""
        return (other.cores <= self.cores or not other.cores) and (other.memory <= self.memory or not other.memory)

    @property
    def text(self) -> str:
        """Return cores and memory in words, without zeros."""
        cores = f"{self.cores} core{'' if self.cores == 1 else 's'}" if self.cores else ""
        memory = f"{format_bytes(self.memory)} of host memory" if self.memory else ""
        return " and ".join(filter(None, (cores, memory)))


NO_SHARE = HostShare()


class Activity(NamedTuple):
    """How busy a GPU was: means over the monitor's window, 0 to 1; `age` is the seconds since the last reading."""

    gract: float | None = None
    smact: float | None = None
    smocc: float | None = None
    drama: float | None = None
    age: float | None = None


@dataclass(frozen=True)
class Booking:
    """A time from `begin` to `end` in which a slot is for some users only. `text` describes it."""

    id: int
    begin: float
    end: float
    text: str


@dataclass(frozen=True)
class Slot:
    """A place for jobs: a whole GPU, or one MIG instance (`mig=True`), which takes one job at a time.

    `total` is for jobs, `used` by all processes (None: not measured), `foreign` by others than our jobs. `busy_now` is
    the activity over the last seconds (None: as `activity`). A drained slot gets no new job; a lost one does not
    answer. `bookings` keep jobs of other users away.
    """

    id: str
    index: int
    name: str
    total: int
    used: int | None = None
    activity: Activity = Activity()
    mig: bool = False
    drained: bool = False
    lost: bool = False
    foreign: int = 0
    bookings: tuple[Booking, ...] = ()
    busy_now: float | None = None

    def read_again(self, used: int | None, activity: Activity, busy_now: float | None) -> "Slot":
        """Return the slot with another reading, faster than `replace`: a simulation does this millions of times."""
        slot = object.__new__(Slot)
        slot.__dict__.update(self.__dict__, used=used, activity=activity, busy_now=busy_now)
        return slot

    def booked(self, job: "Job", now: float) -> Booking | None:
        """Return a booking for others during which the job might still run if it started now."""
        for each in self.bookings:
            if each.id not in job.bookings and now < each.end and job.ends_by(now, now) > each.begin:
                return each
        return None


@dataclass(frozen=True)
class Job:
    """A waiting or running job.

    `promise` is the memory to promise on each of its `gpus` (None: unknown). If ranks differ, `promises` has that of
    each, and `promise` is the largest. `true` is the real need, for oracles. `busy` is its predicted SM activity alone;
    `work` names its workload, for predicted speeds (None: unknown). `min_speed` is the share of its speed alone that
    its owner wants to keep (None: no wish). `queued` is the time when it last came into the queue (None: when
    submitted). For fair shares, `share` is the weight of its user and `part` the part of each GPU that it holds. At
    most `throttle` jobs of its `array` run at once (None: any number). `host` is its share of the host; `bookings` are
    those that it may use.
    """

    id: int
    user: str
    submitted: float
    gpus: int = 1
    promise: int | None = None
    true: int | None = None
    exclusive: bool = False
    priority: int = 0
    recovery: bool = False
    busy: float | None = None
    work: str | None = None
    min_speed: float | None = 0.0
    time_limit: float | None = None
    share: float = 1.0
    part: float = 1.0
    queued: float | None = None
    array: int | None = None
    throttle: int | None = None
    host: HostShare = NO_SHARE
    bookings: frozenset[int] = frozenset()
    promises: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.gpus < 0:
            raise InvalidValue(f"a job cannot have fewer than no GPUs; job {self.id} asks for {self.gpus}")
        if self.promises and (len(self.promises) != self.gpus or max(self.promises) != self.promise):
            raise InvalidValue(
                f"job {self.id} must have a promise for each of {self.gpus} GPUs, the largest of them {self.promise}, "
                f"got {self.promises}"
            )
        if min(self.host) < 0:
            raise InvalidValue(f"cores and host memory cannot be negative; job {self.id} asks for {tuple(self.host)}")
        if min(self.promise or 0, self.true or 0, *self.promises) < 0:
            raise InvalidValue(f"memory cannot be negative; job {self.id} asks for {self.promise} (true: {self.true})")
        if self.min_speed is not None and not 0 <= self.min_speed <= 1:
            raise InvalidValue(f"the min_speed of job {self.id} must be from 0 to 1, got {self.min_speed}")
        if not self.share > 0:
            raise InvalidValue(f"a share must be above 0; job {self.id} of {self.user} has {self.share}")

    @property
    def least_speed(self) -> float:
        """Return the least share of its speed alone that the job must keep."""
        return LEAST_SPEED if self.min_speed is None else self.min_speed

    def ends_by(self, since: float, now: float) -> float:
        """Return its latest end if it started at `since`; infinite without a time limit."""
        return math.inf if self.time_limit is None else max(since + self.time_limit, now)


@dataclass(frozen=True)
class Running:
    """A placed job, its slots, and the time of its placement."""

    job: Job
    slots: tuple[str, ...]
    since: float


@dataclass(frozen=True)
class Decision:
    """The decision to put a job on slots and promise it `promise` bytes on each; `exclusive`: no other job may join it.

    `host` is its share of the host. If ranks differ, `promises` has the bytes on each slot, in the order of ranks.
    """

    job: int
    slots: tuple[str, ...]
    promise: int
    exclusive: bool
    host: HostShare = NO_SHARE
    promises: tuple[int, ...] = ()

    @property
    def memory(self) -> dict[str, int]:
        """Return the promised memory by slot."""
        return by_slot(self.slots, self.promise, self.promises)


def by_slot(slots: Sequence[str], promise: int | None, promises: Sequence[int]) -> dict[str, int]:
    """Return a job's promise on each of its slots: the same on all, or those of its ranks in order.

    >>> by_slot(["GPU-1", "GPU-2"], 12, []), by_slot(["GPU-1", "GPU-2"], 12, [5, 12])
    ({'GPU-1': 12, 'GPU-2': 12}, {'GPU-1': 5, 'GPU-2': 12})
    """
    return dict(zip(slots, promises, strict=True)) if promises else dict.fromkeys(slots, promise or 0)
