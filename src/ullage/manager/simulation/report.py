"""Writes simulations to one HTML page: their figures side by side, and every job on its GPU.

write_runs([result, other], Path("runs.html"))
write_sweep(rows, Path("sweep.html"))
"""

import heapq
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import NamedTuple

from ullage.manager.simulation.formats.files import check_target, write_file
from ullage.manager.simulation.measures import MEASURES, change, change_text, interval_text
from ullage.manager.simulation.result import FINISHED, SimulatedAttempt, SimulatedJob, SimulationResult
from ullage.manager.simulation.statistics import Interval
from ullage.manager.simulation.sweeps import SweepRow
from ullage.text import plain
from ullage.units import format_duration

MOST_BARS, MOST_LANES = 2000, 32  # most attempts and GPUs of a run to draw one by one
_TABLE = (
    "total",
    "waiting",
    "running",
    "completion",
    "slowdown",
    "ooms",
    "failed",
    "unplaced",
    "energy",
    "smact",
    "memory",
    "fairness",
)
_BARS = ("total", "waiting", "completion", "energy")
_COLOURS = (
    "#4477aa",
    "#ee6677",
    "#228833",
    "#ccaa33",
    "#33a5c9",
    "#aa3377",
    "#ee8866",
    "#44ab89",
    "#8a7fd1",
    "#888888",
)
_GENERATOR = '<meta name="generator" content="Ullage">'
_STYLE = """
:root { color-scheme: light dark; --bg:#f6f7f9; --ink:#1b2430; --soft:#5d6778; --line:#d9dee5; --bad:#d92d20; }
@media (prefers-color-scheme: dark) { :root { --bg:#11151b; --ink:#e6eaf0; --soft:#9aa5b6; --line:#2b333f; } }
body { margin:20px auto; max-width:1200px; padding:0 12px; background:var(--bg); color:var(--ink);
  font:14px/1.45 system-ui,sans-serif; overflow-wrap:anywhere; }
h1 { font-size:20px; } h2 { font-size:16px; margin:24px 0 6px; } h3 { font-size:14px; margin:12px 0 4px; }
p, summary { color:var(--soft); } .scroll { overflow-x:auto; } table { width:100%; border-collapse:collapse; }
th, td { text-align:right; padding:4px 0 4px 12px; border-bottom:1px solid var(--line); white-space:nowrap; }
th:first-child, td:first-child { text-align:left; padding-left:0; }
.row { display:grid; grid-template-columns:minmax(70px,34%) 1fr auto; gap:8px; align-items:center; }
.track { position:relative; height:14px; } .track i { display:block; height:14px; }
.track u { position:absolute; top:6px; height:2px; background:var(--ink); }
svg { display:block; width:100%; min-width:720px; } svg text { fill:var(--soft); font-size:11px; }
svg .failed { fill:var(--bad); }
"""

Rows = Sequence[tuple[str, Mapping[str, Interval], Sequence[str]]]  # name, figures, and changes in words


def check_page(file: Path) -> None:
    """Refuse a file that cannot be written, or that exists and is not a page of Ullage."""
    check_target(file, "page of Ullage", lambda text: _GENERATOR in text)


def write_runs(runs: Sequence[SimulationResult], file: Path) -> None:
    _write(file, f"Simulation of {', '.join(dict.fromkeys(run.trace for run in runs))}", _runs(runs))


def write_sweep(rows: Sequence[SweepRow], file: Path) -> None:
    _write(file, "Means over many simulations", _sweep(rows))


def _write(file: Path, title: str, parts: Iterable[str]) -> None:
    check_page(file)
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width">{_GENERATOR}'
    head += f'<link rel="icon" href="data:,"><title>{_words(title)}</title><style>{_STYLE}</style>'
    body = "\n".join([f"<h1>{_words(title)}</h1>", *parts])
    page = f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body>\n{body}\n</body></html>\n'
    write_file(file, page.encode())


def _words(text: str) -> str:
    return escape(plain(text))


def _runs(runs: Sequence[SimulationResult]) -> Iterator[str]:
    yield "<p>Means over the jobs that are done. Changes are those against the first run.</p>"
    rows = []
    for run in runs:
        known = {name: MEASURES[name].of(run.figures) for name in _TABLE}
        figures = {name: Interval.of([value]) for name, value in known.items() if value is not None}
        changes = [change(known[name], MEASURES[name].of(runs[0].figures)) for name in _BARS]
        rows.append((run.name, figures, changes if run is not runs[0] else [""] * len(_BARS)))
    yield from _figures(rows)
    yield "<h2>Jobs on GPUs</h2><p>A bar is an attempt; × marks those that failed.</p>"
    yield from (_jobs(run) for run in runs)
    yield "<h2>Settings</h2>"
    for run in runs:
        settings = json.dumps(run.scenario.to_dict(), ensure_ascii=False)
        yield f"<details><summary>{_words(run.name)}</summary><code>{_words(settings)}</code></details>"


def _sweep(rows: Sequence[SweepRow]) -> Iterator[str]:
    yield "<p>Means over seeds; ± is the 95% confidence interval by Student's t. Changes are those against the first "
    yield "scenario on the same seeds, in pairs; those in brackets may be chance.</p>"
    for source in dict.fromkeys(row.source for row in rows):
        own = [row for row in rows if row.source == source]
        yield f"<h2>{_words(source.name)}</h2>"
        changes = [[change_text(row.changes.get(name)) for name in _BARS] for row in own]
        yield from _figures([(row.scenario.name, row.figures, words) for row, words in zip(own, changes, strict=True)])
        yield from (f"<p>{_words(f'{row.scenario.name}: {error}')}</p>" for row in own for error in row.errors)


def _figures(rows: Rows) -> Iterator[str]:
    cells = [[interval_text(MEASURES[name], figures.get(name)) for name in _TABLE] for _, figures, _ in rows]
    heads = [("run", ""), *((name, MEASURES[name].meaning) for name in _TABLE)]
    yield _table(heads, [[name, *line] for (name, _, _), line in zip(rows, cells, strict=True)])
    for place, measure in enumerate(_BARS):
        ends = [each.high or each.mean for _, figures, _ in rows if (each := figures.get(measure)) is not None]
        most = max(ends, default=0.0) or 1.0
        yield f"<h3>{measure}</h3>"
        for number, (name, figures, changes) in enumerate(rows):
            text = interval_text(MEASURES[measure], figures.get(measure))
            text += f" ({changes[place]})" if changes[place] else ""
            drawn = ""
            if measure in figures:
                interval, colour = figures[measure], _COLOURS[number % len(_COLOURS)]
                drawn = f'<i style="width:{100 * interval.mean / most:.2f}%;background:{colour}"></i>'
                if interval.low is not None and interval.high is not None:
                    low = max(interval.low, 0.0)
                    width = 100 * (interval.high - low) / most
                    drawn += f'<u style="left:{100 * low / most:.2f}%;width:{width:.2f}%"></u>'
            track = f'<span class="track">{drawn}</span><b>{_words(text)}</b>'
            yield f'<div class="row"><span>{_words(name)}</span>{track}</div>'


def _table(heads: Sequence[tuple[str, str]], rows: Iterable[Sequence[str]]) -> str:
    top = "".join(f'<th title="{_words(meaning)}">{_words(name)}</th>' for name, meaning in heads)
    body = "".join(f"<tr>{''.join(f'<td>{_words(cell)}</td>' for cell in cells)}</tr>" for cells in rows)
    return f'<div class="scroll"><table><tr>{top}</tr>{body}</table></div>'


def _jobs(run: SimulationResult) -> str:
    """Draw every attempt as a bar on its GPUs, simultaneous ones below each other."""
    attempts = [attempt for job in run.jobs for attempt in job.attempts]
    gpus = max((gpu + 1 for attempt in attempts for gpu in attempt.gpus), default=0)
    title = f"<h3>{_words(run.name)}</h3>"
    if len(attempts) > MOST_BARS or gpus > MOST_LANES:
        return f"{title}<p>Too many to draw one by one: {len(attempts):,} attempts on {gpus:,} GPUs.</p>"
    begin = min((job.arrival for job in run.jobs), default=0.0)
    end = max((attempt.end for attempt in attempts), default=begin)
    width, left, height = 1120, 52, 11
    scale = (width - left - 8) / (end - begin or 1.0)
    bars, lanes = in_lanes(run.jobs, gpus)
    tops = [8 * gpu + height * sum(lanes[:gpu]) for gpu in range(gpus + 1)]
    parts = [f'<text x="0" y="{top + 9}">GPU {gpu}</text>' for gpu, top in enumerate(tops[:-1])]
    for gpu, lane, attempt, job in bars:
        x, y = left + scale * (attempt.begin - begin), tops[gpu] + height * lane
        wide = max(1.0, scale * (attempt.end - attempt.begin))
        lasted, placed = format_duration(attempt.end - attempt.begin), format_duration(attempt.begin - begin)
        label = f"job {job.id}, {job.kind}, {job.user}: {attempt.cause} after {lasted}, placed at {placed}"
        good = attempt.cause == FINISHED
        hue = sum((place + 1) * ord(letter) for place, letter in enumerate(job.kind)) * 47 % 360
        fill = f'fill="hsl({hue} 45% 55%)"' if good else 'class="failed"'
        parts.append(
            f'<rect x="{x:.1f}" y="{y}" width="{wide:.1f}" height="{height - 1}" {fill}>'
            f"<title>{_words(label)}</title></rect>"
        )
        parts += [] if good else [f'<text class="failed" x="{x + wide + 1:.1f}" y="{y + 9}">×</text>']
    picture = f'<svg viewBox="0 0 {width} {tops[-1]}" role="img" aria-label="jobs over time">{"".join(parts)}</svg>'
    return f'{title}<p>{format_duration(end - begin)}</p><div class="scroll">{picture}</div>'


class LaneBar(NamedTuple):
    """An attempt on one of its GPUs, in a lane without overlaps."""

    gpu: int
    lane: int
    attempt: SimulatedAttempt
    job: SimulatedJob


def in_lanes(jobs: Sequence[SimulatedJob], gpus: int) -> tuple[list[LaneBar], list[int]]:
    """Give every attempt a lane on each of its GPUs, and count the lanes of each GPU."""
    taken: list[list[tuple[float, int]]] = [[] for _ in range(gpus)]  # (end of a lane's last bar, lane)
    free: list[list[int]] = [[] for _ in range(gpus)]
    bars = []
    attempts = [(each.begin, job.id, gpu, each, job) for job in jobs for each in job.attempts for gpu in each.gpus]
    for begin, _, gpu, attempt, job in sorted(attempts, key=lambda row: row[:3]):
        while taken[gpu] and taken[gpu][0][0] <= begin:
            heapq.heappush(free[gpu], heapq.heappop(taken[gpu])[1])
        lane = heapq.heappop(free[gpu]) if free[gpu] else len(taken[gpu])
        heapq.heappush(taken[gpu], (attempt.end, lane))
        bars.append(LaneBar(gpu, lane, attempt, job))
    return bars, [max(1, len(taken[gpu]) + len(free[gpu])) for gpu in range(gpus)]
