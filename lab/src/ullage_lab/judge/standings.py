"""The ranking of estimators by the measures of their own field, over measured runs.

One measure is the two-round protocol by which xMem judges estimators (Shi et al. 2025), as published and corrected.
Round 1: did the estimator predict whether the run fits on the GPU? Round 2: the run is repeated with the allocator
limited to the estimate. An estimation failure is a wrong answer in round 1 or running out of memory in round 2; what
the card has beyond the estimate of a success is memory conserved.

As published the limit includes the CUDA context, which a memory fraction does not cover, with the context measured in
the very run that is to be predicted; it is rounded to a hundredth of the card; and a run that is rightly said not to
fit conserves the whole card. Mended: the limit is the estimate of what the allocator needs, to the byte, with a
context known beforehand, and a run that does not fit conserves nothing.

Where there is no GPU, round 2 is a replay of the recorded history under that limit. It is exact except for the
addresses of segments, which decide between free blocks of one size. Without a history a run counts as a survivor if
the limit is at least what it reserved, or if limit and context are at least what the process took. Both are
strict: on a card the allocator might have given cached segments back and gone on.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from ullage.allocator import CachingAllocator, History, OutOfMemory, RequestLog
from ullage.allocator.blocks import ALLOC, FREE_COMPLETED, SEGMENT_FREE
from ullage.hardware import GPU
from ullage.hardware import gpu as find_gpu
from ullage.measuring.accuracy import quantile
from ullage.units import format_bytes, format_duration
from ullage_lab.judge.truth import MeasuredRun, TruthSet
from ullage_lab.judge.worker import Record

MENDED, PUBLISHED = "mended", "published"
VARIANTS = (MENDED, PUBLISHED)
REPLAY, RESERVED, PROCESS, OWN = "replay", "reserved", "process", "own"
_history = lru_cache(maxsize=4)(History.load)
MOST_REASONS = 5


@dataclass(frozen=True, slots=True)
class Judgement:
    """The protocol's result for an estimate: bytes conserved, and the basis of round 2 (`None`: not decided)."""

    success: bool
    conserved: int
    by: str | None


def judge(record: Record, run: MeasuredRun, card: GPU, variant: str = MENDED) -> Judgement | None:
    """Return both rounds for one estimate; `None` without an estimate or a measured figure.

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
    """Return the estimator's figure for PyTorch's allocator: its reserved memory, or its figure minus a context."""
    if record.figure is None:
        return None
    if record.kind != "process":
        return record.figure
    if record.reserved is not None:
        return record.reserved
    context = card.context or 0 if record.context is None else record.context
    return max(0, record.figure - context)


def bound_of(record: Record) -> Record | None:
    """Return the estimator's upper bound as a separate estimate; `None` if it has none."""
    if record.upper is None or record.upper == record.figure:
        return None
    name = f"{record.estimator} (upper)"
    figures = {"figure": record.upper, "process": record.upper, "reserved": None, "allocated": None, "upper": None}
    return Record(**asdict(record) | figures | {"estimator": name, "kind": "process"})


def second_round(run: MeasuredRun, cap: int, card: GPU) -> tuple[bool, str] | None:
    """Return whether a run survives with its allocator limited to `cap`, and the basis of that decision."""
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


def survives(history: History, cap: int) -> bool:
    """Return whether the requests of a history can all be served with `cap` bytes of segments.

    As on the card, cached segments are given back and the request is tried again before it fails, so a run may survive
    a cap below what it reserved without one.

    Not covered: a program that itself does something else when memory is short.
    """
    if cap <= 0:
        return ALLOC not in history.action
    log, numbers, emptied = RequestLog(), dict[int, int](), False
    for action, address, size in zip(history.action, history.addr, history.size, strict=True):
        if action == ALLOC:
            numbers[address] = log.ask(size)
        elif action == FREE_COMPLETED and address in numbers:
            log.free(numbers.pop(address))
        elif action == SEGMENT_FREE and not emptied:
            log.empty_cache()  # a run of them is one call
        emptied = action == SEGMENT_FREE
    try:
        log.play(CachingAllocator(cap), [])
    except OutOfMemory:
        return False
    return True


@dataclass(frozen=True, slots=True)
class Errors:
    """Relative errors of a group of estimates; `bias` is the signed median, `under` the share that is too low."""

    count: int
    median: float
    mean: float
    p90: float
    bias: float
    under: float

    @classmethod
    def of(cls, values: list[float]) -> "Errors | None":
        if not values:
            return None
        sizes = [abs(value) for value in values]
        return cls(
            len(values),
            quantile(sizes, 0.5),
            sum(sizes) / len(sizes),
            quantile(sizes, 0.9),
            quantile(values, 0.5),
            sum(value < 0 for value in values) / len(values),
        )


@dataclass(frozen=True, slots=True)
class Rounds:
    """The protocol over a group: failures (PEF) and memory conserved (MCP, bytes per run and share of the GPU)."""

    count: int
    failure: float
    conserved: float
    conserved_share: float
    by: dict[str, int]

    @classmethod
    def of(cls, judgements: list[Judgement], card: GPU) -> "Rounds | None":
        if not judgements:
            return None
        by = dict(Counter(judgement.by or "first round" for judgement in judgements))
        mean = sum(judgement.conserved for judgement in judgements) / len(judgements)
        failures = sum(not judgement.success for judgement in judgements)
        return cls(len(judgements), failures / len(judgements), mean, mean / card.usable, by)


@dataclass(frozen=True, slots=True)
class Standing:
    """The results of one estimator on one set of runs.

    `own` are errors against the figure that it predicts, `process` against what nvidia-smi shows. Neither has runs that
    ran out of memory. `unsupported` runs count as no estimate and not as errors; `failed` ones are supported.
    """

    estimator: str
    asked: int
    given: int
    unsupported: int
    failed: int
    kind: str | None
    own: Errors | None
    process: Errors | None
    rounds: dict[str, Rounds | None]
    seconds: float | None
    seconds_p95: float | None
    cpu_seconds: float | None
    families: dict[str, Errors] = field(default_factory=dict)
    reasons: dict[str, int] = field(default_factory=dict)

    @property
    def coverage(self) -> float:
        return self.given / self.asked if self.asked else 0.0


def error(record: Record, run: MeasuredRun, against: str) -> float | None:
    """Return the signed relative error of an estimate; `None` for runs that ran out of memory.

    >>> run = MeasuredRun(id="r", row={}, family="MLPs", reserved=100, process=200)
    >>> one = Record(estimator="x", run="r", gpu="H200", seconds=0, figure=110, kind="reserved")
    >>> round(error(one, run, OWN), 3), error(one, run, PROCESS)
    (0.1, -0.45)
    """
    truth = run.truth(record.kind or PROCESS) if against == OWN else run.process
    if run.oom or not truth or record.figure is None:
        return None
    figure = record.process if against == PROCESS and record.process is not None else record.figure
    return (figure - truth) / truth


def rank(truth: TruthSet, records: Iterable[Record]) -> list[Standing]:
    """Return the standings of all estimators on a set, lowest median error against the process's memory first.

    An upper bound gets a second line.
    """
    runs = {run.id: run for run in truth.runs}
    by_name: dict[str, list[Record]] = {}
    for record in records:
        if record.run in runs:
            by_name.setdefault(record.estimator, []).append(record)
            bound = bound_of(record)
            if bound is not None:
                by_name.setdefault(bound.estimator, []).append(bound)
    card = find_gpu(truth.gpu)
    standings = [_standing(name, answers, runs, card) for name, answers in by_name.items()]
    return sorted(standings, key=lambda one: (one.process is None, one.process.median if one.process else 0.0))


def _standing(name: str, records: list[Record], runs: dict[str, MeasuredRun], card: GPU) -> Standing:
    given = [record for record in records if record.given]
    times = [record.seconds for record in given if record.seconds is not None]
    worked = [record.cpu_seconds for record in given if record.cpu_seconds is not None]
    return Standing(
        estimator=name,
        asked=len(records),
        given=len(given),
        unsupported=sum(record.unsupported is not None for record in records),
        failed=sum(record.failed is not None for record in records),
        kind=given[0].kind if given else None,
        own=_errors(given, runs, OWN),
        process=_errors(given, runs, PROCESS),
        rounds={variant: _rounds(given, runs, card, variant) for variant in VARIANTS},
        seconds=quantile(times, 0.5) if times else None,
        seconds_p95=quantile(times, 0.95) if times else None,
        cpu_seconds=quantile(worked, 0.5) if worked else None,
        families=_families(given, runs),
        reasons=_reasons(records, runs),
    )


def _errors(records: list[Record], runs: dict[str, MeasuredRun], against: str) -> Errors | None:
    values = [error(record, runs[record.run], against) for record in records]
    return Errors.of([value for value in values if value is not None])


def _rounds(records: list[Record], runs: dict[str, MeasuredRun], card: GPU, variant: str) -> Rounds | None:
    judgements = [judge(record, runs[record.run], card, variant) for record in records]
    return Rounds.of([judgement for judgement in judgements if judgement is not None], card)


def _families(records: list[Record], runs: dict[str, MeasuredRun]) -> dict[str, Errors]:
    groups: dict[str, list[Record]] = {}
    for record in records:
        groups.setdefault(runs[record.run].family, []).append(record)
    by_family = {family: _errors(members, runs, PROCESS) for family, members in sorted(groups.items())}
    return {family: errors for family, errors in by_family.items() if errors is not None}


def _reasons(records: list[Record], runs: dict[str, MeasuredRun]) -> dict[str, int]:
    """Return the reasons for missing estimates, most frequent first, merged over the names of models."""
    counts: Counter[str] = Counter()
    for record in records:
        reason = f"not supported: {record.unsupported}" if record.unsupported else record.failed
        if reason:
            model = runs[record.run].row.get("model")
            reason = reason.replace(model, "the model") if model else reason
            counts[reason] += 1
    return dict(counts.most_common(MOST_REASONS))


def _percent(errors: Errors | None, name: str, form: str = ".2%") -> str:
    return "" if errors is None else format(getattr(errors, name), form)


def _failure(one: Standing, variant: str) -> str:
    rounds = one.rounds[variant]
    return "" if rounds is None else f"{rounds.failure:.1%}"


def _conserved(one: Standing, variant: str) -> str:
    rounds = one.rounds[variant]
    return "" if rounds is None else format_bytes(round(rounds.conserved))


def _time(seconds: float | None) -> str:
    return "" if seconds is None else format_duration(seconds)


_CPU = "median processor time, which other work on the machine does not lengthen"
_GIVEN = "share of them with an estimate; what is not supported counts here and not as an error"
_MEDIAN = "median relative error against the memory of the process, what nvidia-smi shows"
# The columns of the ranking: meaning and cell; an empty cell is unknown.
COLUMNS: dict[str, tuple[str, Callable[[Standing], str]]] = {
    "estimator": ("", lambda one: one.estimator),
    "asked": ("runs that it was asked about", lambda one: str(one.asked)),
    "given": (_GIVEN, lambda one: f"{one.coverage:.0%}"),
    "median": (_MEDIAN, lambda one: _percent(one.process, "median")),
    "mean": ("mean relative error against the same", lambda one: _percent(one.process, "mean")),
    "bias": ("median error with its sign", lambda one: _percent(one.process, "bias", "+.2%")),
    "too low": ("share of underestimates", lambda one: _percent(one.process, "under", ".0%")),
    "own figure": ("what the estimator's figure stands for", lambda one: one.kind or ""),
    "own median": ("median error against that figure", lambda one: _percent(one.own, "median")),
    "own low": ("share of underestimates of that figure", lambda one: _percent(one.own, "under", ".0%")),
    "PEF": ("probability of estimation failure, mended protocol", lambda one: _failure(one, MENDED)),
    "MCP": ("memory conserved a run, mended protocol", lambda one: _conserved(one, MENDED)),
    "PEF xMem": ("as published", lambda one: _failure(one, PUBLISHED)),
    "MCP xMem": ("as published", lambda one: _conserved(one, PUBLISHED)),
    "time": ("median time of the whole pipeline", lambda one: _time(one.seconds)),
    "95%": ("time that 19 in 20 stay below", lambda one: _time(one.seconds_p95)),
    "CPU": (_CPU, lambda one: _time(one.cpu_seconds)),
}


def shared_runs(records: Iterable[Record]) -> set[str]:
    """Return the runs for which every estimator has an estimate, so that all can be compared fairly."""
    given: dict[str, set[str]] = {}
    for record in records:
        given.setdefault(record.estimator, set())
        if record.given:
            given[record.estimator].add(record.run)
    return set.intersection(*given.values()) if given else set()


def as_dict(truth: TruthSet, records: list[Record]) -> dict[str, Any]:
    standings = rank(truth, [*records, *truth.published])
    return {
        "truth": truth.name,
        "gpu": truth.gpu,
        "runs": len(truth.runs),
        "out_of_memory": sum(run.oom for run in truth.runs),
        "left_out": truth.left_out,
        "notes": truth.notes,
        "ranking": [asdict(one) | {"coverage": one.coverage} for one in standings],
    }
