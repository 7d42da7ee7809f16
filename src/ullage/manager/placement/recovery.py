"""What becomes of a job whose attempt failed through no fault of its program: another attempt, with more room, or none.

out of memory: more room by steps, at last a GPU to itself
the system failed (a GPU was lost): the same again, a few times
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from ullage.fields import described
from ullage.units import GIB, format_bytes


@dataclass(frozen=True)
class RecoveryRules:
    """How often a job is tried: `attempts` times if memory runs out, `others` more times if the system fails.

    Each time that memory runs out the job asks for `step` bytes more than is known to be too little; the
    `exclusive_after`-th time for a GPU to itself. With 1 that is its very next attempt, as RAD-RM does it.
    """

    attempts: int = 5
    others: int = 5
    step: int = 5 * GIB
    exclusive_after: int = described(
        3, "Number of times a job runs out of memory until it gets a GPU to itself.", metavar="N", least=1
    )


class Failure(NamedTuple):
    """An attempt that failed. `kind` says how: memory ran out ("memory"), it was stopped because it took more than its
    promise ("over promise"), or the system failed ("system"); `before` is how often this happened to the job already
    (the first two count as one).

    `promise` is what the job was promised, `used` the most it was seen to use, `needed` what it would have needed by
    its own words; None is unknown. `exclusive`: the job is to have its GPUs to itself; `alone`: this time it had.
    """

    kind: Literal["memory", "over promise", "system"]
    before: int = 0
    promise: int | None = None
    used: int | None = None
    needed: int | None = None
    exclusive: bool = False
    alone: bool = False


class RetryDecision(NamedTuple):
    """Whether a job gets another attempt, its promise then, and the reason."""

    again: bool
    promise: int | None
    exclusive: bool
    text: str


def more_memory(promise: int | None, used: int | None, largest: int, rules: RecoveryRules) -> int | None:
    """Return the promise of a job that runs again with more memory: a step more, at most the largest GPU."""
    known = max(promise or 0, used or 0)
    return min(known + rules.step, largest) if known and largest else None


def after_failure(failure: Failure, largest: int, rules: RecoveryRules) -> RetryDecision:
    """Decide about another attempt; `largest` is the memory of the largest GPU."""
    same = RetryDecision(True, failure.promise, failure.exclusive, "tried again")
    count = failure.before + 1
    if failure.kind == "system":
        if count > rules.others:
            return same._replace(again=False, text=f"{count} such failures are the limit")
        return same
    if count >= rules.attempts:
        return same._replace(again=False, text=f"{rules.attempts} attempts are the limit")
    if failure.alone and failure.kind == "memory":
        text = "it had a GPU for itself, so no more room can be given"
        return same._replace(again=False, exclusive=True, text=text)
    known = max(failure.promise or 0, failure.used or 0, failure.needed or 0)
    promise = known + rules.step
    if count >= rules.exclusive_after or promise >= largest or not known:
        return RetryDecision(True, min(known, largest) or None, True, "next with a GPU for itself")
    return RetryDecision(True, promise, failure.exclusive, f"next with {format_bytes(promise)}")
