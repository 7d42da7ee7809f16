"""Texts of the daemon's reports, for the command line and the page."""

import csv
import datetime
import io
from typing import Any

from ullage.errors import InvalidValue
from ullage.manager.job_words import memory
from ullage.units import format_duration, parse_duration

Sums = dict[str, dict[str, float]]

FIGURES = (
    "jobs",
    "gpu_hours",
    "gpu_hours_by_part",
    "core_hours",
    "promised",
    "used",
    "energy_j",
    "energy_known",
    "waited_median",
    "waited_90",
    "failures",
)
COLUMNS = ("jobs", "GPU hours", "by part", "core hours", "promised", "used", "energy", "waited", "90%")


def moment(text: str, now: float) -> float:
    """Parse a time; return seconds since 1970.

    >>> moment("2h", now=10_000.0)
    2800.0
    """
    try:
        return now - parse_duration(text)
    except InvalidValue:
        try:
            return datetime.datetime.fromisoformat(text).timestamp()
        except (ValueError, OverflowError, OSError):
            forms = "2026-11-01, 2026-11-01T08:00, or 7d for seven days ago"
            raise InvalidValue(f"a time must look like {forms}, got {text[:80]!r}") from None


def csv_of(report: dict[str, Any]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([*report["by"], *FIGURES])
    for row in report["rows"]:
        writer.writerow([_of_csv(row[key]) for key in (*report["by"], *FIGURES)])
    return text.getvalue()


def _of_csv(value: Any) -> Any:
    """Return a cell of CSV. No name, which any user may choose, becomes a formula in a spreadsheet.

    >>> _of_csv("=1+1"), _of_csv({"killed": 2}), _of_csv(None)
    ("'=1+1", 'killed: 2', '')
    """
    if isinstance(value, dict):
        return failures(value)
    return f"'{value}" if isinstance(value, str) and value[:1] in "=+-@" and value else "" if value is None else value


def failures(causes: dict[str, int]) -> str:
    """Return the failed attempts by cause, in words.

    >>> failures({"killed": 2, "GPU lost": 1})
    'killed: 2, GPU lost: 1'
    """
    return ", ".join(f"{cause}: {number}" for cause, number in causes.items())


def cells_of(row: dict[str, Any]) -> list[str]:
    known = row["energy_known"] or 0.0
    at_least = "" if known > 0.99 else "≥ "
    factor, unit = (3.6e6, "kWh") if (row["energy_j"] or 0.0) >= 3.6e5 else (3.6e3, "Wh")
    energy = "unknown" if row["energy_j"] is None else f"{at_least}{row['energy_j'] / factor:.3g} {unit}"
    return [
        str(row["jobs"]),
        f"{row['gpu_hours']:.2f}",
        f"{row['gpu_hours_by_part']:.2f}",
        f"{row['core_hours']:.2f}",
        memory(row["promised"]),
        memory(row["used"]),
        energy,
        format_duration(row["waited_median"]),
        format_duration(row["waited_90"]),
    ]


def sums_of(report: dict[str, Any], figure: str = "gpu_hours") -> tuple[str, str | None, Sums, list[str]]:
    """Return a figure for a bar chart: the keys of bars (days if there are any) and of their parts, the bars with
    their parts by name, and the names of the parts, largest first."""
    keys = sorted(report["by"], key=lambda key: key != "day")
    across, stacked = keys[0], keys[1] if len(keys) > 1 else None
    bars: Sums = {}
    totals: dict[str, float] = {}
    for row in report["rows"]:
        name, value = "" if stacked is None else str(row[stacked]), row[figure] or 0.0
        bar = bars.setdefault(str(row[across]), {})
        bar[name] = bar.get(name, 0.0) + value
        totals[name] = totals.get(name, 0.0) + value
    return across, stacked, bars, sorted(totals, key=lambda name: -totals[name])
