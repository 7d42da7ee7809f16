"""The site's rules: what has to be true of a slot before a job is put there, and how patient the queue is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from ullage.errors import InvalidValue
from ullage.manager.placement.snapshot import Job, Slot
from ullage.units import GIB, format_bytes

GAIN = 0.15  # of a GPU: predicted gains of a pair are off by about as much


class Speeds(NamedTuple):
    """What works that share a slot keep of the speed that each has alone, 0 to 1, and why, in words."""

    shares: Sequence[float]
    reason: str = ""


Prediction = Callable[[Sequence[str], Slot], Speeds | None]
"""How fast works run side by side on a slot; None where that is not known. Another work makes none of them faster."""


class SideBySide(NamedTuple):
    """Jobs that share a slot: what they have `lost` of their speeds in all (each has 1 alone), and which is `slowed`
    below what its owner accepts, to which `speed` and why. Where none is, `speed` is that of the newest. `foretold`:
    all speeds are predicted. `done` is what those whose works are known get done, each 1 alone (None: not known).
    `pays`: with the newest, enough more gets done."""

    lost: float
    foretold: bool = False
    slowed: Job | None = None
    speed: float = 1.0
    reason: str = ""
    done: float | None = None
    pays: bool = True


@dataclass(frozen=True)
class Rules:
    """Every setting of a decision. None switches a condition off.

    Memory: a job goes where its `promise + margin` is free (`margin` is for neighbours: a job alone needs none). A
    job whose promise is unknown is placed by `unknown`: "exclusive" gives it an idle slot to itself, "floor" a slot
    with `free_floor` bytes free, which is then its promise. `idle_memory` is how much others may use on a slot that
    still counts as idle. `unmeasured` is for slots whose used memory is not known: "alone" gives them one job at a
    time, "never" none.

    Activity: a slot is shared only where the SM activity is at most `smact_limit`. A job that started less than
    `window` seconds ago is not yet in the mean, so its predicted activity (`Job.busy`, else `fresh_busy`) is added in
    part. A reading older than `stale_after` is unknown.

    Speed: `predict` says how fast jobs run side by side. None is put where one of them, itself or another, would fall
    below its own `Job.min_speed`. Where the owner of one did not say what it is to keep, all on the slot together must
    get more done by `gain`, in jobs at full speed: two that keep 40 and 80 % gain 0.2. Where the speeds of all are
    foretold, they decide, and `smact_limit` does not matter.

    Of a user's jobs those go first that cost the least speed where they would go, but none passes one that came
    before it by more than that one's patience (below), or `pairing` seconds. With 0 they go in the order of arrival.

    Queue: `backfill` lets jobs pass one that must wait (None: as the policy has it); one that waited for `patience`
    seconds reserves slots, `reservations` of them at a time. Where slots take longer than that to come free, it is as
    patient as they take, up to `longest_patience`. Every `ageing` seconds of waiting raise a job's priority
    by one; `fair` lets users take turns, in which a waiting job counts for `turn` GPU-seconds on each of its GPUs (or
    its part of one).

    >>> Rules(smact_limit=None, unknown="floor").free_floor == 5 * GIB
    True
    """

    smact_limit: float | None = 0.80
    free_floor: int | None = 5 * GIB
    margin: int = 2 * GIB
    unknown: Literal["exclusive", "floor"] = "exclusive"
    max_jobs_per_gpu: int | None = None
    predict: Prediction | None = None
    gain: float = GAIN
    unmeasured: Literal["alone", "never"] = "alone"
    idle_memory: int = GIB
    window: float = 90.0
    fresh_busy: float = 0.3
    stale_after: float | None = 30.0
    backfill: bool | None = None
    patience: float = 300.0
    longest_patience: float = 3600.0
    pairing: float = 3600.0
    ageing: float | None = 6 * 3600.0
    reservations: int = 1
    fair: bool = True
    turn: float = 600.0

    def __post_init__(self) -> None:
        for name in ("unknown", "unmeasured"):
            valid = {"unknown": ("exclusive", "floor"), "unmeasured": ("alone", "never")}[name]
            if getattr(self, name) not in valid:
                raise InvalidValue(f"needed {name} = {' or '.join(map(repr, valid))}; found {getattr(self, name)!r}")
        for name in (
            "margin",
            "idle_memory",
            "patience",
            "longest_patience",
            "pairing",
            "gain",
            "fresh_busy",
            "free_floor",
            "smact_limit",
            "stale_after",
            "reservations",
        ):
            if not (getattr(self, name) or 0) >= 0:
                raise InvalidValue(f"needed {name} of 0 or more; found {getattr(self, name)}")
        for name in ("window", "turn", "ageing", "max_jobs_per_gpu"):
            if getattr(self, name) is not None and not getattr(self, name) > 0:
                raise InvalidValue(f"needed {name} above 0; found {getattr(self, name)}")

    def side_by_side(self, jobs: Sequence[Job], slot: Slot) -> SideBySide:
        """What becomes of jobs that share a slot, the newest last.

        Where the work of one is not known, all count as if they lost what their owners accept, and those that are known
        are judged as if they were alone with each other: another one makes none of them faster.

        >>> rules = Rules(predict=lambda works, slot: Speeds([0.6, 0.9], "both keep the memory busy"))
        >>> jobs = [Job(1, "ada", 0.0, work="a", min_speed=0.8), Job(2, "bob", 0.0, work="b", min_speed=0.5)]
        >>> found = rules.side_by_side(jobs, Slot("GPU-1", 0, "toy", total=1))
        >>> found.slowed.id, found.speed, found.lost
        (1, 0.6, 0.5)
        """
        if self.predict is None or len(jobs) < 2:
            return SideBySide(0.0, done=float(sum(job.work is not None for job in jobs)))
        known = [job for job in jobs if job.work is not None]
        speeds = self.predict([str(job.work) for job in known], slot) if len(known) > 1 else None
        if speeds is None:
            return SideBySide(
                sum(1.0 - job.least_speed for job in jobs), done=1.0 * len(known) if len(known) < 2 else None
            )
        foretold = len(known) == len(jobs)
        lost = sum(1.0 - share for share in (speeds.shares if foretold else [job.least_speed for job in jobs]))
        below = [
            (round(share, 2) - job.least_speed, share, job) for job, share in zip(known, speeds.shares, strict=True)
        ]
        left, speed, slowed = min(reversed(below), key=lambda each: each[0])
        done = sum(speeds.shares)
        if left < 0:
            return SideBySide(lost, foretold, slowed, speed, speeds.reason, done)
        return SideBySide(lost, foretold, None, speeds.shares[-1], speeds.reason, done)

    def joining(self, here: Sequence[Job], job: Job, slot: Slot) -> SideBySide:
        """What becomes of jobs on a slot, and of one that joins them; `lost` is what they lose more than before.

        >>> rules = Rules(predict=lambda works, slot: Speeds([0.82, 0.36] if len(works) > 1 else [1.0]))
        >>> small, large = Job(1, "ada", 0.0, work="a", min_speed=None), Job(2, "bob", 0.0, work="b", min_speed=None)
        >>> found = rules.joining([large], small, Slot("GPU-1", 0, "toy", total=1))
        >>> round(found.lost, 2), found.pays
        (0.82, True)
        """
        before, after = self.side_by_side(here, slot), self.side_by_side([*here, job], slot)
        known = [each for each in (*here, job) if each.work is not None]
        is_weighed = job.work is not None and any(each.min_speed is None for each in known)
        gained = None if before.done is None or after.done is None else round(after.done - before.done, 2)
        pays = not is_weighed or gained is None or gained >= self.gain
        return after._replace(lost=after.lost - before.lost, pays=pays)


class SlotRequest(NamedTuple):
    """What a job asks of each of its slots: the `promise` in bytes, a `margin` left free beside neighbours, or all of
    it `alone`. `known` is False where the job's own promise is unknown and the site's rule takes its place. Where ranks
    differ, `promises` has what each asks of its slot, and `promise` is the largest."""

    gpus: int
    promise: int
    margin: int
    alone: bool
    known: bool
    promises: tuple[int, ...] = ()

    def of_rank(self, rank: int) -> SlotRequest:
        """What one rank asks of its slot."""
        return self._replace(promise=self.promises[rank]) if self.promises else self

    @property
    def least(self) -> int:
        """What the rank that asks for least asks of its slot."""
        return min(self.promises, default=self.promise)

    @property
    def largest_first(self) -> list[int]:
        """The ranks, those that ask for most first: a slot that holds one of them holds all that come after it."""
        return sorted(range(self.gpus), key=lambda rank: -self.of_rank(rank).promise)

    def fits_in(self, sizes: Sequence[int]) -> bool:
        """Whether each rank finds a slot of its own among those of these sizes, the largest first.

        >>> SlotRequest(2, 9, 0, alone=False, known=True, promises=(4, 9)).fits_in([10, 5, 1])
        True
        """
        asked = sorted(self.promises, reverse=True)
        return len(sizes) >= self.gpus and all(size >= least for size, least in zip(sizes, asked, strict=False))

    @property
    def text(self) -> str:
        """The request in words.

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


@dataclass(frozen=True)
class RequestMaker:
    """How asks are made under a policy: an `oracle` knows true memory, `alone` gives every job slots of its own.

    >>> RequestMaker(Rules(unknown="floor"), oracle=False, alone=False).of(Job(1, "ada", 0.0)).text
    '5.00 GiB on a GPU (its memory is unknown)'
    """

    rules: Rules
    oracle: bool
    alone: bool

    def of(self, job: Job) -> SlotRequest:
        """What the job asks for. The floor is a condition and a promise in one, so no margin is added to it."""
        if job.gpus == 0:
            return SlotRequest(0, 0, 0, False, True)
        promise, rules = job.true if self.oracle else job.promise, self.rules
        if self.alone or job.exclusive or (promise is None and rules.unknown == "exclusive"):
            return SlotRequest(job.gpus, promise or 0, 0, True, promise is not None)
        if promise is None:
            return SlotRequest(job.gpus, rules.free_floor or 0, 0, False, False)
        by_rank = () if self.oracle else job.promises
        return SlotRequest(job.gpus, promise, rules.margin, False, True, by_rank)
