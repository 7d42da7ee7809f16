"""The sixth chapter of E. Yousefzadeh-Asl-Miandoab's dissertation again, in the simulator, ours beside theirs.

    python benchmarks/dissertation/reproduction.py --seeds 20
    python benchmarks/dissertation/reproduction.py --write

Prints the tables; `--write` puts them into lab/docs/reproduction.md, each between `<!-- reproduction: NAME -->` and
`<!-- end -->`, and draws the pictures. `--resume FILE` reuses the simulations of an earlier call.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import collocation
from collocation import Panel, svg, table, ticks
from rad_rm import rad_rm
from ullage.manager.simulation.engine import simulate
from ullage.manager.simulation.measures import MEASURES
from ullage.manager.simulation.result import Figures, GpuSeries
from ullage.manager.simulation.scenario import Scenario
from ullage.manager.simulation.sweeps import Case, TraceSource, cases, run_cases
from ullage.units import GIB

ROOT = Path(__file__).resolve().parents[2]
PAGE, IMAGES = ROOT / "lab/docs/reproduction.md", ROOT / "docs/images"
FILES = ROOT / "examples/carma"
TRACES = {"90": "philly_mix-90-tasks", "60": "philly_heavy-60-tasks"}
EXCLUSIVE = "exclusive"


@dataclass(frozen=True)
class Run:
    """A run of the chapter: its trace, the authors' name for it, and their published figures."""

    trace: str
    name: str
    scenario: Scenario
    theirs: Mapping[str, float] = field(default_factory=dict)  # ooms, energy (MJ), total (the change against exclusive)


@dataclass(frozen=True)
class Done:
    """A run and its figures, one for each seed."""

    run: Run
    figures: Sequence[Figures]

    def values(self, measure: str) -> list[float]:
        """Return a figure for every seed, in the units of the tables."""
        scale = {"time": 60.0, "energy": 1e6}.get(MEASURES[measure].unit, 1.0)
        return [(MEASURES[measure].of(each) or 0.0) / scale for each in self.figures]

    def mean(self, measure: str) -> float:
        return statistics.fmean(self.values(measure))

    def spread(self, measure: str, digits: int = 0) -> str:
        """Return the mean and the range over all seeds."""
        values = self.values(measure)
        return f"{statistics.fmean(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"


# What the chapter ran.


def _exclusive(trace: str, **theirs: float) -> Run:
    return Run(trace, EXCLUSIVE, rad_rm("exclusive", "oracle"), theirs)


def oracle_runs() -> list[Run]:
    """Figures 6.5 and 6.6: true memory is known."""
    best = {("OWF", "mps"): {"total": -0.3013}}
    return [_exclusive("90")] + [
        Run(
            "90",
            f"{name}, {'MPS' if sharing == 'mps' else 'streams'}",
            rad_rm(name.lower(), "oracle", sharing, smact=0.8, margin=2 * GIB),
            best.get((name, sharing), {}),
        )
        for sharing in ("mps", "time-slicing")
        for name in ("OFF", "OBF", "OWF", "OLUG")
    ]


def unknown_runs() -> list[Run]:
    """Table 6.3, figures 6.7 and 6.8: nothing is known of memory."""
    conditions: list[tuple[str, str, float | None, int, int]] = [
        ("RR", "round_robin", None, 0, 8),
        ("MAGM", "magm", None, 0, 5),
        ("MAGM (80%)", "magm", 0.80, 0, 4),
        ("MAGM (80%, 2 GB)", "magm", 0.80, 2, 2),
        ("MAGM (80%, 5 GB)", "magm", 0.80, 5, 2),
        ("LUG (80%, 5 GB)", "lug", 0.80, 5, 2),
        ("MAGM (75%, 5 GB)", "magm", 0.75, 5, 1),
        ("MAGM (85%, 5 GB)", "magm", 0.85, 5, 2),
    ]
    return [_exclusive("90")] + [
        Run(
            "90",
            name,
            rad_rm(policy, smact=smact, free=free * GIB),
            {"ooms": ooms} | ({"total": -0.28} if policy == "lug" else {}),
        )
        for name, policy, smact, free, ooms in conditions
    ]


def estimator_runs() -> list[Run]:
    """Table 6.4, figures 6.9 and 6.10: memory by estimators."""
    ooms: dict[tuple[str, float | None], float] = {("horus", None): 1, ("gpumemnet", None): 1}
    return [_exclusive("90")] + [
        Run(
            "90",
            f"MAGM + {title}{'' if smact is None else ' (80%)'}",
            rad_rm("magm", estimator, smact=smact),
            {"ooms": ooms.get((estimator, smact), 0)} | ({"total": -0.25} if (estimator, smact) == BEST else {}),
        )
        for smact in (None, 0.8)
        for estimator, title in TITLES.items()
    ]


TITLES = {"horus": "Horus", "faketensor": "FakeTensor", "gpumemnet": "GPUMemNet"}
BEST = ("gpumemnet", None)  # the chapter says "MAGM with GPUMemNet", about 25%


def heavy_runs() -> list[Run]:
    """Tables 6.5 and 6.6, figures 6.11 and 6.12: the heavier trace."""
    return [
        _exclusive("60", ooms=0, energy=33.197904654),
        Run("60", "RR, streams", rad_rm("round_robin", sharing="time-slicing"), {"ooms": 9, "energy": 34.745196574}),
        Run("60", "RR", rad_rm("round_robin"), {"ooms": 6, "energy": 29.601240054}),
        Run("60", "MAGM (80%, 2 GB)", rad_rm("magm", smact=0.8, free=2 * GIB), {"ooms": 4, "energy": 28.781487533}),
        Run("60", "LUG (80%, 2 GB)", rad_rm("lug", smact=0.8, free=2 * GIB), {"ooms": 4}),
        Run("60", "MAGM + Horus (80%)", rad_rm("magm", "horus", smact=0.8), {"ooms": 2, "energy": 29.041723267}),
        Run(
            "60",
            "MAGM + FakeTensor (80%)",
            rad_rm("magm", "faketensor", smact=0.8),
            {"ooms": 3, "energy": 30.306237499},
        ),
        Run(
            "60", "MAGM + GPUMemNet (80%)", rad_rm("magm", "gpumemnet", smact=0.8), {"ooms": 1, "energy": 28.502464491}
        ),
    ]


def explaining_runs() -> list[Run]:
    """What each habit of RAD-RM does, for two of its runs on the heavier trace."""
    steps: list[tuple[str, dict[str, object]]] = [
        ("as it is", {}),
        ("keeps books", {"bookkeeping": True}),
        ("looks every second", {"reading_s": 1.0}),
        ("places all that fit, every second", {"at_a_time": None, "pause_s": 1.0}),
        ("all three", {"bookkeeping": True, "reading_s": 1.0, "at_a_time": None, "pause_s": 1.0}),
    ]
    return [
        Run("60", f"{name}: {words}", base.but(**settings))
        for name, base in _two().items()
        for words, settings in steps
    ]


def world_runs() -> list[Run]:
    """What the parameters of the simulated world do, for the same two runs."""
    worlds: list[tuple[str, dict[str, object]]] = [
        ("as it is", {}),
        ("jobs start at once", {"startup_s": 0.0}),
        ("jobs start in 40 s", {"startup_s": 40.0}),
        ("1 GiB of a shared GPU is in pieces", {"fragmentation": GIB}),
        ("slowdowns as predicted", {"interference_error": 0.0}),
        ("no slowdowns", {"interference": False}),
    ]
    return [
        Run("60", f"{name}: {words}", base.but(**settings))
        for name, base in _two().items()
        for words, settings in worlds
    ]


def _two() -> dict[str, Scenario]:
    return {"RR": rad_rm("round_robin"), "MAGM + GPUMemNet (80%)": rad_rm("magm", "gpumemnet", smact=0.8)}


CHAPTER: dict[str, Callable[[], list[Run]]] = {
    "oracles": oracle_runs,
    "unknown": unknown_runs,
    "estimators": estimator_runs,
    "heavy": heavy_runs,
    "habits": explaining_runs,
    "world": world_runs,
}


def figures_of(wanted: Sequence[Case], workers: int, cache: Path | None) -> Iterator[Figures]:
    """Yield the figures of each case, in the order of the cases."""
    outcomes = {(each.case.source, each.case.scenario): each for each in run_cases(wanted, workers, cache)}
    for case in wanted:
        outcome = outcomes[case.source, case.scenario]
        if outcome.figures is None:
            raise SystemExit(f"{case.scenario.name} on {case.source.name}: {outcome.error}")
        yield outcome.figures


def source_of(folder: Path, trace: str) -> TraceSource:
    """Return a trace in a folder: the authors' script, or a table of the same name."""
    script = folder / f"{TRACES[trace]}.sh"
    return TraceSource(str(script if script.exists() else script.with_suffix(".csv")))


def simulated(
    folder: Path, seeds: int, workers: int = 1, cache: Path | None = None, parts: Iterable[str] = CHAPTER
) -> dict[str, list[Done]]:
    """Return the runs of parts of the chapter, by section."""
    sections: dict[str, list[Done]] = {}
    sources = {trace: source_of(folder, trace) for trace in TRACES}
    runs = {name: CHAPTER[name]() for name in parts}
    wanted = {
        (run.trace, run.scenario): cases([sources[run.trace]], [run.scenario], range(seeds))
        for section in runs.values()
        for run in section
    }
    figures = iter(figures_of(list(itertools.chain(*wanted.values())), workers, cache))
    known = {place: [next(figures) for _ in own] for place, own in wanted.items()}
    for name, section in runs.items():
        sections[name] = [Done(run, known[run.trace, run.scenario]) for run in section]
    return sections


# Tables.


def change(done: Done, base: Done, measure: str) -> float:
    """The mean relative change against another run."""
    return done.mean(measure) / base.mean(measure) - 1


def _percent(value: float | None) -> str:
    return "" if value is None else f"{100 * value:+.1f}%"


def section_table(section: Sequence[Done], energy: bool = False) -> str:
    """The runs of a section: times in minutes, ours and theirs."""
    base, counted = section[0], any("ooms" in done.run.theirs for done in section)
    head = ["run", "total, min", "against exclusive", "theirs", "waiting", "running", "completion", "OOMs"]
    head += (["theirs"] if counted else []) + (
        ["energy, MJ", "against exclusive", "theirs, MJ", "theirs"] if energy else []
    )
    rows = []
    for done in section:
        theirs = done.run.theirs
        row = [done.run.name, done.spread("total"), _against(done, base, "total"), _percent(theirs.get("total"))]
        row += [f"{done.mean(measure):.0f}" for measure in ("waiting", "running", "completion")]
        row += [_count(done)]
        row += [f"{theirs['ooms']:.0f}" if "ooms" in theirs else ""] if counted else []
        if energy:
            known = theirs.get("energy")
            saved = None if known is None or done is base else known / base.run.theirs["energy"] - 1
            row += [f"{done.mean('energy'):.1f}", _against(done, base, "energy"), f"{known:.1f}" if known else ""]
            row += [_percent(saved)]
        rows.append(row)
    return table(head, rows)


def _count(done: Done) -> str:
    """Crashes on average, and the fewest and the most."""
    values = done.values("ooms")
    return f"{done.mean('ooms'):.1f} ({min(values):.0f} to {max(values):.0f})" if max(values) else "0"


def _against(done: Done, base: Done, measure: str) -> str:
    return "" if done is base else _percent(change(done, base, measure))


def changes_table(section: Sequence[Done]) -> str:
    """Return a table of runs with one change each."""
    rows = [[done.run.name, _count(done), done.spread("total")] for done in section]
    return table(["run on the 60-task trace", "OOMs", "total, min"], rows)


@dataclass(frozen=True)
class Agreement:
    """How far the order of runs agrees: Kendall's tau over all pairs, and the pairs that differ by more than noise."""

    tau: float
    same: int
    decided: int
    otherwise: Sequence[str]


def agreement(section: Sequence[Done], measure: str) -> Agreement:
    """Ours against theirs. What counts as noise is what single runs differ by, from seed to seed: theirs are single
    runs. A pair is decided where their difference is more than twice the standard deviation of ours."""
    known = [done for done in section if measure in done.run.theirs]
    both = ties_ours = ties_theirs = same = decided = 0
    otherwise = []
    for one, other in itertools.combinations(known, 2):
        theirs = one.run.theirs[measure] - other.run.theirs[measure]
        differences = [a - b for a, b in zip(one.values(measure), other.values(measure), strict=True)]
        ours, noise = statistics.fmean(differences), statistics.stdev(differences) if len(differences) > 1 else 0.0
        both += _sign(theirs) * _sign(ours)
        ties_theirs += theirs == 0
        ties_ours += ours == 0
        if abs(theirs) > 2 * noise and theirs:
            decided += 1
            same += _sign(theirs) == _sign(ours)
            if _sign(theirs) != _sign(ours):
                otherwise.append(f"{one.run.name} and {other.run.name}")
    pairs = len(known) * (len(known) - 1) / 2
    weight = ((pairs - ties_ours) * (pairs - ties_theirs)) ** 0.5
    return Agreement(both / weight if weight else 0.0, same, decided, otherwise)


def _sign(value: float) -> int:
    return (value > 0) - (value < 0)


ORDERS = (
    ("OOMs without memory knowledge (Table 6.3)", "unknown", "ooms"),
    ("OOMs with estimators (Table 6.4)", "estimators", "ooms"),
    ("OOMs on the 60-task trace (Table 6.5)", "heavy", "ooms"),
    ("energy on the 60-task trace (Table 6.6)", "heavy", "energy"),
)


def order_table(sections: Mapping[str, Sequence[Done]]) -> str:
    """Return a table that compares the order of runs with the authors'."""
    rows = []
    for words, section, measure in ORDERS:
        seen = agreement(sections[section], measure)
        rows.append([words, f"{seen.tau:.2f}", f"{seen.same} of {seen.decided}", "; ".join(seen.otherwise) or "none"])
    return table(["what is ordered", "Kendall's tau", "pairs beyond noise in the same order", "the others"], rows)


def tables(sections: Mapping[str, Sequence[Done]]) -> dict[str, str]:
    """All tables by the names of their places on the page."""
    return {
        "oracles": section_table(sections["oracles"]),
        "unknown": section_table(sections["unknown"]),
        "estimators": section_table(sections["estimators"]),
        "heavy": section_table(sections["heavy"], energy=True),
        "habits": changes_table(sections["habits"]),
        "world": changes_table(sections["world"]),
        "order": order_table(sections),
    }


# Pictures.


def bars_picture(groups: Sequence[tuple[str, Sequence[Done]]], measure: str, title: str) -> str:
    """Ours (with the range over seeds) beside theirs, one bar each."""
    parts = [
        f'<text class="title" x="16" y="24">{title}</text>',
        '<rect class="mps" x="620" y="14" width="12" height="12"/><text x="638" y="24">ours, mean and range</text>',
        '<rect class="time-slicing" x="800" y="14" width="12" height="12"/><text x="818" y="24">theirs</text>',
    ]
    top, line, left, width = 44, 34, 230, 690
    high = 1.08 * max(max(*done.values(measure), done.run.theirs[measure]) for _, section in groups for done in section)
    for words, section in groups:
        parts.append(f'<text class="title" x="16" y="{top + 14}">{words}</text>')
        top += 24
        for done in section:
            values, theirs = done.values(measure), done.run.theirs[measure]
            low, mean, most = (left + width * value / high for value in (min(values), done.mean(measure), max(values)))
            length = width * theirs / high
            parts += [
                f'<text x="{left - 8}" y="{top + 16}" text-anchor="end">{done.run.name}</text>',
                f'<rect class="mps" x="{left}" y="{top + 2}" width="{mean - left:.1f}" height="11"/>',
                f'<path class="axis" d="M{low:.1f} {top + 7.5}H{most:.1f}"/>',
                f'<text x="{most + 5:.1f}" y="{top + 12}" font-size="10">{done.mean(measure):.1f}</text>',
                f'<rect class="time-slicing" x="{left}" y="{top + 15}" width="{length:.1f}" height="11"/>',
                f'<text x="{left + length + 5:.1f}" y="{top + 25}" font-size="10">{theirs:.3g}</text>',
            ]
            top += line
        top += 8
    return svg(968, top + 8, parts, title)


OVER_TIME = {"memory": ("memory in use, GiB", 40.0), "smact": ("SMACT, %", 100.0), "power": ("power, W", 400.0)}


def time_picture(folder: Path) -> str:
    """Figures 6.13 to 6.15: the means over the four GPUs, exclusive and MAGM with GPUMemNet."""
    trace = source_of(folder, "60").read(0)
    runs = {
        "time-slicing": ("exclusive", simulate(trace, rad_rm("exclusive", "oracle"))),
        "mps": ("MAGM + GPUMemNet on MPS", simulate(trace, rad_rm("magm", "gpumemnet", smact=0.8))),
    }
    hours = max(result.figures.total_s for _, result in runs.values()) / 3600
    parts = []
    for place, (style, (words, _)) in enumerate(runs.items()):
        x = 16 + 140 * place
        parts.append(f'<circle class="{style} dot" cx="{x}" cy="20" r="5"/><text x="{x + 10}" y="24">{words}</text>')
    for place, (name, (title, high)) in enumerate(OVER_TIME.items()):
        panel = Panel(46 + 314 * place, 66, 262, 160, (0, hours), (0, high))
        parts += panel.frame(title, "hours", ticks(hours), ticks(high))
        for style, (_, result) in runs.items():
            own = result.figures.total_s / 3600
            points = [panel.at(hour, min(value, high)) for hour, value in _mean_of(result.gpus, name, own)]
            drawn = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
            parts.append(f'<polyline class="{style} line" points="{drawn}"/>')
    return svg(968, 280, parts, "Memory, SM activity and power over time, exclusive and shared")


def _mean_of(gpus: Sequence[GpuSeries], name: str, hours: float, points: int = 130) -> Iterable[tuple[float, float]]:
    """Means over GPUs and over each of so many equal pieces of time."""
    step = 3600 * hours / points
    totals = [0.0] * points
    scale = {"memory": 1 / GIB, "smact": 100.0, "power": 1.0}[name]
    for series in gpus:
        values = getattr(series, {"power": "power_w"}.get(name, name))
        start = series.times[0]
        for (begin, end), value in zip(itertools.pairwise(series.times), values, strict=False):
            first, last = (begin - start) / step, (end - start) / step
            for piece in range(int(first), min(points, int(last) + 1)):
                totals[piece] += scale * value * max(0.0, min(last, piece + 1) - max(first, piece))
    return [((piece + 0.5) * hours / points, total / len(gpus)) for piece, total in enumerate(totals)]


def pictures(folder: Path, sections: Mapping[str, Sequence[Done]]) -> dict[str, str]:
    counted = [
        ("90 tasks, memory unknown", [done for done in sections["unknown"] if "ooms" in done.run.theirs]),
        ("90 tasks, estimators", [done for done in sections["estimators"] if "ooms" in done.run.theirs]),
        ("60 tasks", [done for done in sections["heavy"] if done.run.name != EXCLUSIVE]),
    ]
    energy = [("60 tasks", [done for done in sections["heavy"] if "energy" in done.run.theirs])]
    return {
        "reproduction_ooms.svg": bars_picture(counted, "ooms", "Out-of-memory crashes"),
        "reproduction_energy.svg": bars_picture(energy, "energy", "Energy of the four GPUs, MJ"),
        "reproduction_time.svg": time_picture(folder),
    }


def written(page: Path, content: Mapping[str, str]) -> None:
    text = page.read_text()
    for name, inside in content.items():
        text = collocation.written(text, f"reproduction: {name}", inside, page)
    page.write_text(text)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="The dissertation's chapter 6 again, ours beside theirs.")
    parser.add_argument(
        "traces", type=Path, nargs="?", default=FILES, help="folder of the traces (default: the shipped)"
    )
    parser.add_argument("--seeds", type=int, default=20, help="how often each run is drawn (default: 20)")
    parser.add_argument("--workers", type=int, default=1, help="processes (default: 1)")
    parser.add_argument("--resume", type=Path, help="file of finished simulations to reuse")
    parser.add_argument("--write", action="store_true", help="write the page and its pictures")
    options = parser.parse_args(arguments)
    sections = simulated(options.traces, options.seeds, options.workers, options.resume)
    made = tables(sections)
    for name, text in made.items():
        print(f"{name}\n\n{text}\n")
    if options.write:
        written(PAGE, made)
        for file, picture in pictures(options.traces, sections).items():
            (IMAGES / file).write_text(picture)


if __name__ == "__main__":
    main()
