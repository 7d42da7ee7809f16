"""The page of reports: the resources that jobs used by user, day, name and GPU, as a table, a chart and files."""

import json
import time
from functools import partial
from typing import Any

from nicegui import ui

from ullage.errors import UllageError
from ullage.manager.page.charts import FAINT, figure, use_charts
from ullage.manager.page.elements import box, button, card, choice, problem, scrolled, show_table, toggle, words
from ullage.manager.page.readings import DaemonReading
from ullage.manager.page.sessions import Session
from ullage.manager.report_words import COLUMNS, cells_of, csv_of, failures, moment, sums_of
from ullage.text import plain
from ullage.units import format_duration, format_moment

_BY = ("user and day", "user", "day", "GPU", "day and GPU", "name", "user and name")
_SINCE = {"last day": "1d", "last 7 days": "7d", "last 30 days": "30d", "last 90 days": "90d", "last year": "365d"}
_EVERY = 60.0  # seconds between two requests
_MOST_ROWS, _MOST_BARS = 1000, 60
# The charts: figures of a row with their labels, a divisor, and the unit.
_PICTURES: dict[str, tuple[dict[str, str], float, str]] = {
    "GPU hours": ({"gpu_hours": "GPU hours"}, 1.0, "h"),
    "memory": ({"promised": "promised", "used": "used"}, float(1 << 30), "GiB"),
    "energy": ({"energy_j": "energy"}, 3.6e6, "kWh"),
    "waiting": ({"waited_median": "median", "waited_90": "90% stay below"}, 60.0, "min"),
}
_ABOUT = (
    "“by part” counts each GPU by the part of its memory that was promised. “promised” and “used” are means over time, "
    "of jobs whose use was seen. “waited” is the median, and what 90% did not exceed."
)
_STACKED = ("GPU hours", "energy")  # figures that add up


class ReportSheet:
    def __init__(self, session: Session) -> None:
        use_charts()
        self._session, self._next = session, 0.0
        self._report: dict[str, Any] | None = None
        with box("div", "tools"):
            self._by = choice("A row for each", list(_BY), _BY[0], "pick")
            self._since = choice("When", list(_SINCE), "last 7 days", "pick")
            self._until = ui.input("Until (now)", placeholder="2026-11-30").props("outlined dense clearable")
            self._until.classes("pick")
            for name in ("CSV", "JSON"):
                button(f"Download {name}", partial(self._download, name))
        self._problem = problem()
        self._summary = words("p", "", "summary").props('role="status"')
        with card().props('aria-label="Chart"'):
            self._picture = toggle("What is drawn", _PICTURES, "GPU hours")
            self._chart = ui.echart(_options([], [], "")).classes("picture").props('aria-hidden="true"')
            self._drawn = words("p", "", "figures")
        with card("What jobs took"):
            words("p", _ABOUT, "figures")
            self._table = scrolled("What jobs took")
        for field in (self._by, self._since, self._until):
            field.on_value_change(self._asked_anew)
        self._picture.on_value_change(self._draw)

    async def refresh(self, reading: DaemonReading) -> None:
        if time.monotonic() < self._next or reading.trouble:
            return
        self._next = time.monotonic() + _EVERY
        now = time.time()
        try:
            until = moment(str(self._until.value), now) if self._until.value else None
            since = moment(_SINCE[self._since.value], now if until is None else until)
            report = await self._session.ask(
                "report", by=self._by.value.lower().split(" and "), since=since, until=until, user=None
            )
        except UllageError as error:
            self._problem.set_text(plain(str(error)))
            return
        self._problem.set_text("")
        self._report = report
        whose = "" if reading.about["operator"] else " You see your own jobs, and of others what this daemon shows."
        span = f"From {format_moment(report['since'])} to {format_moment(report['until'])}."
        self._summary.set_text(span + (whose if report["rows"] else f" No jobs ran.{whose}"))
        self._fill(report)
        self._draw()

    def _asked_anew(self) -> None:
        self._next = 0.0

    def _download(self, kind: str) -> None:
        if self._report is None:
            return
        text = csv_of(self._report) if kind == "CSV" else json.dumps(self._report, indent=2) + "\n"
        days = [format_moment(self._report[end])[:10] for end in ("since", "until")]
        ui.download.content(text.encode(), f"ullage-report-{'-to-'.join(days)}.{kind.lower()}")

    def _fill(self, report: dict[str, Any]) -> None:
        keys = report["by"]

        def cells(names: list[str], row: dict[str, Any]) -> list[str]:
            return [*names, *cells_of(row), failures(row["failures"])]

        rows = [("", cells([str(row[key]) for key in keys], row)) for row in report["rows"][:_MOST_ROWS]]
        total = cells(["total", *[""] * (len(keys) - 1)], report["total"]) if len(rows) > 1 else None
        self._table.clear()
        with self._table:
            show_table([*keys, *COLUMNS, "failures"], rows, dict.fromkeys(COLUMNS, "number"), total)
            if len(report["rows"]) > len(rows):
                words("p", f"{len(report['rows']) - len(rows):,} more rows are in the files.", "figures")

    def _draw(self) -> None:
        if self._report is None:
            return
        figures, divisor, unit = _PICTURES[str(self._picture.value)]
        bars: dict[str, list[float | None]]
        if self._picture.value in _STACKED:
            across, stacked, sums, names = sums_of(self._report, *figures)
            labels, count = list(sums)[-_MOST_BARS:], len(sums)
            own = next(iter(figures.values()))
            bars = {name or own: [sums[label].get(name) for label in labels] for name in names[:_MOST_BARS]}
            about = f"{self._picture.value} ({unit}) by {' and '.join(filter(None, (across, stacked)))}"
        else:
            rows, count = self._report["rows"][-_MOST_BARS:], len(self._report["rows"])
            labels = [", ".join(str(row[key]) for key in self._report["by"]) for row in rows]
            bars = {name: [row[key] for row in rows] for key, name in figures.items()}
            about = f"{' and '.join(figures.values())} ({unit})"
        stack = {"stack": "all"} if self._picture.value in _STACKED else {}
        series = [_series(name, labels, values, divisor, unit) | stack for name, values in bars.items()]
        more = f"; the last {_MOST_BARS} of {count:,} bars" if count > _MOST_BARS else ""
        known = any(point["value"] for one in series for point in one["data"])
        self._drawn.set_text(f"{about}{more}." if known else f"{about}: nothing is known.")
        self._chart.set_visibility(known)
        self._chart.options.clear()
        self._chart.options.update(_options(labels, series, unit))
        self._chart.update()


def _series(name: str, labels: list[str], values: list[float | None], divisor: float, unit: str) -> dict[str, Any]:
    points = []
    for label, value in zip(labels, values, strict=True):
        shown = None if value is None else value / divisor
        value_text = "unknown" if shown is None else format_duration(value) if unit == "min" else f"{shown:.3g} {unit}"
        points.append({"value": shown, "about": [label, name, value_text]})
    return {"name": name, "type": "bar", "data": points, "barMaxWidth": 48}


def _options(labels: list[str], series: list[dict[str, Any]], unit: str) -> dict[str, Any]:
    label = {**FAINT, "hideOverlap": True, "width": 110, "overflow": "truncate"}
    across = {"type": "category", "data": labels, "axisLabel": label}
    return figure(across, {"type": "value", "name": unit, "nameTextStyle": FAINT}, series, **{":color": "ullage.tints"})
