"""Ullage's policy, estimates and predicted slowdowns against MAGM with GPUMemNet as RAD-RM runs it, simulated.

    python benchmarks/dissertation/ours_against_theirs.py --seeds 20 --drawn 50

On the authors' two traces (seeds draw how far true slowdowns are from predicted ones) and on drawn traces: half of 60
jobs of the mix "heavy", half of 90 of the mix "mixed", with loads from 1 to 3.5. `--write` puts the tables into
lab/docs/reproduction.md.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from collocation import table
from rad_rm import GPUS, rad_rm
from reproduction import FILES, PAGE, TRACES, figures_of, source_of, written
from ullage.manager.simulation.measures import MEASURES
from ullage.manager.simulation.result import Figures
from ullage.manager.simulation.scenario import Scenario
from ullage.manager.simulation.statistics import Interval, changes
from ullage.manager.simulation.sweeps import Case, TraceSource, cases

COMPARED = ("total", "completion", "energy")
EXCLUSIVE = rad_rm("exclusive", "oracle", label="exclusive")
THEIRS = rad_rm("magm", "gpumemnet", smact=0.8, label="MAGM + GPUMemNet, RAD-RM")
OURS = Scenario(gpus=GPUS, label="ullage")
BY_SPEED = tuple(OURS.but(min_speed=speed, label=f"ullage, speed at least {speed:.0%}") for speed in (0.4, 0.5, 0.8))
SCENARIOS = (EXCLUSIVE, THEIRS, OURS, *BY_SPEED)
Found = dict[str, list[Figures]]  # by scenario


def drawn_cases(count: int, small: int = 1, first: int = 0) -> list[Case]:
    """Half heavy, half mixed, with loads from 1 to 3.5; each on a trace of its own, by seeds from the `first` on.
    `small` divides the jobs."""
    drawn = []
    for number in range(count):
        mix, jobs = (("heavy", 60), ("mixed", 90))[number % 2]
        load = round(1 + 2.5 * (number // 2) / max(1, (count - 1) // 2), 3)
        source = TraceSource(mix=mix, drawn=(("jobs", jobs // small), ("gpus", 4), ("load", load), ("spread", 0.3)))
        drawn += cases([source], SCENARIOS, [first + number])
    return drawn


def simulated(wanted: Sequence[Case], workers: int = 1, cache: Path | None = None) -> Found:
    """The figures of each scenario, in the order of the cases."""
    figures: Found = {}
    for case, each in zip(wanted, figures_of(wanted, workers, cache), strict=True):
        figures.setdefault(case.scenario.name, []).append(each)
    return figures


def against(figures: Found, name: str, base: str, measure: str) -> Interval:
    """The mean relative change of a figure, in pairs: the same trace, the same seed."""
    values = [[MEASURES[measure].of(each) or 0.0 for each in figures[who]] for who in (name, base)]
    interval = changes(*values)
    assert interval is not None
    return interval


def _cell(interval: Interval) -> str:
    if interval.half is None:
        return f"{100 * interval.mean:+.1f}%"
    return f"{100 * interval.mean:+.1f}% ± {100 * interval.half:.1f}"


def comparison(figures: Found, base: str) -> list[list[str]]:
    """A row for each scenario but the base."""
    names = [name for name in figures if name != base and (name != EXCLUSIVE.name or base == THEIRS.name)]
    rows = []
    for name in names:
        jobs = sum(each.jobs for each in figures[name])
        over = jobs - sum(each.done for each in figures[name])
        ooms = sum(each.ooms for each in figures[name])
        cells = [_cell(against(figures, name, base, measure)) for measure in COMPARED]
        rows.append([name, f"{ooms} in {jobs} jobs", *cells, str(over)])
    return rows


HEAD = ["run", "OOMs", "total", "mean completion", "energy", "jobs not done"]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Ullage against MAGM with GPUMemNet, simulated.")
    parser.add_argument(
        "traces", type=Path, nargs="?", default=FILES, help="folder of the traces (default: the shipped)"
    )
    parser.add_argument("--seeds", type=int, default=20, help="how often each run on them is drawn (default: 20)")
    parser.add_argument("--drawn", type=int, default=50, help="drawn traces (default: 50)")
    parser.add_argument("--first", type=int, default=0, help="the seed of the first drawn trace (default: 0)")
    parser.add_argument("--workers", type=int, default=1, help="processes (default: 1)")
    parser.add_argument("--resume", type=Path, help="file of finished simulations to reuse")
    parser.add_argument("--write", action="store_true", help="write the tables into the page")
    options = parser.parse_args(arguments)
    content = {}
    for name in TRACES:
        source = source_of(options.traces, name)
        figures = simulated(cases([source], SCENARIOS, range(options.seeds)), options.workers, options.resume)
        for words, base in (("exclusive", EXCLUSIVE), ("theirs", THEIRS)):
            content[f"{name} against {words}"] = table(HEAD, comparison(figures, base.name))
    drawn = simulated(drawn_cases(options.drawn, first=options.first), options.workers, options.resume)
    content["drawn against theirs"] = table(HEAD, comparison(drawn, THEIRS.name))
    for place, text in content.items():
        print(f"{place}\n\n{text}\n")
    if options.write:
        written(PAGE, content)


if __name__ == "__main__":
    main()
