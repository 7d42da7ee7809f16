"""The ranking as one HTML page that needs no network and no script: tables and plots, light and dark."""

import math
from collections.abc import Sequence
from html import escape
from importlib.resources import files
from pathlib import Path

from ullage.errors import InvalidValue
from ullage.units import MIB, format_bytes, format_duration
from ullage_lab.judge.standings import COLUMNS, Errors, Standing, rank
from ullage_lab.judge.truth import TruthSet
from ullage_lab.judge.worker import Record

# The plots of the ranking's page, as SVG text; colours come from the page's style sheet, for light and dark.

OURS = "ullage"
LOWEST_ERROR = 1e-4  # an error of 0 has no place on a logarithmic axis: it is drawn at the edge, and the axis says so
HIGHEST_ERROR = 100.0
_MARK = "<!--BODY-->"


class Axis:
    """A logarithmic axis from values to pixels; values beyond its ends are drawn at them.

    >>> axis = Axis(1, 100, 0, 200)
    >>> axis(10), axis(1000), axis.ticks()
    (100.0, 200.0, [1, 10, 100])
    """

    def __init__(self, low: float, high: float, begin: float, end: float) -> None:
        self.low, self.high, self.begin, self.end = low, high, begin, end

    def __call__(self, value: float) -> float:
        clipped = min(max(value, self.low), self.high)
        share = math.log(clipped / self.low) / math.log(self.high / self.low)
        return round(self.begin + share * (self.end - self.begin), 1)

    def ticks(self, base: float = 10) -> list[float]:
        """Return the powers of `base` within the axis."""
        first, last = math.ceil(math.log(self.low, base) - 1e-9), math.floor(math.log(self.high, base) + 1e-9)
        return [base**power for power in range(first, last + 1)]


def percent(value: float) -> str:
    """Return a share as a label.

    >>> percent(0.001), percent(1), percent(30)
    ('0.1%', '100%', '30×')
    """
    return f"{100 * value:g}%" if value <= 1 else f"{value:g}×"


def errors_by_family(standings: Sequence[Standing], family: str) -> str:
    """Plot one family: a row per estimator, with a dot at its median error and a line to the 90th percentile."""
    pairs = [(one.estimator, one.families[family]) for one in standings if family in one.families]
    pairs.sort(key=lambda pair: pair[1].median)
    height, left, width = 22, 132, 480
    axis = Axis(LOWEST_ERROR, HIGHEST_ERROR, left, width - 16)
    bottom = 8 + height * len(pairs)
    parts = [
        f'<line class="grid" x1="{axis(tick)}" y1="4" x2="{axis(tick)}" y2="{bottom}"/>'
        f'<text class="tick" x="{axis(tick)}" y="{bottom + 15}" text-anchor="middle">{_edge(tick)}</text>'
        for tick in axis.ticks()
    ]
    for index, (name, errors) in enumerate(pairs):
        parts.append(_family_row(name, errors, axis, 8 + height * index + height / 2, left))
    return _svg(width, bottom + 24, parts, f"Median error of each estimator on {family}")


def _edge(tick: float) -> str:
    return f"≤ {percent(tick)}" if tick == LOWEST_ERROR else percent(tick)


def _family_row(name: str, errors: Errors, axis: Axis, y: float, left: int) -> str:
    title = f"{name}: median {errors.median:.2%}, nine in ten below {errors.p90:.2%}, {errors.under:.0%} too low"
    kind = _kind(name)
    return (
        f'<g class="{kind}"><title>{escape(title)}, {errors.count} runs</title>'
        f'<text class="name" x="{left - 10}" y="{y + 4}" text-anchor="end">{escape(name)}</text>'
        f'<line class="range" x1="{axis(errors.median)}" y1="{y}" x2="{axis(errors.p90)}" y2="{y}"/>'
        f'<circle class="dot" cx="{axis(errors.median)}" cy="{y}" r="4.5"/></g>'
    )


def predicted_against_true(name: str, points: Sequence[tuple[int, int, str]], low: int, high: int) -> str:
    """Plot one estimator: a dot per run (predicted, true, name), both in bytes; on the line they agree."""
    size, left, bottom, top = 250, 46, 212, 12
    across, up = Axis(low, high, left, size - 8), Axis(low, high, bottom, top)
    ticks = across.ticks(4)
    parts = [f'<line class="equal" x1="{left}" y1="{bottom}" x2="{size - 8}" y2="{top}"/>']
    for tick in ticks:
        label = format_bytes(round(tick)).replace(".00", "").replace(".0", "")
        parts.append(f'<line class="grid" x1="{across(tick)}" y1="{top}" x2="{across(tick)}" y2="{bottom}"/>')
        parts.append(f'<line class="grid" x1="{left}" y1="{up(tick)}" x2="{size - 8}" y2="{up(tick)}"/>')
        parts.append(f'<text class="tick" x="{left - 5}" y="{up(tick) + 4}" text-anchor="end">{label}</text>')
        parts.append(f'<text class="tick" x="{across(tick)}" y="{bottom + 14}" text-anchor="middle">{label}</text>')
    for predicted, true, run in points:
        title = f"{run}: {format_bytes(predicted)} predicted, {format_bytes(true)} measured"
        parts.append(
            f'<circle class="point" cx="{across(true)}" cy="{up(max(predicted, 1))}" r="2.4">'
            f"<title>{escape(title)}</title></circle>"
        )
    parts.append(f'<text class="tick" x="{(left + size) / 2}" y="{bottom + 30}" text-anchor="middle">measured</text>')
    return _svg(size, bottom + 36, parts, f"Predicted against measured memory, {name}", _kind(name))


def time_against_error(standings: Sequence[Standing]) -> str:
    """Plot a dot per estimator: its median time across, its median error up. Lower left is better."""
    shown = [(one.estimator, one.seconds, one.process) for one in standings if one.seconds is not None and one.process]
    width, height, left, bottom, top = 1120, 440, 70, 392, 14
    across = _time_axis([seconds for _, seconds, _ in shown if seconds], left, width - 150)
    up = Axis(LOWEST_ERROR, HIGHEST_ERROR, bottom, top)
    parts = []
    for tick in up.ticks():
        parts.append(f'<line class="grid" x1="{left}" y1="{up(tick)}" x2="{width - 20}" y2="{up(tick)}"/>')
        parts.append(f'<text class="tick" x="{left - 8}" y="{up(tick) + 4}" text-anchor="end">{_edge(tick)}</text>')
    for tick in across.ticks():
        label = format_duration(tick)
        parts.append(f'<line class="grid" x1="{across(tick)}" y1="{top}" x2="{across(tick)}" y2="{bottom}"/>')
        parts.append(f'<text class="tick" x="{across(tick)}" y="{bottom + 16}" text-anchor="middle">{label}</text>')
    taken: list[tuple[float, float]] = []
    for name, seconds, errors in sorted(shown, key=lambda one: one[2].median if one[2] else 0):
        assert seconds is not None and errors is not None
        x, y = across(max(seconds, 1e-6)), up(errors.median)
        label_y = _free(taken, x, y + 4)
        title = f"{name}: {format_duration(seconds)}, median error {errors.median:.2%}"
        parts.append(
            f'<g class="{_kind(name)}"><title>{escape(title)}</title><circle class="dot" cx="{x}" cy="{y}" r="5"/>'
            f'<line class="lead" x1="{x}" y1="{y}" x2="{x + 12}" y2="{round(label_y - 4, 1)}"/>'
            f'<text class="name" x="{x + 14}" y="{label_y}">{escape(name)}</text></g>'
        )
    middle = (left + width - 150) / 2
    parts.append(f'<text class="tick" x="{middle}" y="{bottom + 36}" text-anchor="middle">time of an estimate</text>')
    return _svg(width, height, parts, "Time of an estimate against its median error")


def _free(taken: list[tuple[float, float]], x: float, y: float) -> float:
    """Return the nearest height at or above `y` at which a label at `x` covers no other."""
    for step in range(20):
        for shifted in (y - 13 * step, y + 13 * step):
            if all(abs(x - other_x) > 120 or abs(shifted - other_y) >= 13 for other_x, other_y in taken):
                taken.append((x, shifted))
                return round(shifted, 1)
    return y


def _time_axis(times: Sequence[float], begin: float, end: float) -> Axis:
    """Return an axis of whole decades around the times, at least one."""
    powers = [math.log10(max(time, 1e-6)) for time in times] or [0.0]
    low = math.floor(min(powers))
    return Axis(10.0**low, 10.0 ** max(math.ceil(max(powers)), low + 1), begin, end)


def _kind(name: str) -> str:
    return "ours" if name.partition(" ")[0] == OURS else "peer"


def _svg(width: float, height: float, parts: Sequence[str], label: str, kind: str = "") -> str:
    return (
        f'<svg viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img" class="{kind}" '
        f'aria-label="{escape(label)}">{"".join(parts)}</svg>'
    )


def write(ranked: Sequence[tuple[TruthSet, list[Record]]], path: Path) -> None:
    try:
        path.write_text(page(ranked), encoding="utf-8")
    except OSError as error:
        raise InvalidValue(f"cannot write the report to {path}: {error.strerror}") from None


def page(ranked: Sequence[tuple[TruthSet, list[Record]]]) -> str:
    template = files("ullage_lab.judge").joinpath("ranking.html").read_text(encoding="utf-8")
    return template.replace(_MARK, "\n".join(_section(truth, records) for truth, records in ranked))


def _section(truth: TruthSet, records: list[Record]) -> str:
    records = [*records, *truth.published]
    standings = rank(truth, records)
    families = sorted({family for one in standings for family in one.families})
    plots = "".join(
        f'<figure><figcaption>{escape(family)}</figcaption><div class="scroll">{errors_by_family(standings, family)}'
        "</div></figure>"
        for family in families
    )
    return f"""<section data-truth="{escape(truth.name)}">
<h2>{escape(truth.name)} <small>{escape(truth.gpu)}, {len(truth.runs)} runs</small></h2>
{_notes(truth)}
<div class="card"><div class="scroll">{_table(standings)}</div></div>
<div class="card"><h3>Error by family <small>dot: median; line: to the error that nine in ten stay below; against the
memory of the process</small></h3><div class="many">{plots}</div></div>
<div class="card"><h3>Predicted against measured <small>a dot a run, memory of the process; below the line is too low;
what lies beyond an axis is drawn at its end</small></h3>
<div class="many">{_scatters(truth, records, standings)}</div></div>
<div class="card"><h3>Time against error <small>lower left is better</small></h3>
<div class="scroll">{time_against_error(standings)}</div></div>
{_reasons(standings)}
</section>"""


def _notes(truth: TruthSet) -> str:
    lines = [f"{count} runs left out: {reason}" for reason, count in truth.left_out.items()] + truth.notes
    ooms = sum(run.oom for run in truth.runs)
    if ooms:
        lines.insert(0, f"{ooms} runs ran out of memory: they are in the protocol and in no error")
    return "<ul>" + "".join(f"<li>{escape(line)}</li>" for line in lines) + "</ul>" if lines else ""


def _table(standings: Sequence[Standing]) -> str:
    heads = "".join(f'<th title="{escape(title)}">{name}</th>' for name, (title, _) in COLUMNS.items())
    return f"<table><thead><tr>{heads}</tr></thead><tbody>{''.join(map(_row, standings))}</tbody></table>"


def _row(one: Standing) -> str:
    cells = "".join(f"<td>{escape(cell(one) or '–')}</td>" for _, cell in COLUMNS.values())
    return f'<tr class="{_kind(one.estimator)}">{cells}</tr>'


def _scatters(truth: TruthSet, records: Sequence[Record], standings: Sequence[Standing]) -> str:
    runs = {run.id: run for run in truth.runs if run.process and not run.oom}
    true = [run.process for run in runs.values() if run.process]
    if not true:
        return ""
    low, high = max(min(true) // 2, MIB), max(true) * 2
    plots = []
    for name in (one.estimator for one in standings):
        points = [
            (record.process if record.process is not None else record.figure, runs[record.run].process or 0, record.run)
            for record in records
            if record.estimator == name and record.figure is not None and record.run in runs
        ]
        if points:
            drawn = [(figure, measured, run) for figure, measured, run in points if figure is not None]
            plots.append(
                f"<figure><figcaption>{escape(name)}</figcaption>{predicted_against_true(name, drawn, low, high)}"
                "</figure>"
            )
    return "".join(plots)


def _reasons(standings: Sequence[Standing]) -> str:
    rows = [
        f"<tr><td>{escape(one.estimator)}</td><td>{count}</td><td>{escape(reason)}</td></tr>"
        for one in standings
        for reason, count in one.reasons.items()
        if not one.estimator.endswith("(upper)")
    ]
    if not rows:
        return ""
    return (
        '<div class="card"><h3>No estimate, and why</h3><div class="scroll"><table class="words"><thead><tr>'
        f"<th>estimator</th><th>runs</th><th>reason</th></tr></thead><tbody>{''.join(rows)}</tbody></table></div></div>"
    )
