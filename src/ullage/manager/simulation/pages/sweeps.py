"""A sweep as one HTML page: means over seeds with their confidence intervals, and over the number of GPUs.

write(rows, Path("sweep.html"))
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from ullage.hardware import gpu_list
from ullage.manager.simulation.measures import MEASURES, Measure
from ullage.manager.simulation.pages.plots import Bar, PlotAxis, PlotLine, bars, card, colour, lines, table, words
from ullage.manager.simulation.pages.plots import write as write_page
from ullage.manager.simulation.statistics import Interval
from ullage.manager.simulation.sweeps import SweepRow
from ullage.units import energy_unit

SHOWN = ("total", "waiting", "running", "completion", "slowdown", "ooms", "energy", "smact", "memory", "fairness")
_BARS = ("total", "waiting", "completion", "slowdown", "ooms", "energy")
_MOST_BARS = 60  # rows of a trace that are still drawn one by one

Rows = Sequence[SweepRow]


def write(rows: Rows, file: Path) -> None:
    """Write the page; a file that is no page of Ullage is left alone."""
    write_page(file, "Sweep of simulations", parts(rows))


def parts(rows: Rows) -> Iterator[str]:
    """The page, part by part: a chapter for each trace."""
    yield "<h1>Sweep of simulations</h1>"
    yield "<p>Means over seeds; ± is the 95 % confidence interval by Student's t. Changes are those against the first "
    yield "scenario on the same seeds, in pairs; those in brackets may be chance.</p>"
    for source in dict.fromkeys(row.source for row in rows):
        own = [row for row in rows if row.source == source]
        yield f"<h2>{words(source.name)}</h2>"
        yield card("Figures", "means over seeds", _table(own))
        yield card("Against the first", words(own[0].scenario.name), _changes(own))
        yield card("By the number of GPUs", "", _by_gpus(own))
        if len(own) <= _MOST_BARS:
            pictures = "".join(_bars(own, MEASURES[name]) for name in _BARS)
            yield card("Compared", "a line is the confidence interval", f'<div class="many">{pictures}</div>')
        errors = "".join(f"<li>{words(row.scenario.name)}: {words(error)}</li>" for row in own for error in row.errors)
        yield card("Failed", "", f"<ul>{errors}</ul>" if errors else "")


def interval_text(measure: Measure, found: Interval | None) -> str:
    """A mean and how sure it is.

    >>> interval_text(MEASURES["slowdown"], Interval(2.0, 0.25, 3)), interval_text(MEASURES["slowdown"], None)
    ('2.00 ± 0.25', '–')
    """
    return measure.short(None if found is None else found.mean, None if found is None else found.half)


def change_text(found: Interval | None) -> str:
    """A relative change; in brackets where it may be chance.

    >>> change_text(Interval(-0.3, 0.1, 5)), change_text(Interval(-0.3, 0.4, 5)), change_text(None)
    ('-30.0 ± 10.0 %', '(-30.0 ± 40.0 %)', '')
    """
    if found is None:
        return ""
    if found.half is None:
        return f"{100 * found.mean:+.1f} %"
    text = f"{100 * found.mean:+.1f} ± {100 * found.half:.1f} %"
    return text if found.sign else f"({text})"


def _table(rows: Rows) -> str:
    heads = [("scenario", ""), ("seeds", ""), *((name, MEASURES[name].meaning) for name in SHOWN)]
    return table(heads, ([row.scenario.name, str(_seeds(row)),
                          *(interval_text(MEASURES[name], row.figures.get(name)) for name in SHOWN)]
                         for row in rows))  # fmt: skip


def _changes(rows: Rows) -> str:
    if len(rows) < 2:
        return ""
    heads = [("scenario", ""), *((name, MEASURES[name].meaning) for name in SHOWN)]
    return table(heads, ([row.scenario.name, *(change_text(row.changes.get(name)) for name in SHOWN)]
                         for row in rows[1:]))  # fmt: skip


def _seeds(row: SweepRow) -> int:
    return max((interval.count for interval in row.figures.values()), default=0)


def _bars(rows: Rows, measure: Measure) -> str:
    drawn = []
    for number, row in enumerate(rows):
        found = row.figures.get(measure.name)
        mean, low, high = (None, None, None) if found is None else (found.mean, found.low, found.high)
        drawn.append(Bar(number, row.scenario.name, mean, interval_text(measure, found), low, high))
    return bars(measure.name, drawn)


def _by_gpus(rows: Rows) -> str:
    """Figures over the number of GPUs, a line for each scenario, where numbers differ."""
    alike: dict[object, list[tuple[int, SweepRow]]] = {}
    for row in rows:
        scenario = replace(row.scenario, gpus="", label=None, seed=0)
        alike.setdefault(scenario, []).append((len(gpu_list(row.scenario.gpus)), row))
    groups = [sorted(group, key=lambda pair: pair[0]) for group in alike.values()]
    most = max(count for group in groups for count, _ in group)
    if all(len({count for count, _ in group}) < 2 for group in groups):
        return ""
    names = [group[0][1].name_but_gpus for group in groups]
    legend = "".join(f'<label><i style="background:{colour(number)}"></i>{words(name)}</label>'
                     for number, name in enumerate(names))  # fmt: skip
    pictures = []
    for measure in (MEASURES[name] for name in ("total", "waiting", "completion", "energy")):
        known = [[(count, mean) for count, row in group if (mean := row.mean(measure.name)) is not None]
                 for group in groups]  # fmt: skip
        top = max((value for points in known for _, value in points), default=0.0)
        scale, unit = energy_unit(top) if measure.unit == "energy" else (1.0, "time")
        drawn = [
            PlotLine(number, names[number], [x for x, _ in points], [y / scale for _, y in points])
            for number, points in enumerate(known)
        ]
        up = PlotAxis(top / scale, unit)
        pictures.append(lines(measure.name, drawn, PlotAxis(float(most), ""), up, steps=False))
    return f'<div class="key">{legend}</div><div class="many">{"".join(pictures)}</div>'
