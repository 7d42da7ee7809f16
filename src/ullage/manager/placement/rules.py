"""The site's rules: when a GPU takes another job, and the order of the queue."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from ullage.errors import InvalidValue
from ullage.fields import described
from ullage.manager.placement.snapshot import Job, Slot
from ullage.units import GIB, format_bytes

GAIN = 0.15  # of a GPU: about the error of the predicted gain of a pair


class Speeds(NamedTuple):
    """The share of its speed alone, 0 to 1, that each workload keeps on a shared GPU, and the reason in words."""

    shares: Sequence[float]
    reason: str = ""


Prediction = Callable[[Sequence[str], Slot], Speeds | None]
"""Predict the speeds of workloads that share a slot, or return None. Adding a workload makes no other faster."""


class SideBySide(NamedTuple):
    """The predicted speeds of jobs that share a slot.

    `lost` is the sum of the speeds that they lose (each has 1 alone). `complete`: the speeds of all are predicted.
    `slowed` is a job that falls below its owner's minimum speed, to `speed`, for a `reason`. `starved`: some job falls
    below its owner's minimum or, without one, the general minimum. `done` is the work done per second, 1 for a job at
    full speed (None: unknown).
    """

    lost: float
    complete: bool = False
    starved: bool = False
    slowed: Job | None = None
    speed: float = 1.0
    reason: str = ""
    done: float | None = None


@dataclass(frozen=True)
class Rules:
    """All settings of placement. None switches a condition off.

    Memory: a job goes to a slot with `promise + margin` bytes free (an exclusive job needs no `margin`). A job whose
    promise is unknown is placed by `unknown`: "exclusive" gives it an idle slot to itself, "floor" a slot with
    `free_floor` bytes free, which become its promise. A slot counts as idle if others use at most `idle_memory`.
    `unmeasured` is for slots whose used memory is unknown: "alone" gives them one job at a time, "never" none.

    Activity: a slot is shared only while its SM activity is at most `smact_limit`. Published policies use the mean over
    `window` seconds; `ullage` uses the mean over `busy_window` or, if that is less, the activity expected once a job
    that starts now works. The mean does not fully include a job younger than the window, so part of its predicted
    activity (`Job.busy`, else `fresh_busy`) is added. A reading older than `stale_after` is unknown.

    Speed: `predict` returns the speeds of jobs that share a slot. It keeps a job away only if one of them would fall
    below its `Job.min_speed`. It lets a job join a busy slot if the work done there grows by `gain`, in jobs at full
    speed: two jobs that keep 40 and 80% gain 0.2.

    Queue: `backfill` lets jobs pass one that must wait (None: the policy decides). Room is kept for one job at a time
    that has waited for `patience` seconds. Every `ageing` seconds of waiting raise a job's priority by one. With
    `fair`, users take turns; a waiting job counts for `turn` GPU-seconds on each of its GPUs, or its part of one.
    """

    smact_limit: float | None = described(
        0.80, "Share a GPU only up to this SM activity, or off.", metavar="SHARE", several=True
    )
    free_floor: int | None = described(
        5 * GIB,
        "Free memory required for a job of unknown memory (with --unknown floor), or off.",
        metavar="SIZE",
        default="5GiB",
        several=True,
    )
    margin: int = described(
        2 * GIB, "Extra memory to leave free on a shared GPU.", metavar="SIZE", default="2GiB", several=True
    )
    unknown: Literal["exclusive", "floor"] = described(
        "exclusive",
        "A job of unknown memory gets a GPU to itself (exclusive) or one with --free-floor free (floor).",
        metavar="exclusive|floor",
    )
    max_jobs_per_gpu: int | None = None
    predict: Prediction | None = None
    gain: float = GAIN
    unmeasured: Literal["alone", "never"] = "alone"
    idle_memory: int = GIB
    window: float = 90.0
    busy_window: float = 5.0
    fresh_busy: float = 0.3
    stale_after: float | None = 30.0
    backfill: bool | None = None
    patience: float = 300.0
    ageing: float | None = 6 * 3600.0
    fair: bool = True
    turn: float = 600.0

    def __post_init__(self) -> None:
        for name, valid in (("unknown", ("exclusive", "floor")), ("unmeasured", ("alone", "never"))):
            if getattr(self, name) not in valid:
                raise InvalidValue(f"{name} must be {' or '.join(map(repr, valid))}, got {getattr(self, name)!r}")
        for name in (
            "margin",
            "idle_memory",
            "patience",
            "gain",
            "fresh_busy",
            "free_floor",
            "smact_limit",
            "stale_after",
        ):
            if not (getattr(self, name) or 0) >= 0:
                raise InvalidValue(f"{name} must be 0 or more, got {getattr(self, name)}")
        for name in ("window", "busy_window", "turn", "ageing", "max_jobs_per_gpu"):
            if getattr(self, name) is not None and not getattr(self, name) > 0:
                raise InvalidValue(f"{name} must be above 0, got {getattr(self, name)}")

    def busy_of(self, job: Job | None) -> float:
        """Return the SM activity to expect of a job: predicted, or `fresh_busy`."""
        return self.fresh_busy if job is None or job.busy is None else job.busy

    def side_by_side(self, jobs: Sequence[Job], slot: Slot) -> SideBySide:
        """Predict the speeds of jobs that share a slot.

        If one workload is unknown, all jobs count as losing as much as their owners accept. Jobs with known workloads
        are judged without the others, since another job makes none of them faster.

        >>> rules = Rules(predict=lambda works, slot: Speeds([0.6, 0.9], "both keep the memory busy"))
        >>> jobs = [Job(1, "ada", 0.0, work="a", min_speed=0.8), Job(2, "bob", 0.0, work="b", min_speed=0.5)]
        >>> both = rules.side_by_side(jobs, Slot("GPU-1", 0, "toy", total=1))
        >>> both.slowed.id, both.speed, both.lost
        (1, 0.6, 0.5)
        """
        known = [job for job in jobs if job.work is not None]
        complete = len(known) == len(jobs)
        if self.predict is None or len(jobs) < 2:
            return SideBySide(0.0, complete and len(jobs) < 2, done=float(len(known)))
        speeds = self.predict([str(job.work) for job in known], slot) if len(known) > 1 else None
        if speeds is None:
            return SideBySide(sum(1.0 - job.least_speed for job in jobs))
        lost = sum(1.0 - share for share in (speeds.shares if complete else [job.least_speed for job in jobs]))
        margins = [
            (round(share, 2) - job.least_speed, share, job) for share, job in zip(speeds.shares, known, strict=True)
        ]
        starved = any(left < 0 for left, _, _ in margins)
        both = SideBySide(lost, complete, starved, None, speeds.shares[-1], speeds.reason, sum(speeds.shares))
        limited = [each for each in reversed(margins) if each[0] < 0 and each[2].min_speed is not None]
        if not limited:
            return both
        _, speed, job = min(limited, key=lambda each: each[0])
        return both._replace(slowed=job, speed=speed)

    def gains(self, here: Sequence[Job], job: Job, slot: Slot) -> bool:
        """Whether all speeds are predicted, and the slot does more work with the job.

        >>> rules = Rules(predict=lambda works, slot: Speeds([0.82, 0.36] if len(works) > 1 else [1.0]))
        >>> small, large = Job(1, "ada", 0.0, work="a", min_speed=None), Job(2, "bob", 0.0, work="b", min_speed=None)
        >>> rules.gains([large], small, Slot("GPU-1", 0, "toy", total=1))
        True
        """
        before, after = self.side_by_side(here, slot), self.side_by_side([*here, job], slot)
        if not after.complete or after.starved or before.done is None or after.done is None:
            return False
        return round(after.done - before.done, 2) >= self.gain


class SlotRequest(NamedTuple):
    """The memory that a job requests on each of its slots: the `promise` in bytes and a `margin` to leave free, or all
    of the slot if `alone`. `known` is False if the job's own promise is unknown and the site's rule takes its place. If
    ranks differ, `promises` has the request of each, and `promise` is the largest."""

    gpus: int
    promise: int
    margin: int
    alone: bool
    known: bool
    promises: tuple[int, ...] = ()

    def of_rank(self, rank: int) -> "SlotRequest":
        return self._replace(promise=self.promises[rank]) if self.promises else self

    @property
    def least(self) -> "SlotRequest":
        """Return the request of the rank that needs least."""
        return self._replace(promise=min(self.promises)) if self.promises else self

    @property
    def largest_first(self) -> list[int]:
        """Return the ranks, largest first; a slot that holds one also holds those after it."""
        return sorted(range(self.gpus), key=lambda rank: -self.of_rank(rank).promise)

    def fits_in(self, sizes: Sequence[int]) -> bool:
        """Whether each rank gets its own slot among slots of these sizes, largest first.

        >>> SlotRequest(2, 9, 0, alone=False, known=True, promises=(4, 9)).fits_in([10, 5, 1])
        True
        """
        needs = [self.of_rank(rank).promise for rank in self.largest_first]
        return len(sizes) >= self.gpus and all(size >= need for size, need in zip(sizes, needs, strict=False))

    @property
    def text(self) -> str:
        """Return the request in words.

        >>> SlotRequest(2, 12 << 30, 2 << 30, alone=False, known=True).text
        '12.0 GiB on each of 2 GPUs'
        """
        if self.gpus == 0:
            return "no GPU"
        unknown = "" if self.known else " (its memory is unknown)"
        if self.alone:
            idle = "an idle GPU" if self.gpus == 1 else f"{self.gpus} idle GPUs"
            return f"{idle} to itself" + (f" with {format_bytes(self.promise)}" if self.known else unknown)
        if self.promises:
            return f"{', '.join(map(format_bytes, self.promises))} on {self.gpus} GPUs"
        where = "a GPU" if self.gpus == 1 else f"each of {self.gpus} GPUs"
        return f"{format_bytes(self.promise)} on {where}{unknown}"
