"""Reports of the resources that jobs used, by user, day, job name and GPU."""

import datetime
import functools
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from ullage.errors import InvalidValue
from ullage.manager.core.context import ManagerContext
from ullage.manager.identity import Caller
from ullage.manager.storage.records import Cause

BY = ("user", "day", "name", "gpu")
Others = Literal["own", "totals", "all"]
OTHERS = "others"
_NO_FAILURES = frozenset({Cause.FINISHED, Cause.CANCELLED, Cause.SLOT_ENDED})
_HOUR, _WEEK = 3600.0, 7 * 86400.0


class UsageSpan(NamedTuple):
    """An attempt, or the part of it on one day and one GPU; None is unknown.

    `gpus` is the number of its GPUs, `part` the same number weighted by promised memory. `energy` is in joules,
    `waited` the time before the first attempt.
    """

    job: int
    user: str
    name: str
    begin: float
    end: float
    slots: tuple[str, ...]
    gpus: float
    part: float
    cores: int
    promise: int | None
    used: int | None
    energy: float | None
    waited: float | None
    cause: str | None

    @property
    def seconds(self) -> float:
        return self.end - self.begin


@dataclass
class _Sums:
    jobs: set[int] = field(default_factory=set)
    gpu_seconds: float = 0.0
    part_seconds: float = 0.0
    core_seconds: float = 0.0
    promised: float = 0.0  # bytes times GPU-seconds, of spans with known use
    used: float = 0.0
    used_seconds: float = 0.0
    energy: float | None = None
    energy_seconds: float = 0.0
    waits: list[float] = field(default_factory=list)
    failures: Counter[str] = field(default_factory=Counter)

    def add(self, span: UsageSpan) -> None:
        gpu_seconds = span.seconds * span.gpus
        self.jobs.add(span.job)
        self.gpu_seconds += gpu_seconds
        self.part_seconds += span.seconds * span.part
        self.core_seconds += span.seconds * span.cores
        if span.used is not None and span.promise is not None:
            self.promised += span.promise * gpu_seconds
            self.used += span.used * gpu_seconds
            self.used_seconds += gpu_seconds
        if span.energy is not None:
            self.energy = (self.energy or 0.0) + span.energy
            self.energy_seconds += gpu_seconds
        if span.waited is not None:
            self.waits.append(span.waited)
        if span.cause is not None and span.cause not in _NO_FAILURES:
            self.failures[span.cause] += 1

    def figures(self) -> dict[str, Any]:
        return {
            "jobs": len(self.jobs),
            "gpu_hours": self.gpu_seconds / _HOUR,
            "gpu_hours_by_part": self.part_seconds / _HOUR,
            "core_hours": self.core_seconds / _HOUR,
            "promised": round(self.promised / self.used_seconds) if self.used_seconds else None,
            "used": round(self.used / self.used_seconds) if self.used_seconds else None,
            "energy_j": self.energy,
            "energy_known": self.energy_seconds / self.gpu_seconds if self.gpu_seconds else None,
            "waited_median": percentile(self.waits, 50),
            "waited_90": percentile(self.waits, 90),
            "failures": dict(sorted(self.failures.items())),
        }


def report(
    context: ManagerContext,
    caller: Caller,
    by: Sequence[str] | None,
    since: float | None,
    until: float | None,
    user: str | None,
) -> dict[str, Any]:
    now = context.clock()
    rows = check_by(["user", "day"] if by is None else by)
    begin, end = times_asked(context, since, until)
    others: Others = "all" if caller.operator else context.settings.access.report
    spans = spans_of(context.store.history.attempts_between(begin, end), begin, end, now)
    seen = [span for span in visible(spans, caller.user, others) if user in (None, span.user)]
    names = {slot.id: slot.id if slot.mig else f"{slot.index} {slot.name}" for slot in context.slots}
    return {"since": begin, "until": end, "by": list(rows), **report_of(seen, rows, names)}


def times_asked(context: ManagerContext, since: float | None, until: float | None) -> tuple[float, float]:
    """Return begin and end of a report; by default the last seven days."""
    now = context.clock()
    begin, end = now - _WEEK if since is None else since, now if until is None else min(until, now)
    if not 0 <= begin <= end:
        raise InvalidValue("the time to report from must be before the time to report until, and not in the future")
    return begin, end


def spans_of(rows: Iterable[Mapping[str, Any]], since: float, until: float, now: float) -> Iterator[UsageSpan]:
    """Yield the parts of attempts between two times. Waiting counts at the first placement, causes at the end."""
    for row in rows:
        end = now if row["ended"] is None else row["ended"]
        begin = end if row["started"] is None else min(row["started"], end)
        if row["elapsed"] is not None:  # the clock may have been changed meanwhile
            begin = end - row["elapsed"]
        inside = max(0.0, min(end, until) - max(begin, since))
        part = inside / (end - begin) if end > begin else 1.0
        gpus = len(row["slots"])
        placed, ended = since <= row["placed"] < until, row["ended"] is not None and since <= row["ended"] < until
        if not (inside or placed or ended):
            continue
        yield UsageSpan(
            job=row["job"],
            user=row["user"],
            name=row["name"],
            begin=max(begin, since),
            end=max(begin, since) + inside,
            slots=row["slots"],
            gpus=gpus,
            part=gpus if row["gpu_part"] is None else row["gpu_part"],
            cores=row["cores"],
            promise=row["promise"],
            used=row["used"],
            energy=None if row["energy"] is None else row["energy"] * part,
            waited=row["waited"] if row["number"] == 1 and placed else None,
            cause=row["cause"] if ended else None,
        )


def report_of(spans: Iterable[UsageSpan], by: Sequence[str], names: Mapping[str, str]) -> dict[str, Any]:
    rows: dict[tuple[str, ...], _Sums] = {}
    total = _Sums()
    for span in spans:
        total.add(span)
        for piece in _pieces(span, by):
            rows.setdefault(tuple(_value(piece, key, names) for key in by), _Sums()).add(piece)
    ordered = [dict(zip(by, key, strict=True)) | rows[key].figures() for key in sorted(rows)]
    return {"rows": ordered, "total": total.figures()}


def visible(spans: Iterable[UsageSpan], user: str, others: Others) -> Iterator[UsageSpan]:
    """Yield the spans that a user may see: their own, and those of others as the site allows."""
    for span in spans:
        if span.user == user or others == "all":
            yield span
        elif others == "totals":
            yield span._replace(user=OTHERS, name=f"({OTHERS})")


def check_by(by: Sequence[str]) -> tuple[str, ...]:
    """Check the keys of rows and return them in the same order.

    >>> check_by(["usr"])
    Traceback (most recent call last):
    ullage.errors.InvalidValue: by must be one or more of user, day, name and gpu, each once, got 'usr'
    """
    if not by or len(set(by)) < len(by) or not set(by) <= set(BY):
        given = ", ".join(map(repr, by))[:80] or "none"
        raise InvalidValue(f"by must be one or more of user, day, name and gpu, each once, got {given}")
    return tuple(by)


def percentile(values: Sequence[float], percent: float) -> float | None:
    """Return the smallest value that `percent` of the values do not exceed; `None` without values."""
    if not values:
        return None
    ordered = sorted(values)
    return ordered[max(1, math.ceil(percent / 100 * len(ordered))) - 1]


def _pieces(span: UsageSpan, by: Sequence[str]) -> Iterator[UsageSpan]:
    """Cut a span by days and GPUs, if rows have these keys. Waiting is in the first piece, the cause in the last."""
    places = [(slot,) for slot in span.slots] if "gpu" in by and span.slots else [span.slots]
    times = list(_days(span.begin, span.end)) if "day" in by else [(span.begin, span.end)]
    if len(places) == len(times) == 1:
        yield span
        return
    for turn, (begin, end) in enumerate(times):
        share = (end - begin) / span.seconds if span.seconds else 1.0
        for place, slots in enumerate(places):
            first, last = turn == place == 0, turn == len(times) - 1 and place == 0
            yield span._replace(
                begin=begin,
                end=end,
                slots=slots,
                gpus=span.gpus / len(places),
                part=span.part / len(places),
                cores=span.cores if place == 0 else 0,
                energy=None if span.energy is None else span.energy * share / len(places),
                waited=span.waited if first else None,
                cause=span.cause if last else None,
            )


def _days(begin: float, end: float) -> Iterator[tuple[float, float]]:
    while True:
        midnight = _midnight_after(datetime.datetime.fromtimestamp(begin).date())
        if midnight >= end:
            yield begin, end
            return
        yield begin, midnight
        begin = midnight


@functools.lru_cache(maxsize=1024)
def _midnight_after(day: datetime.date) -> float:
    return datetime.datetime.combine(day + datetime.timedelta(days=1), datetime.time()).timestamp()


def _value(span: UsageSpan, key: str, names: Mapping[str, str]) -> str:
    if key == "day":
        return datetime.datetime.fromtimestamp(span.begin).strftime("%Y-%m-%d")
    if key == "gpu":
        return names.get(span.slots[0], span.slots[0]) if span.slots else "none"
    return span.user if key == "user" else span.name
