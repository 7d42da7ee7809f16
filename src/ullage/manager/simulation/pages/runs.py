"""Runs side by side as one HTML page: their figures, memory, SM activity and power over time, and every job on its GPU.

write([result, other], Path("runs.html"))
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ullage.manager.simulation.measures import MEASURES, change
from ullage.manager.simulation.pages.plots import (
    Bar,
    PlotAxis,
    PlotLine,
    bars,
    card,
    colour,
    gantt,
    lines,
    table,
    thinned,
    words,
)
from ullage.manager.simulation.pages.plots import write as write_page
from ullage.manager.simulation.result import GpuSeries, SimulationResult
from ullage.units import format_bytes, format_energy

MOST_BARS, MOST_LANES = 2000, 32  # attempts and GPUs of a run that are still drawn one by one
_POINTS = 400
_MOST_POINTS = 120_000  # of all lines of GPUs together
_MOST_USERS = 40
_MOST_AT_FIRST = 4  # runs that are drawn until others are chosen
_TABLE = ("total", "waiting", "running", "completion", "slowdown", "slowdown-p95", "smact", "memory", "fairness")

Runs = Sequence[SimulationResult]


def write(runs: Runs, file: Path) -> None:
    """Write the page; a file that is no page of Ullage is left alone."""
    write_page(file, f"Simulation of {runs[0].trace}", parts(runs))


def parts(runs: Runs) -> Iterator[str]:
    """The page, part by part."""
    traces = dict.fromkeys(run.trace for run in runs)
    gpus = dict.fromkeys(run.scenario.gpus for run in runs)
    jobs = dict.fromkeys(f"{len(run.jobs):,}" for run in runs)
    yield f"<h1>Simulation of {words(', '.join(traces))}</h1>"
    about = f"{' or '.join(jobs)} jobs on {words(' or '.join(gpus))}"
    yield f"<p>{about}. Figures are compared with those of the first run.</p>"
    yield card("Figures", "means over the jobs that are done", _figures(runs))
    yield card("Total time", MEASURES["total"].meaning, f'<div class="many">{_bars(runs, "total")}</div>')
    times = "".join(_bars(runs, name) for name in ("waiting", "running", "completion"))
    yield card(
        "Waiting, running and completion", "means over the jobs that are done", f'<div class="many">{times}</div>'
    )
    yield card(
        "Crashes", "attempts that ran out of GPU memory or lost their GPU, and what became of jobs", _crashes(runs)
    )
    yield card("Energy", "of all GPUs, from the first arrival to the last end", _energy(runs))
    yield _chooser(runs)
    yield card("The queue", "", f'<div class="many">{_queue(runs)}</div>')
    yield from _over_time(runs)
    yield card("Jobs on GPUs", "a bar is an attempt, coloured by the kind of job; red × ran out of memory", _jobs(runs))
    yield card("GPUs", "means over the whole time", _gpus(runs))
    yield card("Users", "means over their jobs that are done", _users(runs))
    yield card("Settings", "", "".join(_settings(number, run) for number, run in enumerate(runs)))


def _chooser(runs: Runs) -> str:
    """Which runs are drawn: all, or where they are many, the first and the quickest."""
    by_time = sorted(range(1, len(runs)), key=lambda number: runs[number].figures.total_s)
    shown = range(len(runs)) if len(runs) <= _MOST_AT_FIRST else [0, *by_time[: _MOST_AT_FIRST - 2]]
    boxes = [
        f'<label><input type="checkbox" value="{number}"{" checked" if number in shown else ""}>'
        f'<i style="background:{colour(number)}"></i>{words(run.name)}</label>'
        for number, run in enumerate(runs)
    ]
    return f'<section class="card runs"><small>drawn below:</small>{"".join(boxes)}</section>'


def _figures(runs: Runs) -> str:
    first = runs[0].figures
    heads = [("run", ""), *((name, MEASURES[name].meaning) for name in _TABLE)]
    rows = []
    for number, run in enumerate(runs):
        cells = [run.name]
        for measure in map(MEASURES.__getitem__, _TABLE):
            value = measure.of(run.figures)
            more = change(value, measure.of(first)) if number and measure.unit in ("time", "ratio") else ""
            cells.append(f"{measure.short(value)} ({more})" if more else measure.short(value))
        rows.append(cells)
    return table(heads, rows)


def _bars(runs: Runs, name: str) -> str:
    measure = MEASURES[name]
    values = [measure.of(run.figures) for run in runs]
    return bars(name, [Bar(number, run.name, value, measure.text(value))
                       for number, (run, value) in enumerate(zip(runs, values, strict=True))])  # fmt: skip


def _crashes(runs: Runs) -> str:
    names = ("ooms", "lost", "failed", "unplaced")
    heads = [("run", ""), *((name, MEASURES[name].meaning) for name in names)]
    return table(heads, ([run.name, *(MEASURES[name].text(MEASURES[name].of(run.figures)) for name in names)]
                         for run in runs))  # fmt: skip


def _energy(runs: Runs) -> str:
    measure = MEASURES["energy"]
    heads = [("run", ""), ("energy", ""), ("against the first", ""), ("mean power", ""), ("a job that is done", "")]
    rows = []
    for number, run in enumerate(runs):
        found = run.figures
        power = run.energy_j / found.total_s if found.total_s else 0.0
        each = f"{run.energy_j / found.done / 1e3:,.0f} kJ" if found.done else "–"
        more = change(run.energy_j, runs[0].energy_j) if number else ""
        rows.append([run.name, measure.text(run.energy_j), more, f"{power:,.0f} W", each])
    return table(heads, rows) + f'<div class="many">{_bars(runs, "energy")}</div>'


# Over time


def _queue(runs: Runs) -> str:
    """How many jobs wait over time, and how long they wait, from the quickest to the slowest."""
    begin, waiting, delays = _begin(runs), [], []
    for number, run in enumerate(runs):
        times, counts = _waiting(run)
        waiting.append(PlotLine(number, run.name, *thinned(times - begin, counts, _POINTS)))
        done = np.sort([job.waiting_s for job in run.jobs if job.state == "done"])
        if len(done):
            shares = np.linspace(0.0, 1.0, min(len(done), 200))
            delays.append(PlotLine(number, run.name, shares, np.quantile(done, shares)))
    end = max((float(line.x[-1]) for line in waiting if len(line.x)), default=0.0)
    most = max((float(np.max(line.y)) for line in waiting if len(line.y)), default=0.0)
    longest = max((float(line.y[-1]) for line in delays), default=0.0)
    return lines("jobs that wait", waiting, PlotAxis(end, "time"), PlotAxis(most, "")) + lines(
        "waiting of jobs, the quickest first", delays, PlotAxis(1.0, "share"), PlotAxis(longest, "time"), steps=False
    )


def _begin(runs: Runs) -> float:
    """The first arrival, where all axes begin."""
    return min((job.arrival for run in runs for job in run.jobs), default=0.0)


def _waiting(run: SimulationResult) -> tuple[Any, Any]:
    """When the number of waiting jobs changes, and to what."""
    comes = [job.arrival for job in run.jobs] + [
        attempt.end for job in run.jobs for attempt, _ in zip(job.attempts, job.attempts[1:], strict=False)
    ]
    goes = [attempt.begin for job in run.jobs for attempt in job.attempts]
    times = np.array(comes + goes)
    order = np.argsort(times, kind="stable")
    return times[order], np.maximum(np.cumsum(np.where(order < len(comes), 1, -1)), 0)


def _over_time(runs: Runs) -> Iterator[str]:
    known = [(number, run) for number, run in enumerate(runs) if run.gpus]
    if not known:
        yield card("Over time", "", "<p>Clusters of more than 64 GPUs are not followed GPU by GPU.</p>")
        return
    begin = _begin(runs)
    end = max(float(series.times[-1]) for _, run in known for series in run.gpus) - begin
    total = max(series.total for _, run in known for series in run.gpus)
    watts = max(float(max(series.power_w)) for _, run in known for series in run.gpus)
    most = max(len(run.gpus) for _, run in known)
    points = max(40, min(_POINTS, _MOST_POINTS // (3 * sum(len(run.gpus) for _, run in known))))
    for title, about, attribute, axis in (
        ("Memory over time", "in use on each GPU", "memory", PlotAxis(float(total), "bytes")),
        ("SM activity over time", "the share of the SMs with work", "smact", PlotAxis(1.0, "share")),
        ("Power over time", "", "power_w", PlotAxis(watts, "W")),
    ):
        picked = _picker(attribute)
        whole = lines("mean of all GPUs", [PlotLine(number, run.name, *thinned(*_mean(run.gpus, picked, begin), points))
                                           for number, run in known], PlotAxis(end, "time"), axis)  # fmt: skip
        each = "".join(
            lines(f"GPU {place}", [
                PlotLine(number, run.name, *thinned(*_mean([run.gpus[place]], picked, begin), points))
                for number, run in known if place < len(run.gpus)
            ], PlotAxis(end, "time"), axis)
            for place in range(most)
        )  # fmt: skip
        closed = "" if most <= 8 else " closed"
        body = f'<div class="many">{whole}{each if not closed else ""}</div>'
        if closed:
            body += f'<details><summary>each of {most} GPUs</summary><div class="many">{each}</div></details>'
        yield card(title, about, body)


def _picker(attribute: str) -> Callable[[GpuSeries], Any]:
    return lambda series: getattr(series, attribute)


def _mean(gpus: Sequence[GpuSeries], picked: Callable[[GpuSeries], Any], begin: float) -> tuple[Any, Any]:
    """The mean of the GPUs' values, which step at different times."""
    times = np.unique(np.concatenate([np.asarray(series.times, dtype=float) for series in gpus]))
    total = np.zeros(len(times))
    for series in gpus:
        place = np.searchsorted(series.times, times, side="right") - 1
        total += np.where(place < 0, 0.0, np.asarray(picked(series), dtype=float)[np.maximum(place, 0)])
    return times - begin, total / len(gpus)


def _jobs(runs: Runs) -> str:
    end = max((attempt.end for run in runs for job in run.jobs for attempt in job.attempts), default=0.0)
    begin, pictures, left_out = _begin(runs), [], []
    for number, run in enumerate(runs):
        attempts = [attempt for job in run.jobs for attempt in job.attempts]
        gpus = max((gpu + 1 for attempt in attempts for gpu in attempt.gpus), default=0)
        if not attempts:
            continue
        if len(attempts) > MOST_BARS or gpus > MOST_LANES:
            left_out.append(f"{run.name} ({len(attempts):,} attempts on {gpus:,} GPUs)")
            continue
        picture = gantt(number, run.jobs, gpus, begin, end)
        pictures.append(f'<div data-run="{number}"><h3>{words(run.name)}</h3></div>{picture}')
    told = f"<p>Too many to draw one by one: {words('; '.join(left_out))}.</p>" if left_out else ""
    return "".join(pictures) + told


def _gpus(runs: Runs) -> str:
    heads = [("run", ""), ("GPU", ""), ("with jobs", "share of the time"), ("memory", "mean in use"),
             ("most memory", ""), ("most jobs", "at once"), ("SMACT", "mean SM activity"), ("power", "mean"),
             ("energy", "")]  # fmt: skip
    rows = []
    for run in runs:
        for row in run.per_gpu:
            shares = [f"{100 * value:.0f} %" for value in (row.busy, row.memory)]
            peak = [format_bytes(row.memory_peak), str(row.jobs_peak)]
            power = [f"{100 * row.smact:.0f} %", f"{row.power_w:.0f} W", format_energy(row.energy_j)]
            rows.append([run.name, f"{row.index} {row.name}", *shares, *peak, *power])
    if not rows:
        return ""
    return _folded(table(heads, rows), len(rows))


def _users(runs: Runs) -> str:
    if max(len(run.users) for run in runs) < 2:
        return ""
    heads = [
        ("run", ""),
        ("user", ""),
        ("jobs", ""),
        ("done", ""),
        ("waiting", ""),
        ("completion", ""),
        ("slowdown", ""),
    ]
    slowdown, rows = MEASURES["slowdown"], []
    for run in runs:
        most = sorted(run.users, key=lambda row: (-row.jobs, row.user))[:_MOST_USERS]
        for row in most:
            times = [MEASURES["waiting"].text(value) for value in (row.waiting_s, row.completion_s)]
            rows.append([run.name, row.user, str(row.jobs), str(row.done), *times, slowdown.text(row.slowdown)])
    many = max(len(run.users) for run in runs)
    told = f"<p>The {_MOST_USERS} users with the most jobs, of {many}.</p>" if many > _MOST_USERS else ""
    return told + _folded(table(heads, rows), len(rows))


def _folded(shown: str, rows: int) -> str:
    """A table that is closed at first where it is long."""
    return f"<details{' open' if rows <= 16 else ''}><summary>{rows} rows</summary>{shown}</details>"


def _settings(number: int, run: SimulationResult) -> str:
    told = json.dumps(run.scenario.to_dict(), ensure_ascii=False)
    return f'<details data-run="{number}"><summary>{words(run.name)}</summary><code>{words(told)}</code></details>'
