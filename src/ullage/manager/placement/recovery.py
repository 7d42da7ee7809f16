"""Retries of jobs that failed through no fault of their program: after lack of memory with more of it, at last on an
exclusive GPU; after a failure of the system unchanged, a few times."""

from dataclasses import dataclass
from typing import Literal, NamedTuple

from ullage.fields import described
from ullage.units import GIB, format_bytes


@dataclass(frozen=True)
class RecoveryRules:
    """How often a job is tried: `attempts` times if memory runs out, `others` more times if the system fails.

    Each lack of memory adds `step` bytes to the known need; after the `exclusive_after`-th, the job is exclusive.
    """

    attempts: int = 5
    others: int = 5
    step: int = 5 * GIB
    exclusive_after: int = described(
        3, "Out-of-memory failures before a job gets a GPU to itself.", metavar="N", least=1
    )


class Failure(NamedTuple):
    """A failed attempt: memory ran out ("memory"), it exceeded its promise ("over promise"), or the system failed
    ("system"); `before` counts such failures of the job (the first two as one).

    `promise`, `used` and `needed` are in bytes, None if unknown. `exclusive`: the job must have exclusive GPUs;
    `alone`: this attempt had them.
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
