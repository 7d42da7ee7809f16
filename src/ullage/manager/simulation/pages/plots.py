"""What the pages are made of: bars and tables as HTML, lines over time and bars of jobs as SVG.

What is drawn of a run carries its number, by which the page shows and hides it. Colours of text come from the style
sheet.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ullage.errors import InvalidValue
from ullage.manager.simulation.result import FINISHED, OUT_OF_MEMORY, SimulatedAttempt, SimulatedJob
from ullage.text import plain
from ullage.units import GIB, format_duration

COLOURS = ("#4477aa", "#ee6677", "#228833", "#ccaa33", "#33a5c9", "#aa3377", "#ee8866", "#44ab89", "#8a7fd1", "#888888")
_MARK, _TITLE = "<!--BODY-->", "<!--TITLE-->"
_GENERATOR = '<meta name="generator" content="Ullage">'
_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 440, 150, 52, 8, 8, 22


def colour(run: int) -> str:
    """The colour of a run, by its number."""
    return COLOURS[run % len(COLOURS)]


def words(text: Any) -> str:
    """Any text as a page may hold it.

    >>> words("<b>gpt2</b>")
    '&lt;b&gt;gpt2&lt;/b&gt;'
    """
    return escape(plain(str(text)))


def check_page(file: Path) -> None:
    """Refuse a file that a page cannot be written to: one that is no page of Ullage is left alone."""
    if not file.parent.is_dir():
        raise InvalidValue(f"cannot write the page to {file}: there is no folder {file.parent}")
    if file.exists():
        try:
            with file.open(encoding="utf-8", errors="replace") as text:
                ours = _GENERATOR in text.read(2000)
        except OSError as error:
            raise InvalidValue(f"cannot write the page to {file}: {error.strerror}") from None
        if not ours:
            raise InvalidValue(f"{file} is there and is no page of Ullage: it is left as it is; name another file")


def write(file: Path, title: str, parts: Iterable[str]) -> None:
    """Write a page; a file that is no page of Ullage is left alone."""
    check_page(file)
    template = files("ullage.manager.simulation.pages").joinpath("page.html").read_text(encoding="utf-8")
    text = template.replace(_TITLE, words(title)).replace(_MARK, "\n".join(parts))
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise InvalidValue(f"cannot write the page to {file}: {error.strerror}") from None


def card(title: str, about: str, body: str) -> str:
    """A part of the page; empty if it has nothing to show."""
    return f'<section class="card"><h2>{title} <small>{about}</small></h2>{body}</section>' if body else ""


def table(heads: Sequence[tuple[str, str]], rows: Iterable[Sequence[str]]) -> str:
    """A table of texts; a head has its name and its meaning."""
    top = "".join(f'<th title="{words(told)}">{words(name)}</th>' for name, told in heads)
    body = "".join(f"<tr>{''.join(f'<td>{words(cell)}</td>' for cell in cells)}</tr>" for cells in rows)
    return f'<div class="scroll"><table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'


@dataclass(frozen=True)
class Bar:
    """A bar of a run: a value with its text, and where it is uncertain, the ends of an interval."""

    run: int
    name: str
    value: float | None
    text: str
    low: float | None = None
    high: float | None = None


def bars(title: str, rows: Sequence[Bar]) -> str:
    """A row for each run, with a bar from 0."""
    ends = [end for row in rows for end in (row.value, row.high) if end is not None]
    most = max(ends, default=0.0) or 1.0
    lines = []
    for row in rows:
        drawn = f'<i style="width:{_percent(row.value or 0.0, most)};background:{colour(row.run)}"></i>'
        if row.low is not None and row.high is not None:
            begin = _percent(max(row.low, 0.0), most)
            drawn += f'<u style="left:{begin};width:{_percent(row.high - max(row.low, 0.0), most)}"></u>'
        lines.append(
            f'<div class="row"><span>{words(row.name)}</span><span class="track">{drawn}</span>'
            f"<b>{words(row.text)}</b></div>"
        )
    return f"<figure><figcaption>{words(title)}</figcaption>{''.join(lines)}</figure>"


@dataclass(frozen=True)
class PlotLine:
    """Values of a run over something."""

    run: int
    name: str
    x: Any
    y: Any


_SECONDS = [unit * count for unit, counts in ((1, (1, 2, 5, 10, 15, 30)), (60, (1, 2, 5, 10, 15, 30)),
                                              (3600, (1, 2, 3, 6, 12)), (86400, (1, 2, 5, 10, 20, 50, 100, 200, 500)))
            for count in counts]  # fmt: skip


@dataclass(frozen=True)
class PlotAxis:
    """An axis from 0 to `top`, of a "time", a "share", a size in "bytes", or of anything else, with its unit.

    >>> PlotAxis(3 * 3600.0, "time").ticks(4), PlotAxis(400.0, "W").ticks(2)
    ([(0.0, '0'), (3600.0, '1 h'), (7200.0, '2 h'), (10800.0, '3 h')], [(0.0, '0'), (200.0, '200 W'), (400.0, '400 W')])
    """

    top: float
    unit: str

    def ticks(self, most: int) -> list[tuple[float, str]]:
        """Round values from 0 on, in at most so many steps, each with its text."""
        top = self.top or 1.0
        if self.unit == "time":
            step = float(next((each for each in _SECONDS if each * most >= top), round_up(top / most)))
        elif self.unit == "bytes":
            step = round_up(top / GIB / most) * GIB
        else:
            step = round_up(top / most)
        return [(step * number, self._text(step * number)) for number in range(int(top / step + 1e-9) + 1)]

    def _text(self, value: float) -> str:
        if value == 0:
            return "0"
        if self.unit == "time":
            larger = ((unit, name) for unit, name in ((86400, "d"), (3600, "h"), (60, "min")) if self.top >= 3 * unit)
            unit, name = next(larger, (1, "s"))
            return f"{value / unit:g} {name}"
        if self.unit == "share":
            return f"{100 * value:g} %"
        if self.unit == "bytes":
            return f"{value / GIB:g} GiB"
        return f"{value:g} {self.unit}".rstrip()


def round_up(value: float) -> float:
    """The next 1, 2 or 5 times a power of ten.

    >>> round_up(0.3), round_up(100.0)
    (0.5, 100.0)
    """
    unit = 10.0 ** math.floor(math.log10(value))
    return next(factor * unit for factor in (1, 2, 5, 10) if factor * unit >= value * (1 - 1e-9))


def lines(title: str, drawn: Sequence[PlotLine], across: PlotAxis, up: PlotAxis, steps: bool = True) -> str:
    """Lines between two axes; with `steps` a value lasts until the next one."""
    right, bottom = _WIDTH - _RIGHT, _HEIGHT - _BOTTOM

    def at_x(value: float) -> float:
        return round(_LEFT + (right - _LEFT) * value / (across.top or 1.0), 1)

    def at_y(value: float) -> float:
        return round(bottom - (bottom - _TOP) * value / (up.top or 1.0), 1)

    parts = []
    for tick, text in up.ticks(4):
        y = at_y(tick)
        parts.append(f'<line class="grid" x1="{_LEFT}" y1="{y}" x2="{right}" y2="{y}"/>')
        parts.append(f'<text x="{_LEFT - 5}" y="{y + 4}" text-anchor="end">{text}</text>')
    for tick, text in across.ticks(6):
        anchor = "end" if at_x(tick) > right - 16 else "middle"
        parts.append(f'<text x="{at_x(tick)}" y="{_HEIGHT - 6}" text-anchor="{anchor}">{text}</text>')
    for line in drawn:
        points = [(at_x(x), at_y(y)) for x, y in zip(line.x, line.y, strict=True)]
        if points:
            path = f"M{points[0][0]:g} {points[0][1]:g}"
            path += "".join(f"H{x:g}V{y:g}" if steps else f"L{x:g} {y:g}" for x, y in points[1:])
            told = f"<title>{words(line.name)}</title>"
            parts.append(f'<path data-run="{line.run}" stroke="{colour(line.run)}" d="{path}">{told}</path>')
    picture = f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{words(title)}">{"".join(parts)}</svg>'
    return f"<figure><figcaption>{words(title)}</figcaption>{picture}</figure>"


def thinned(times: Any, values: Any, most: int) -> tuple[Any, Any]:
    """A series that steps at `times`, in at most `most` steps: as it is, or by its means over equal parts of the time.

    >>> thinned([0.0, 1.0, 3.0, 4.0], [1.0, 2.0, 5.0, 0.0], most=2)[1].tolist()
    [1.5, 3.5, 3.5]
    """
    times, values = np.asarray(times, dtype=float), np.asarray(values, dtype=float)
    if len(times) <= most or times[-1] <= times[0]:
        return times, values
    so_far = np.concatenate([[0.0], np.cumsum(values[:-1] * np.diff(times))])
    edges = np.linspace(times[0], times[-1], most + 1)
    means = np.diff(np.interp(edges, times, so_far)) / np.diff(edges)
    return edges, np.append(means, means[-1])


class LaneBar(NamedTuple):
    """An attempt on one of its GPUs, in a lane that it has to itself for its time."""

    gpu: int
    lane: int
    attempt: SimulatedAttempt
    job: SimulatedJob


def in_lanes(jobs: Sequence[SimulatedJob], gpus: int) -> tuple[list[LaneBar], list[int]]:
    """Every attempt of every job on its GPUs, those at once in different lanes; and how many lanes each GPU has."""
    taken: list[list[tuple[float, int]]] = [[] for _ in range(gpus)]  # when each lane is free again, the first first
    free: list[list[int]] = [[] for _ in range(gpus)]
    bars = []
    attempts = sorted(
        (
            (attempt.begin, job.id, gpu, attempt, job)
            for job in jobs
            for attempt in job.attempts
            for gpu in attempt.gpus
        ),
        key=lambda row: row[:3],
    )
    for begin, _, gpu, attempt, job in attempts:
        while taken[gpu] and taken[gpu][0][0] <= begin:
            heapq.heappush(free[gpu], heapq.heappop(taken[gpu])[1])
        lane = heapq.heappop(free[gpu]) if free[gpu] else len(taken[gpu])
        heapq.heappush(taken[gpu], (attempt.end, lane))
        bars.append(LaneBar(gpu, lane, attempt, job))
    return bars, [max(1, len(taken[gpu]) + len(free[gpu])) for gpu in range(gpus)]


def gantt(run: int, jobs: Sequence[SimulatedJob], gpus: int, begin: float, end: float) -> str:
    """Every attempt of every job as a bar on its GPUs, those at once below each other; failed ones are marked."""
    width, left, height = 1120, 52, 11
    scale = (width - left - 8) / (end - begin or 1.0)
    shown, lanes = in_lanes(jobs, gpus)
    tops = np.cumsum([0, *(height * count + 8 for count in lanes)]).tolist()
    parts = [
        f'<line class="grid" x1="0" y1="{top - 4}" x2="{width}" y2="{top - 4}"/>'
        f'<text x="0" y="{top + 9}">GPU {gpu}</text>'
        for gpu, top in enumerate(tops[:-1])
    ]
    for gpu, lane, attempt, job in shown:
        x, wide = left + scale * (attempt.begin - begin), max(1.0, scale * (attempt.end - attempt.begin))
        y = tops[gpu] + height * lane
        times = (attempt.end - attempt.begin, attempt.begin - begin, job.arrival - begin)
        lasted, placed, came = map(format_duration, times)
        told = (
            f"job {job.id}, {job.kind}, {job.user}: {attempt.cause} after {lasted}, placed at {placed}, came at {came}"
        )
        kind = (
            "" if attempt.cause == FINISHED else ' class="oom"' if attempt.cause == OUT_OF_MEMORY else ' class="lost"'
        )
        mark = "" if attempt.cause == FINISHED else f'<text class="mark" x="{x + wide + 1:.1f}" y="{y + 8}">×</text>'
        parts.append(
            f'<rect{kind} x="{x:.1f}" y="{y}" width="{wide:.1f}" height="{height - 1}" fill="{_hue(job.kind)}">'
            f"<title>{words(told)}</title></rect>{mark}"
        )
    bottom = tops[-1]
    for tick, text in PlotAxis(end - begin, "time").ticks(10):
        x, anchor = left + scale * tick, "end" if scale * tick > width - left - 40 else "middle"
        parts.append(f'<text x="{x:.1f}" y="{bottom + 10}" text-anchor="{anchor}">{text}</text>')
    return (
        f'<div class="scroll" data-run="{run}"><svg class="wide" viewBox="0 -4 {width} {bottom + 20}" role="img" '
        f'aria-label="jobs over time">{"".join(parts)}</svg></div>'
    )


def _hue(kind: str) -> str:
    """A colour for a kind of job, the same on every page."""
    number = sum((place + 1) * ord(letter) for place, letter in enumerate(kind))
    return f"hsl({number * 47 % 360} 45% {50 + number % 3 * 7}%)"


def _percent(value: float, most: float) -> str:
    return f"{100 * value / most:.2f}%"
