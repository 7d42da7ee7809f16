"""The policies by name. A policy says in which order GPUs are tried; what a GPU must have is in the rules.

Each is a function behind `@policy(...)` that ranks a GPU: the smallest rank is tried first.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ullage.errors import UnknownName, nearest
from ullage.manager.placement.gpus import Gpu
from ullage.manager.placement.rules import Rules, SlotRequest
from ullage.manager.placement.snapshot import Job

Rank = Callable[[Gpu, int], tuple[Any, ...]]
"""From a GPU and the position of the one that got the last job (-1: none did). Of equals the first is tried."""

Choose = Callable[[Job, SlotRequest, Sequence[Gpu], Rules, float], Sequence[Gpu]]
"""Choose GPUs for a job among those that suit it, best first; with too few of them it waits."""


@dataclass(frozen=True)
class Policy:
    """A policy: `oracle` ones know the true memory, `alone` gives every job GPUs of its own, `backfills` lets jobs pass
    one that must wait.

    `predicts`: predicted speeds rank GPUs and admit jobs to busy ones, no owner's `min_speed` is broken, and activity
    is that of `busy_window` instead of the monitor's window. `keeps_speeds`: of this only the `min_speed`. `at_least`:
    the policy with which a pass is also planned; that plan counts if it starts more jobs. A custom policy has `choose`,
    which has the last word about each job.
    """

    name: str
    summary: str
    rank: Rank
    oracle: bool = False
    alone: bool = False
    backfills: bool = False
    predicts: bool = False
    keeps_speeds: bool = False
    at_least: str | None = None
    choose: Choose | None = None

    def request(self, job: Job, rules: Rules) -> SlotRequest:
        """The memory that the job requests. The floor is a condition and a promise in one, so it has no margin."""
        if job.gpus == 0:
            return SlotRequest(0, 0, 0, False, True)
        promise = job.true if self.oracle else job.promise
        if self.alone or job.exclusive or (promise is None and rules.unknown == "exclusive"):
            return SlotRequest(job.gpus, promise or 0, 0, True, promise is not None)
        if promise is None:
            return SlotRequest(job.gpus, rules.free_floor or 0, 0, False, False)
        return SlotRequest(job.gpus, promise, rules.margin, False, True, () if self.oracle else job.promises)

    def activity(self, gpu: Gpu) -> float | None:
        """Return the activity of a GPU that the policy goes by."""
        return gpu.busy_now if self.predicts else gpu.load


POLICIES: dict[str, Policy] = {}


def policy(name: str, summary: str, **traits: Any) -> Callable[[Rank], Rank]:
    """Register a rank under a name; a name that is taken is refused."""

    def register(rank: Rank) -> Rank:
        if name in POLICIES:
            raise ValueError(f"the policy {name!r} is already registered: {POLICIES[name].summary}")
        POLICIES[name] = Policy(name, summary, rank, **traits)
        return rank

    return register


def policies() -> tuple[str, ...]:
    return tuple(POLICIES)


def find_policy(name: str) -> Policy:
    if name not in POLICIES:
        listed = f"policies: {', '.join(POLICIES)}; " if nearest(name, POLICIES) else ""  # else they are listed anyway
        raise UnknownName("policy", name, POLICIES, hint=f"{listed}one of your own: FILE.py:FUNCTION")
    return POLICIES[name]


@policy(
    "ullage",
    "the GPU that will be least busy, of those the one with the tightest room",
    backfills=True,
    predicts=True,
    at_least="magm",
)
def least_expected_load(gpu: Gpu, last: int) -> tuple[Any, ...]:
    """Memory is safe by the ledger, so the aim left is to avoid interference; tight room keeps large gaps whole."""
    return (math.inf if gpu.busy_now is None else gpu.busy_now, gpu.job_count, gpu.free)


@policy("exclusive", "an idle GPU for each job", alone=True)
@policy("first-fit", "the first GPU that fits, by true memory", oracle=True)
def by_index(gpu: Gpu, last: int) -> tuple[Any, ...]:
    return ()


@policy("round-robin", "the next GPU in turn")
def next_in_turn(gpu: Gpu, last: int) -> tuple[Any, ...]:
    """Those after the last one first, then from the beginning."""
    return (gpu.position <= last,)


@policy("magm", "the GPU with the most memory free")
@policy("worst-fit", "the GPU with the most memory free, by true memory", oracle=True)
def most_memory(gpu: Gpu, last: int) -> tuple[Any, ...]:
    """Most available GPU memory first."""
    return (-gpu.free,)


@policy("best-fit", "the GPU with the least memory free that fits, by true memory", oracle=True)
def least_memory(gpu: Gpu, last: int) -> tuple[Any, ...]:
    """Least available GPU memory first."""
    return (gpu.free,)


@policy("lug", "the least utilised GPU")
@policy("least-utilized", "the least utilised GPU, by true memory", oracle=True)
def least_utilized(gpu: Gpu, last: int) -> tuple[Any, ...]:
    """Lowest SM activity first; unknown is not low, so it comes last."""
    return (gpu.load is None, gpu.load or 0.0)


@policy("mug", "the most utilised GPU that still takes jobs")
def most_utilized(gpu: Gpu, last: int) -> tuple[Any, ...]:
    """Highest SM activity first; unknown is not high either."""
    return (gpu.load is None, -(gpu.load or 0.0))
