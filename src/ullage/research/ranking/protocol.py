"""The two-round protocol by which xMem judges estimators (Shi et al. 2025), as published and mended.

Round 1: did the estimator foresee whether the run fits on the card? Round 2: the run is repeated with the allocator
limited to the estimate. An estimation failure is a wrong answer in round 1 or running out of memory in round 2; what
the card has beyond the estimate of a success is memory conserved.

As published the limit includes the CUDA context, which a memory fraction does not cover, with the context measured in
the very run that is to be predicted; it is rounded to a hundredth of the card; and a run that is rightly said not to
fit conserves the whole card. Mended: the limit is the estimate of what the allocator needs, to the byte, with a
context known beforehand, and a run that does not fit conserves nothing.

Where there is no GPU, round 2 is a replay of the recorded history under that limit, which is exact; without a history
a run counts as a survivor if the limit is at least what it reserved, or if limit and context are at least what the
process took. Both are strict: on a card the allocator might have given cached segments back and gone on.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path

from ullage.allocator import History, survives
from ullage.hardware import GPU
from ullage.research.ranking.truth import MeasuredRun
from ullage.research.ranking.worker import Record

MENDED, PUBLISHED = "mended", "published"
VARIANTS = (MENDED, PUBLISHED)
REPLAY, RESERVED, PROCESS = "replay", "reserved", "process"


@dataclass(frozen=True, slots=True)
class Judgement:
    """What the protocol says of an estimate: bytes conserved, and by what round 2 was decided (`None`: it was not)."""

    success: bool
    conserved: int
    by: str | None


def judge(record: Record, run: MeasuredRun, card: GPU, variant: str = MENDED) -> Judgement | None:
    """Both rounds for one estimate; `None` where there is no estimate or nothing to compare with.

    >>> from ullage.hardware import gpu
    >>> run = MeasuredRun(id="r", row={}, family="MLPs", reserved=900 * 2**20, process=1700 * 2**20)
    >>> low = Record(estimator="x", run="r", gpu="H200", seconds=0, figure=800 * 2**20, kind="reserved")
    >>> judge(low, run, gpu("H200")), judge(low, run, gpu("H200"), PUBLISHED).success
    (Judgement(success=False, conserved=0, by='reserved'), True)
    """
    need = allocator_need(record, card)
    if need is None:
        return None
    measured = run.context if variant == PUBLISHED else None
    context = card.context or 0 if measured is None else measured
    whole = record.process if variant == MENDED and record.process is not None else need + context
    too_large = whole > card.usable
    if run.oom or too_large:
        right = run.oom and too_large
        return Judgement(right, card.usable if right and variant == PUBLISHED else 0, None)
    cap = need if variant == MENDED else round(100 * whole / card.usable) * card.usable // 100
    answer = second_round(run, cap, card)
    if answer is None:
        return None
    lived, by = answer
    return Judgement(lived, card.usable - whole if lived else 0, by)


def allocator_need(record: Record, card: GPU) -> int | None:
    """What the estimator says PyTorch's allocator needs: its reserved memory, or its figure less a context."""
    if record.figure is None:
        return None
    if record.kind != "process":
        return record.figure
    if record.reserved is not None:
        return record.reserved
    context = card.context or 0 if record.context is None else record.context
    return max(0, record.figure - context)


def bound_of(record: Record) -> Record | None:
    """The estimator's upper bound as an estimate of its own; `None` where it gives none."""
    if record.upper is None or record.upper == record.figure:
        return None
    name = f"{record.estimator} (upper)"
    figures = {"figure": record.upper, "process": record.upper, "reserved": None, "allocated": None, "upper": None}
    return Record(**asdict(record) | figures | {"estimator": name, "kind": "process"})


def second_round(run: MeasuredRun, cap: int, card: GPU) -> tuple[bool, str] | None:
    """Whether a run survives with its allocator limited to `cap`, and by what that was decided."""
    if run.reserved is None:
        return None if run.process is None else (cap + (card.context or 0) >= run.process, PROCESS)
    if run.history is None:
        return cap >= run.reserved, RESERVED
    if cap >= run.reserved:  # without a limit the replay reserves just that
        return True, REPLAY
    if run.allocated is not None and cap < run.allocated:
        return False, REPLAY
    return _survives(run.history, cap), REPLAY


@lru_cache(maxsize=4096)
def _survives(file: Path, cap: int) -> bool:
    return survives(_history(file), cap)


@lru_cache(maxsize=4)
def _history(file: Path) -> History:
    return History.load(file)
