"""One pass over the queue."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ullage.placement.ledger import Ledger
from ullage.placement.outcome import Outcome
from ullage.placement.rules import Rules
from ullage.placement.snapshot import Job, Running, Slot


def decide(
    policy: str,
    waiting: Sequence[Job],
    running: Sequence[Running],
    slots: Sequence[Slot],
    ledger: Ledger,
    rules: Rules,
    now: float,
    usage: Mapping[str, float] | None = None,
) -> Outcome:
    """Who goes where now. Changes nothing: write each `Decision` down with `ledger.accept(decision)`.

    `usage` is what each user used of late, in GPU-seconds, for the fair order.
    """
    raise NotImplementedError
