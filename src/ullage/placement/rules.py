"""The site's rules: what has to be true of a slot before a job is put there, and how patient the queue is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from ullage.errors import InvalidValue
from ullage.placement.snapshot import Job, Slot
from ullage.units import GIB

Slowdown = Callable[[Job, Sequence[Job], Slot], float | None]
"""How much longer the slowest of them would take, were the job put beside the others: 1.0 is not at all."""


@dataclass(frozen=True)
class Rules:
    """Every setting of a decision. None switches a condition off.

    Memory: a job of known need goes where `need + margin` is free (`margin` is for neighbours: a job alone needs
    none). A job of unknown need is placed by `unknown`: "exclusive" gives it an idle slot to itself, "floor" a slot
    with `free_floor` bytes free, which is then its promise. `idle_memory` is how much others may use on a slot that
    still counts as idle. `unmeasured` is for slots whose used memory is not known: "alone" gives them one job at a
    time, "never" none.

    Activity: a slot is shared only where the SM activity is at most `smact_limit`. A job that started less than
    `window` seconds ago is not yet in the mean, so its predicted activity (`Job.busy`, else `fresh_busy`) is added in
    part. A reading older than `stale_after` is unknown. `slowdown` predicts slowdowns, at most `slowdown_limit`.

    Queue: `backfill` lets jobs pass one that must wait (None: as the policy has it); one that waited for `patience`
    seconds reserves slots, `reservations` of them at a time; every `ageing` seconds of waiting raise a job's priority
    by one; `fair` lets users take turns, in which a waiting job counts for `turn` GPU-seconds on each of its GPUs.

    >>> Rules(smact_limit=None, unknown="floor").free_floor == 5 * GIB
    True
    """

    smact_limit: float | None = 0.80
    free_floor: int | None = 5 * GIB
    margin: int = 2 * GIB
    unknown: Literal["exclusive", "floor"] = "exclusive"
    max_jobs_per_gpu: int | None = None
    slowdown: Slowdown | None = None
    slowdown_limit: float = 1.5
    unmeasured: Literal["alone", "never"] = "alone"
    idle_memory: int = GIB
    window: float = 90.0
    fresh_busy: float = 0.3
    stale_after: float | None = 30.0
    backfill: bool | None = None
    patience: float = 300.0
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
            "fresh_busy",
            "free_floor",
            "smact_limit",
            "stale_after",
            "reservations",
        ):
            if (getattr(self, name) or 0) < 0:
                raise InvalidValue(f"needed {name} of 0 or more; found {getattr(self, name)}")
        for name in ("window", "turn", "ageing", "max_jobs_per_gpu", "slowdown_limit"):
            if getattr(self, name) is not None and not getattr(self, name) > 0:
                raise InvalidValue(f"needed {name} above 0; found {getattr(self, name)}")
