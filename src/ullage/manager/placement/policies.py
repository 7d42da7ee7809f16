"""The policies by name. A policy decides the order in which GPUs are tried; the rules say which GPUs are allowed.

Each is a function decorated with `@policy(...)` that ranks a GPU: the smallest rank is tried first.
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
"""Rank a GPU, given the position of the GPU that got the last job (-1: none). Among equals, the first GPU is tried."""

Choose = Callable[[Job, SlotRequest, Sequence[Gpu], Rules, float], Sequence[Gpu]]
"""Choose GPUs for a job among suitable ones, best first; if there are too few, the job waits."""


@dataclass(frozen=True)
class Policy:
    """A policy. `oracle`: it knows the true memory. `alone`: every job gets its own GPUs. `backfills`: jobs may pass
    one that must wait.

    `predicts`: predicted speeds rank GPUs and admit jobs to busy ones, no job falls below its `min_speed`, and activity
    is measured over `busy_window` instead of the monitor's window. `keeps_speeds`: only `min_speed` is respected.
    `at_least`: another policy, whose plan is used if it starts more jobs. `choose`: the function of a custom policy,
    which makes the final choice for each job.
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
        """Return the memory that the job requests. A floor is the promise, too, and has no margin."""
        if job.gpus == 0:
            return SlotRequest(0, 0, 0, False, True)
        promise = job.true if self.oracle else job.promise
        if self.alone or job.exclusive or (promise is None and rules.unknown == "exclusive"):
            return SlotRequest(job.gpus, promise or 0, 0, True, promise is not None)
        if promise is None:
            return SlotRequest(job.gpus, rules.free_floor or 0, 0, False, False)
        return SlotRequest(job.gpus, promise, rules.margin, False, True, () if self.oracle else job.promises)

    def activity(self, gpu: Gpu) -> float | None:
        """Return the activity of a GPU that the policy uses."""
        return gpu.busy_now if self.predicts else gpu.load


POLICIES: dict[str, Policy] = {}


def policy(name: str, summary: str, **traits: Any) -> Callable[[Rank], Rank]:
    """Register a rank under a name; refuse a name that is taken."""

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
        listed = f"policies: {', '.join(POLICIES)}; " if nearest(name, POLICIES) else ""  # else the error lists them
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
    """Least busy GPU first, to avoid interference; among equals the fullest, to keep large gaps."""
    return (math.inf if gpu.busy_now is None else gpu.busy_now, gpu.job_count, gpu.free)


@policy("exclusive", "an idle GPU for each job", alone=True)
@policy("first-fit", "the first GPU that fits, by true memory", oracle=True)
def by_index(gpu: Gpu, last: int) -> tuple[Any, ...]:
    return ()


@policy("round-robin", "the next GPU in turn")
def next_in_turn(gpu: Gpu, last: int) -> tuple[Any, ...]:
    """GPUs after the last one first, then from the beginning."""
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
    """Lowest SM activity first; unknown activity last."""
    return (gpu.load is None, gpu.load or 0.0)


@policy("mug", "the most utilised GPU that still takes jobs")
def most_utilized(gpu: Gpu, last: int) -> tuple[Any, ...]:
    """Highest SM activity first; unknown activity last."""
    return (gpu.load is None, -(gpu.load or 0.0))
