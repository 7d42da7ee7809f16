"""The policies by name. A policy says in which order slots are tried; what a slot must have is in the rules.

Each is a function behind `@policy(...)` that gives a slot's rank: the smallest is tried first. The rank does not
depend on the job, so that slots are sorted once and not for every job.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ullage.errors import UnknownName, nearest
from ullage.manager.placement.candidates import Candidate
from ullage.manager.placement.rules import Rules, SlotRequest
from ullage.manager.placement.snapshot import Job

Rank = Callable[[Candidate, int], tuple[Any, ...]]
"""From a candidate and the position of the slot that got the last job (-1: none did). Of equals the first is tried."""

Choose = Callable[[Job, SlotRequest, Sequence[Candidate], Rules, float], Sequence[Candidate]]
"""Of the candidates that suit a job those that it should get, best first; with too few of them it waits."""


@dataclass(frozen=True)
class Policy:
    """A policy: `oracle` ones know the true memory, `alone` gives every job slots of its own, `backfills` lets jobs
    pass one that must wait, `predicts` heeds predicted speeds, `cyclic` ranks change with every placement. One of one's
    own has `choose`, which has the last word about each job.

    >>> find_policy("magm").summary
    'the GPU with the most memory free'
    """

    name: str
    summary: str
    rank: Rank
    oracle: bool = False
    alone: bool = False
    backfills: bool = False
    predicts: bool = False
    cyclic: bool = False
    choose: Choose | None = None


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
    """The names of all policies.

    >>> "ullage" in policies()
    True
    """
    return tuple(POLICIES)


def find_policy(name: str) -> Policy:
    """The policy of that name; an unknown name is answered with all of them."""
    if name not in POLICIES:
        listed = f"policies: {', '.join(POLICIES)}; " if nearest(name, POLICIES) else ""  # else they are listed anyway
        raise UnknownName("policy", name, POLICIES, hint=f"{listed}one of your own: FILE.py:FUNCTION")
    return POLICIES[name]


@policy(
    "ullage", "the GPU that will be least busy, of those the one with the tightest room", backfills=True, predicts=True
)
def least_expected_load(candidate: Candidate, last: int) -> tuple[Any, ...]:
    """Memory is safe by the ledger, so what is left to avoid is interference; tight room keeps large gaps whole."""
    return (math.inf if candidate.load is None else candidate.load, candidate.count, candidate.free)


@policy("exclusive", "an idle GPU for each job", alone=True)
@policy("first-fit", "the first GPU that fits, by true memory", oracle=True)
def by_index(candidate: Candidate, last: int) -> tuple[Any, ...]:
    """In the order of the indices."""
    return (candidate.position,)


@policy("round-robin", "the next GPU in turn", cyclic=True)
def next_in_turn(candidate: Candidate, last: int) -> tuple[Any, ...]:
    """Those after the last one first, then from the beginning."""
    return (candidate.position <= last, candidate.position)


@policy("magm", "the GPU with the most memory free")
@policy("worst-fit", "the GPU with the most memory free, by true memory", oracle=True)
def most_memory(candidate: Candidate, last: int) -> tuple[Any, ...]:
    """Most available GPU memory first."""
    return (-candidate.free, candidate.position)


@policy("best-fit", "the GPU with the least memory free that fits, by true memory", oracle=True)
def least_memory(candidate: Candidate, last: int) -> tuple[Any, ...]:
    """Least available GPU memory first."""
    return (candidate.free, candidate.position)


@policy("lug", "the least utilised GPU")
@policy("least-utilized", "the least utilised GPU, by true memory", oracle=True)
def least_utilized(candidate: Candidate, last: int) -> tuple[Any, ...]:
    """Lowest SM activity first; unknown is not low, so it comes last."""
    return (candidate.load is None, candidate.load or 0.0, candidate.position)


@policy("mug", "the most utilised GPU that still takes jobs")
def most_utilized(candidate: Candidate, last: int) -> tuple[Any, ...]:
    """Highest SM activity first; unknown is not high either."""
    return (candidate.load is None, -(candidate.load or 0.0), candidate.position)
