"""The timeline: jobs on GPUs over time, and figures of a time span, computed as for a simulation."""

import asyncio
import datetime
import time
from dataclasses import dataclass
from functools import partial
from typing import Any

from nicegui import events, ui

from ullage.errors import InvalidValue, UllageError
from ullage.manager.job_words import reference
from ullage.manager.page.charts import FAINT, LINES, figure, on_axis, use_charts
from ullage.manager.page.elements import Cell, box, button, card, choice, problem, scrolled, show_table, words
from ullage.manager.page.readings import DaemonReading, place_names
from ullage.manager.page.sessions import Session
from ullage.manager.simulation.history import RUNNING, as_it_is
from ullage.manager.simulation.measures import MEASURES
from ullage.manager.simulation.report import LaneBar, in_lanes
from ullage.manager.simulation.result import Figures, SimulatedJob, SimulationResult
from ullage.text import plain
from ullage.units import format_bytes, format_duration

LASTS = {
    "last hour": 3600.0,
    "last 6 hours": 6 * 3600.0,
    "last day": 86400.0,
    "last week": 7 * 86400.0,
    "last 4 weeks": 28 * 86400.0,
}
_MOVES = {"Earlier": (-1, -1), "Later": (1, 1), "Closer": (1, -1), "Wider": (-2, 2)}  # of both ends, in quarters
_HEADS = ("Job", "User", "GPU", "Begin", "Lasted", "Attempt", "Ended")
_EVERY, _REST = 5.0, 20.0  # least seconds between two requests, and least multiple of the time an answer took
_MOST_BARS, _MOST_ROWS, _MOST_LISTED = 5000, 400, 100  # drawn bars and rows, and listed attempts
_FINE = frozenset({"finished", "cancelled", "requeued", "time slot ended", RUNNING})
_SHOWN = ("total", "waiting", "running", "completion", "smact", "memory", "energy", "ooms", "lost")
_NAMES = {"total": "Makespan", "smact": "SM activity", "ooms": "Out of memory", "lost": "GPU lost"}
_MEANT = {"total": "the part of this span in which there were jobs"}


@dataclass(frozen=True)
class TimelineRun:
    """The jobs to draw. Times on the page are the result's plus `begin`, in seconds since 1970."""

    result: SimulationResult
    begin: float
    first: float
    last: float
    gpus: list[str]
    notes: list[str]
    names: dict[int, str]  # of jobs that are not shown by number

    def name(self, job: SimulatedJob) -> str:
        return self.names.get(job.id, str(job.id))

    def figures(self, span: tuple[float, float]) -> Figures:
        return self.result.figures_between(span[0] - self.begin, span[1] - self.begin)

    def parsed(self, text: str) -> float:
        try:
            return datetime.datetime.fromisoformat(text.strip()).timestamp()
        except (ValueError, OverflowError, OSError):
            raise InvalidValue(f"the value must be a time such as {_moment(self.first)}, got {text[:40]!r}") from None


class Timeline:
    """The parts of the page, and the selected time span."""

    def __init__(self, session: Session) -> None:
        use_charts()
        self._session = session
        self._shown: TimelineRun | None = None
        self._span: tuple[float, float] | None = None  # None: all of the time
        self._next, self._chosen_runs = 0.0, 0
        self._listed: list[list[Cell]] = []
        self._last = choice("When", list(LASTS), "last 6 hours", "pick")
        self._problem = problem()
        with card().props('aria-label="Jobs on GPUs"'):
            self._chart = ui.echart(_options()).classes("gantt").props('aria-hidden="true"')
            words("p", "Drag over the chart to choose a span. × failed, ↻ tried again. A click opens a job.", "figures")
        zoomed = f"() => emit(ullage.shown({self._chart.id}))"
        self._chart.on("chart:datazoom", self._zoomed, throttle=0.2, leading_events=False, js_handler=zoomed)
        self._chart.on_point_click(self._opened_job)
        with box("form", "tools span").props('aria-label="The span of time"').on("submit.prevent", self._typed):
            self._from, self._to = (ui.input(name).props("outlined dense").classes("pick") for name in ("From", "To"))
            button("Show", None)
            for name in (*_MOVES, "All"):
                button(name, partial(self._moved, name))
        with card("Figures of this span"):
            self._counts = words("p", "Asks the daemon.", "figures")
            with box("dl", "facts spread"):
                self._figures = {name: _term(name) for name in (*_SHOWN[:4], "busy", *_SHOWN[4:])}
            self._note = words("p", "", "figures")
        with card("Attempts in this span"):
            self._rows_note = words("p", "", "figures")
            self._table = scrolled("Attempts")
        self._last.on_value_change(self._chosen)

    async def refresh(self, reading: DaemonReading) -> None:
        """Redraw the daemon's jobs, if they may have changed."""
        if time.monotonic() < self._next or reading.trouble:
            return
        began, last = time.monotonic(), self._last.value
        try:
            history = await self._session.readings.trace(LASTS[last])
            run = await asyncio.to_thread(_of_daemon, history)
        except UllageError as error:
            self._problem.set_text(plain(str(error)))
            self._next = time.monotonic() + _EVERY
            return
        self._next = time.monotonic() + max(_EVERY, _REST * (time.monotonic() - began))
        if last == self._last.value:
            self._draw(run)

    def _chosen(self) -> None:
        self._span, self._next = None, 0.0
        self._chosen_runs += 1

    def _draw(self, run: TimelineRun) -> None:
        self._shown = run
        self._problem.set_text("")
        all_bars, lanes = in_lanes(run.result.jobs, len(run.gpus))
        inside = [bar for bar in all_bars if run.begin + bar.attempt.end >= run.first]
        tops = [sum(lanes[:place]) for place in range(len(lanes))]
        rows = min(sum(lanes), _MOST_ROWS)
        drawn = [bar for bar in inside if tops[bar.gpu] + bar.lane < rows][-_MOST_BARS:]
        left_out = [f"of {len(inside):,} bars {len(drawn):,} are drawn"] if len(drawn) < len(inside) else []
        self._note.set_text(" ".join(f"{note[:1].upper()}{note[1:]}." for note in (*run.notes, *left_out)))
        self._chart.style(f"height: {max(220, 26 * rows + 120)}px")
        labels = [
            name if lane == 0 else "" for name, count in zip(run.gpus, lanes, strict=True) for lane in range(count)
        ]
        ends = {"min": on_axis(run.first), "max": on_axis(run.last)}
        ground = [[top, count] for top, count in zip(tops, lanes, strict=True)]
        bars = [_bar(run, bar, tops[bar.gpu]) for bar in drawn]
        data = {"title": {"text": str(self._chosen_runs)}, "xAxis": ends, "yAxis": {"data": labels[:rows]}}
        self._chart.run_chart_method("setOption", data | {"series": [{"data": ground}, {"data": bars}]})
        self._chart.run_chart_method("resize")
        cursor = {"type": "takeGlobalCursor", "key": "dataZoomSelect", "dataZoomSelectActive": True}
        self._chart.run_chart_method("dispatchAction", cursor)  # dragging selects a span
        self._show_zoom()
        self._show_span()

    @property
    def _now_shown(self) -> tuple[float, float]:
        assert self._shown is not None
        first, last = self._shown.first, self._shown.last
        if self._span is None:
            return first, last
        begin = min(max(self._span[0], first), last)
        return begin, max(begin, min(self._span[1], last))

    def _show_zoom(self) -> None:
        if self._shown is not None:
            begin, end = (on_axis(at) for at in self._now_shown)
            self._chart.run_chart_method("dispatchAction", {"type": "dataZoom", "startValue": begin, "endValue": end})

    def _zoomed(self, event: events.GenericEventArguments) -> None:
        """Apply a span selected with the mouse, unless the chart has been replaced."""
        if self._shown is None or event.args.get("run") != str(self._chosen_runs):
            return
        try:
            begin, end = (float(event.args[name]) for name in ("begin", "end"))
        except (TypeError, KeyError, ValueError):
            return
        shift = on_axis(self._shown.last) / 1000 - self._shown.last
        span = begin / 1000 - shift, end / 1000 - shift
        slack = 0.002 + (self._shown.last - self._shown.first) * 1e-4
        if max(abs(one - other) for one, other in zip(span, self._now_shown, strict=True)) > slack:
            self._choose(*span, zoom=False)

    def _typed(self) -> None:
        if self._shown is None:
            return
        try:
            begin, end = (self._shown.parsed(str(field.value)) for field in (self._from, self._to))
        except UllageError as error:
            ui.notify(plain(str(error)), type="negative")
            return
        if begin >= end:
            ui.notify("Needed a beginning that is before the end.", type="negative")
            return
        self._choose(begin, end)

    def _moved(self, how: str) -> None:
        if self._shown is None:
            return
        first, last = self._shown.first, self._shown.last
        if how == "All":
            self._choose(first, last)
            return
        begin, end = self._now_shown
        left, right = (quarters * (end - begin) / 4 for quarters in _MOVES[how])
        if left == right:  # move the span without changing its length
            left = right = max(first - begin, min(left, last - end))
        self._choose(begin + left, end + right)

    def _choose(self, begin: float, end: float, zoom: bool = True) -> None:
        assert self._shown is not None
        whole = begin <= self._shown.first and end >= self._shown.last
        self._span = None if whole else (begin, end)
        if zoom:
            self._show_zoom()
        self._show_span()

    def _show_span(self) -> None:
        run, span = self._shown, self._now_shown
        assert run is not None
        for typed, at in ((self._from, span[0]), (self._to, span[1])):
            typed.set_value(_moment(at))
        figures = run.figures(span)
        open_now = figures.jobs - figures.done - figures.failed
        self._counts.set_text(
            f"{figures.jobs:,} jobs were there; {figures.done:,} became done, {figures.failed:,} failed or were "
            f"cancelled, {open_now:,} were not over at its end. Times are means over those that became done."
        )
        for name in _SHOWN:
            self._figures[name].set_text(MEASURES[name].text(MEASURES[name].of(figures)))
        lasts = len(run.result.gpus) * (span[1] - span[0])
        share = None if figures.busy_s is None or not lasts else figures.busy_s / lasts
        self._figures["busy"].set_text("unknown" if share is None else f"{share:.0%}")
        self._list(run, span)

    def _list(self, run: TimelineRun, span: tuple[float, float]) -> None:
        begin, end = (at - run.begin for at in span)
        inside = [
            (job, number, attempt)
            for job in run.result.jobs
            for number, attempt in enumerate(job.attempts, 1)
            if attempt.begin <= end and attempt.end >= begin
        ]
        inside.sort(key=lambda row: row[2].begin, reverse=True)
        shown: list[tuple[str, list[Cell]]] = []
        for job, number, attempt in inside[:_MOST_LISTED]:
            link = f"{run.name(job)} {job.kind}", f"/job/{int(job.id)}"
            gpus = ", ".join(run.gpus[place] for place in attempt.gpus)
            times = [_moment(run.begin + attempt.begin), format_duration(attempt.end - attempt.begin)]
            kind = "" if attempt.cause in _FINE else "failed"
            shown.append((kind, [link, job.user, gpus, *times, str(number), attempt.cause]))
        more = f" The last {_MOST_LISTED} of them:" if len(inside) > _MOST_LISTED else ""
        self._rows_note.set_text(f"{len(inside):,} attempts.{more}")
        listed = [cells[:4] + cells[5:] for _, cells in shown]  # without the duration, which changes while a job runs
        if listed != self._listed:
            self._listed = listed
            self._table.clear()
            with self._table:
                show_table(_HEADS, shown, {})

    def _opened_job(self, event: events.EChartPointClickEventArguments) -> None:
        if isinstance(event.data, dict):
            job = event.data.get("job")
            if isinstance(job, int):
                ui.navigate.to(f"/job/{job}")


def _term(name: str) -> Any:
    measure = MEASURES.get(name)
    text = "GPUs with a job" if measure is None else _NAMES.get(name, name.capitalize())
    meaning = "the share of the GPUs' time" if measure is None else _MEANT.get(name, measure.meaning)
    with box("div"):
        words("dt", text).props["title"] = meaning
        return words("dd")


def _of_daemon(trace: dict[str, Any]) -> TimelineRun:
    now = float(trace["until"])
    replayed = as_it_is(trace, now)
    notes = [] if trace["all"] else ["only your own jobs are shown"]
    names = [f"GPU {name}" for name in place_names(trace["gpus"]).values()]
    first = max(float(trace["since"]), replayed.begin if replayed.begin < now else now - 60.0)
    notes += [note for note in replayed.notes if "only your own" not in note]
    parts = {job["id"]: reference(job) for job in trace["jobs"] if job.get("array_id") is not None}
    return TimelineRun(replayed.result, replayed.begin, first, now, names, notes, parts)


def _moment(at: float) -> str:
    return datetime.datetime.fromtimestamp(at).isoformat(" ", "seconds")


def _bar(run: TimelineRun, bar: LaneBar, top: int) -> dict[str, Any]:
    job, attempt = bar.job, bar.attempt
    failed, again = attempt.cause not in _FINE, attempt is not job.attempts[0]
    begin, end = (on_axis(run.begin + at) for at in (attempt.begin, attempt.end))
    label = f"{run.name(job)} {job.kind}"
    waited = format_duration(max(0.0, job.attempts[0].begin - job.arrival))
    about = [
        label[:200],
        f"of {job.user}, waited {waited}",
        f"attempt {job.attempts.index(attempt) + 1} on {run.gpus[bar.gpu]}",
        f"{format_bytes(attempt.promise)} promised" if attempt.promise else "no promise known",
        f"from {_moment(run.begin + attempt.begin)}, {format_duration(attempt.end - attempt.begin)}",
        attempt.cause,
    ]
    value = [top + bar.lane, begin, end, job.id, int(failed), int(again), label[:80]]
    return {"value": value, "job": job.id, "about": about}


def _options() -> dict[str, Any]:
    columns: list[Any] = ["row", "begin", "end", "tint", "failed", "again", {"name": "label", "type": "ordinal"}]
    handle = {":color": "ullage.css('--sheet')", ":borderColor": "ullage.css('--accent')"}
    own = {":borderColor": "ullage.css('--line')", ":fillerColor": "ullage.css('--accent') + '33'"}
    slider = {"type": "slider", "filterMode": "none", "bottom": 12, "height": 22, "labelFormatter": ""}
    quiet = {"showDataShadow": False, "brushSelect": False, "moveHandleSize": 0, "handleStyle": handle}
    ground = {"type": "custom", ":renderItem": "ullage.ground", "data": [], "silent": True, "z": 0}
    bars = {"type": "custom", ":renderItem": "ullage.bar", "data": [], "dimensions": columns, "clip": True, "z": 2}
    rows = {"type": "category", "inverse": True, "data": [], "axisTick": {"show": False}, "splitLine": {"show": False}}
    return figure(
        {"type": "time", "splitLine": LINES},
        rows | {"axisLabel": {**FAINT, "interval": 0}},
        [ground | {"encode": {"y": 0, "x": -1}}, bars | {"encode": {"y": 0, "x": [1, 2]}}],
        title={"show": False, "text": ""},
        grid={"left": 70, "right": 24, "top": 14, "bottom": 70},
        legend={"show": False},
        toolbox={"show": True, "itemSize": 0, "feature": {"dataZoom": {"yAxisIndex": "none"}}},
        dataZoom=[slider | quiet | own],
    )
