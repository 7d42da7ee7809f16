"""The figures of a run by their names for users, and targets such as "waiting<=10m"."""

import operator
import re
from collections.abc import Callable
from dataclasses import dataclass

from ullage.errors import InvalidValue, UnknownName
from ullage.manager.simulation.result import Figures
from ullage.manager.simulation.statistics import Interval
from ullage.units import energy_unit, format_duration, parse_duration, parse_energy

_TARGET = re.compile(r"\s*([a-z0-9-]+)\s*(<=|>=|<|>)\s*(.+?)\s*")
_COMPARISONS: dict[str, Callable[[float, float], bool]] = {
    "<=": operator.le,
    ">=": operator.ge,
    "<": operator.lt,
    ">": operator.gt,
}


@dataclass(frozen=True)
class Measure:
    """A figure: its title, its attribute of `Figures`, its meaning, and its unit."""

    name: str
    attribute: str
    meaning: str
    unit: str

    def of(self, figures: Figures) -> float | None:
        """Return the value of this figure in a run; None if unknown."""
        value = getattr(figures, self.attribute)
        return None if value is None else float(value)

    def text(self, value: float | None) -> str:
        if value is not None and self.unit == "time":
            return format_duration(value) if value >= 0.0005 else "0 s"
        return self.short(value)

    def short(self, value: float | None, half: float | None = None) -> str:
        """Return a value for a narrow table, with its uncertainty `half`.

        >>> MEASURES["waiting"].short(4500.0), MEASURES["energy"].short(33.2e6, 1.5e6), MEASURES["ooms"].short(2.0)
        ('75.0 min', '33.2 ± 1.5 MJ', '2')
        """
        if value is None:
            return "–"
        factor, digits, name = self._scale(value, bool(half))
        more = f" ± {half / factor:,.{digits}f}" if half else ""
        return f"{value / factor:,.{digits}f}{more} {name}".rstrip()

    def _scale(self, value: float, uncertain: bool) -> tuple[float, int, str]:
        if self.unit == "time":
            larger = ((unit, 1, name) for unit, name in ((86400, "d"), (3600, "h"), (60, "min")) if value >= 2 * unit)
            return next(larger, (1, 1, "s"))
        if self.unit == "energy":
            factor, name = energy_unit(value)
            return factor, 1 if value < 1e9 else 0, name
        if self.unit == "share":
            return 0.01, 0, "%"
        return 1, 0 if self.unit == "count" and value == round(value) and not uncertain else 2, ""

    def value(self, text: str) -> float:
        """Parse a value that a user typed, in the unit of the figure."""
        if self.unit == "time":
            return parse_duration(text)
        if self.unit == "energy":
            return parse_energy(text)
        percent = self.unit == "share" and text.endswith("%")
        try:
            return float(text.removesuffix("%") if percent else text) * (0.01 if percent else 1.0)
        except ValueError:
            example = "80%" if self.unit == "share" else "2"
            raise InvalidValue(f"{self.name} must be a number such as {example}, got {text!r}") from None


MEASURES = {
    measure.name: measure
    for measure in (
        Measure("total", "total_s", "from the first arrival to the last end", "time"),
        Measure("waiting", "waiting_s", "mean time on no GPU, of jobs that are done", "time"),
        Measure("running", "running_s", "mean time on a GPU, with failed attempts", "time"),
        Measure("completion", "completion_s", "mean time from arrival to end", "time"),
        Measure("waiting-p95", "waiting_p95_s", "what 95% of the jobs wait at most", "time"),
        Measure("completion-p95", "completion_p95_s", "what 95% of the jobs take at most", "time"),
        Measure("slowdown", "slowdown", "mean of completion time against the work alone", "ratio"),
        Measure("slowdown-median", "slowdown_median", "the median of it", "ratio"),
        Measure("slowdown-p95", "slowdown_p95", "what 95% of the jobs stay below", "ratio"),
        Measure("ooms", "ooms", "attempts that ran out of GPU memory", "count"),
        Measure("lost", "lost", "attempts whose GPU was lost", "count"),
        Measure("failed", "failed", "jobs that were given up", "count"),
        Measure("unplaced", "unplaced", "jobs that no GPU could take", "count"),
        Measure("energy", "energy_j", "of all GPUs", "energy"),
        Measure("smact", "smact", "mean SM activity over GPUs and time", "share"),
        Measure("memory", "memory", "mean share of the memory in use", "share"),
        Measure("fairness", "fairness", "Jain's index over the users' mean slowdowns", "ratio"),
    )
}


@dataclass(frozen=True)
class Target:
    """A condition on a figure, such as "waiting <= 10m"."""

    measure: Measure
    comparison: str
    limit: float
    typed: str

    @classmethod
    def parse(cls, text: str) -> "Target":
        match = _TARGET.fullmatch(text)
        if match is None:
            raise InvalidValue(f"a target must be a condition such as 'waiting<=10m' or 'ooms<=0', got {text!r}")
        if match[1] not in MEASURES:
            raise UnknownName("figure", match[1], MEASURES, hint="figures: " + ", ".join(MEASURES))
        measure = MEASURES[match[1]]
        return cls(measure, match[2], measure.value(match[3]), match[3])

    def met(self, value: float | None) -> bool:
        """Whether a value meets the target; an unknown one does not."""
        return value is not None and _COMPARISONS[self.comparison](value, self.limit)

    def __str__(self) -> str:
        return f"{self.measure.name} {self.comparison} {self.typed}"


def change(value: float | None, base: float | None) -> str:
    """Return the change of a value against a base in percent; empty if that is undefined.

    >>> change(70.0, 100.0), change(100.0, 100.0), change(1.0, 0.0)
    ('-30.0%', '+0.0%', '')
    """
    return "" if value is None or not base else f"{100 * (value / base - 1):+.1f}%"


def interval_text(measure: Measure, interval: Interval | None) -> str:
    """Return a mean with its uncertainty, as text.

    >>> interval_text(MEASURES["slowdown"], Interval(2.0, 0.25, 3)), interval_text(MEASURES["slowdown"], None)
    ('2.00 ± 0.25', '–')
    """
    return measure.short(None if interval is None else interval.mean, None if interval is None else interval.half)


def change_text(interval: Interval | None) -> str:
    """Return a relative change as text, in brackets if it may be chance.

    >>> change_text(Interval(-0.3, 0.1, 5)), change_text(Interval(-0.3, 0.4, 5)), change_text(None)
    ('-30.0 ± 10.0%', '(-30.0 ± 40.0%)', '')
    """
    if interval is None:
        return ""
    if interval.half is None:
        return f"{100 * interval.mean:+.1f}%"
    text = f"{100 * interval.mean:+.1f} ± {100 * interval.half:.1f}%"
    return text if interval.sign else f"({text})"
