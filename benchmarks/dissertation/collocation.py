"""What happens when training jobs share a GPU: the tables and pictures of lab/docs/collocation.md.

    python benchmarks/dissertation/collocation.py

All figures come from benchmarks/data/together_h200.jsonl.gz, which `ullage lab measure together` wrote. The page has a
pair of comments around each table, `<!-- collocation: NAME -->` and `<!-- end -->`; what lies between is written again,
and the pictures in docs/images too.
"""

from __future__ import annotations

import math
import re
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from ullage_lab.train.sharing import read_rows

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT / "benchmarks/data/together_h200.jsonl.gz"
PAGE = ROOT / "lab/docs/collocation.md"
IMAGES = ROOT / "docs/images"
GIB = 1 << 30
HOWS = {"time-slicing": "time-sliced", "mps": "MPS"}
COPIES = (1, 2, 3, 5, 7)
JOBS = {
    "uniform-small-b": ("small", "ResNet-18, 32 images of 64x64"),
    "uniform-medium-b": ("medium", "ResNet-50, 32 images of 112x112"),
    "uniform-full": ("large", "VGG-16, 32 images of 224x224"),
}
KEEPS = 0.8  # of its speed alone
BUSY = 0.7  # of the time
Row = Mapping[str, Any]
Ticks = dict[float, str]  # places on an axis, and what stands there


class Alone:
    """A job by itself under one way of sharing: the medians of all its readings."""

    def __init__(self) -> None:
        self.rows: list[Row] = []

    def __getitem__(self, name: str) -> Any:
        values = [value[0] if isinstance(value, list) else value for row in self.rows if (value := row.get(name))]
        return statistics.median(values) if values else None


@dataclass(frozen=True)
class Shared:
    """Jobs on the GPU at the same time; one alone is a set of one."""

    row: Row
    alone: tuple[Alone, ...]

    @property
    def how(self) -> str:
        return str(self.row["how"])

    @property
    def slowdowns(self) -> list[float]:
        """How many times as long each job's step takes as alone."""
        return [step / one["step_s"] for step, one in zip(self.row["step_s"], self.alone, strict=True)]

    @property
    def throughput(self) -> float:
        """The work that is done in the time in which one job after the other would do 1."""
        return sum(1 / value for value in self.slowdowns)

    @property
    def smact_alone(self) -> float:
        return sum(one["smact"] for one in self.alone)

    @property
    def figures(self) -> dict[str, float | None]:
        rate = sum(1 / step for step in self.row["step_s"])
        memory = [one["process_memory"] for one in self.alone]
        return {
            "step": 1e3 * statistics.fmean(self.row["step_s"]),
            "rate": rate,
            "smact": 100 * self.row["smact"],
            "memory": None if None in memory else sum(memory) / GIB,
            "power": self.row["power_w"],
            "energy": self.row["power_w"] / rate,
        }


def lines() -> list[Row]:
    return [row for row in read_rows([DATA]) if "header" not in row and "failed" not in row]


def read(rows: Sequence[Row]) -> tuple[dict[tuple[str, str], Alone], list[Shared]]:
    """Jobs alone, by way of sharing and id, and all sets."""
    alone: dict[tuple[str, str], Alone] = defaultdict(Alone)
    for row in rows:
        if len(row["jobs"]) == 1:
            alone[row["how"], row["jobs"][0]].rows.append(row)
    sets = [
        Shared(row, tuple(alone[row["how"], name] for name in row["jobs"]))
        for row in rows
        if "set" in row and all(row["step_s"]) and all(alone[row["how"], name].rows for name in row["jobs"])
    ]
    return dict(alone), sets


# Tables


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def uniform(sets: Sequence[Shared], job: str, how: str) -> dict[int, dict[str, float | None]]:
    """The figures of copies of one job, by how many there are."""
    curve = {}
    for one in sets:
        if one.how == how and set(one.row["jobs"]) == {job} and not str(one.row["set"]).startswith("again"):
            curve[len(one.row["jobs"])] = one.figures
    return dict(sorted(curve.items()))


def uniform_table(sets: Sequence[Shared]) -> str:
    """Copies of one job, time-sliced beside MPS."""
    columns = {"step": 1, "rate": 0, "smact": 0, "memory": 1, "power": 0, "energy": 2}
    head = ["job", "copies", "step, ms", "steps a second", "SMACT, %", "memory, GiB", "power, W", "energy of a step, J"]
    rows = []
    for job, (size, words) in JOBS.items():
        both = [uniform(sets, job, how) for how in HOWS]
        for copies in COPIES:
            if not all(copies in curve for curve in both):
                continue
            cells = [
                " / ".join(_number(curve[copies][name], digits) for curve in both) for name, digits in columns.items()
            ]
            rows.append([f"{size}: {words}" if copies == 1 else "", str(copies), *cells])
    return table(head, rows) + "\n\nIn each cell: time-sliced / MPS."


def mixed(sets: Sequence[Shared]) -> list[Shared]:
    return [one for one in sets if len(set(one.row["jobs"])) > 1]


_SUMMARY = ["sets", "work done in the time of 1", "a job's step takes", "jobs that keep 80% of their speed"]


def by_size_table(sets: Sequence[Shared]) -> str:
    rows = []
    for size in sorted({len(one.row["jobs"]) for one in mixed(sets)}):
        for how, words in HOWS.items():
            group = [one for one in mixed(sets) if one.how == how and len(one.row["jobs"]) == size]
            if group:
                rows.append([f"{size}, {words}", *_summary(group)])
    return table(["jobs", *_SUMMARY], rows)


SMACT_BINS = ((0, 0.4), (0.4, 0.8), (0.8, 1.2), (1.2, 99.0))


def by_smact_table(sets: Sequence[Shared]) -> str:
    """Sets by the sum of what their jobs have of SMACT alone."""
    several = [one for one in sets if len(one.row["jobs"]) > 1]
    rows = []
    for low, high in SMACT_BINS:
        for how, words in HOWS.items():
            group = [one for one in several if one.how == how and low <= one.smact_alone < high]
            name = f"{low:.0%} to {high:.0%}" if high < 9 else f"above {low:.0%}"
            if group:
                rows.append([f"{name}, {words}", *_summary(group)])
    return table(["sum of SMACT alone", *_SUMMARY], rows)


def worst_line(sets: Sequence[Shared]) -> str:
    """The job that suffers most in each way of sharing."""
    parts = []
    for how, words in HOWS.items():
        slowdowns = [(value, one, place) for one in sets if one.how == how for place, value in enumerate(one.slowdowns)]
        value, one, place = max(slowdowns, key=lambda item: item[0])
        job = one.alone[place].rows[0]["job"]
        name = f"{str(job['model']).split(':')[-1]}, {job['opt']}"
        parts.append(f"{words}, {value:.0f} times as long ({name}, with {len(one.alone) - 1} others)")
    return f"The longest step on a shared GPU: {'; '.join(parts)}."


def _summary(sets: Sequence[Shared]) -> list[str]:
    throughputs = [one.throughput for one in sets]
    slowdowns = [value for one in sets for value in one.slowdowns]
    keep = statistics.fmean(1 / value >= KEEPS for value in slowdowns)
    return [str(len(sets)), _spread(throughputs), _spread(slowdowns, "times "), f"{keep:.0%}"]


def _spread(values: Sequence[float], before: str = "") -> str:
    low, middle, high = (_quantile(values, share) for share in (0.1, 0.5, 0.9))
    return f"{before}{middle:.2f} ({low:.2f} to {high:.2f})"


def _quantile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def in_both_ways(sets: Sequence[Shared]) -> list[tuple[Shared, Shared]]:
    """Sets of two and more that were measured time-sliced and under MPS, in this order."""
    known = {(one.how, one.row["set"], tuple(one.row["jobs"])): one for one in sets if len(one.row["jobs"]) > 1}
    return [
        (one, known["mps", *key[1:]])
        for key, one in known.items()
        if key[0] == "time-slicing" and ("mps", *key[1:]) in known
    ]


def ways_table(sets: Sequence[Shared]) -> str:
    """MPS against time slicing, the same sets."""
    head = [
        "jobs",
        "sets",
        "MPS does more work",
        "work under MPS / time-sliced",
        "energy of the same work, MPS / time-sliced",
    ]
    rows = []
    pairs = in_both_ways(sets)
    for size in (*sorted({len(one.row["jobs"]) for one, _ in pairs}), None):
        group = [pair for pair in pairs if size is None or len(pair[0].row["jobs"]) == size]
        work = [mps.throughput / sliced.throughput for sliced, mps in group]
        energy = [
            (mps.row["power_w"] / mps.throughput) / (sliced.row["power_w"] / sliced.throughput) for sliced, mps in group
        ]
        better = statistics.fmean(ratio > 1 for ratio in work)
        rows.append([str(size or "all"), str(len(group)), f"{better:.0%}", _spread(work), _spread(energy)])
    return table(head, rows)


def memory_table(rows: Sequence[Row]) -> str:
    """What all processes of a round take, added up, against what the GPU says is taken."""
    head = ["", "processes", "sum of the processes, GiB", "taken of the GPU, GiB", "difference"]
    lines = []
    for how, words in HOWS.items():
        for number, (jobs, whole) in enumerate(_rounds(rows, how), start=1):
            count = sum(job["copies"] for job in jobs)
            total = sum(job["copies"] * job["process_memory"] for job in jobs)
            sizes = f"{total / GIB:.1f}", f"{whole / GIB:.1f}", f"{whole / total - 1:+.1%}"
            lines.append([f"{words}, round {number}", str(count), *sizes])
    return table(head, lines)


def _rounds(rows: Sequence[Row], how: str) -> list[tuple[list[Row], int]]:
    """The jobs that stayed at the same time, and the most that was taken of the GPU. They are read alone first."""
    rounds: list[tuple[list[Row], list[int]]] = []
    before = ""
    for row in rows:
        if row["how"] != how or "gpu_memory" not in row:
            continue
        if "alone" in row:
            if before != "alone":
                rounds.append(([], []))
            rounds[-1][0].append(row)
        rounds[-1][1].append(row["gpu_memory"])
        before = "alone" if "alone" in row else "set"
    return [(jobs, max(taken)) for jobs, taken in rounds]


def same_memory_line(alone: dict[tuple[str, str], Alone]) -> str:
    """Whether a job takes as much under MPS as without."""
    both = [
        (alone["time-slicing", name]["process_memory"], alone["mps", name]["process_memory"])
        for how, name in alone
        if how == "time-slicing" and ("mps", name) in alone
    ]
    known = [(sliced, mps) for sliced, mps in both if sliced and mps]
    if not known:
        return "What a process takes was not told."
    saved = [(sliced - mps) / (1 << 20) for sliced, mps in known]
    return (
        f"A process takes {statistics.median(saved):.0f} MiB less under MPS (median of {len(known)} jobs; "
        f"{_quantile(saved, 0.1):.0f} to {_quantile(saved, 0.9):.0f})."
    )


def noise_table(alone: dict[tuple[str, str], Alone]) -> str:
    """How far readings of one job alone differ, in the same process, minutes apart."""
    pairs = [(one.rows[0], again) for one in alone.values() for again in one.rows[1:]]
    busy = [pair for pair in pairs if pair[0]["gract"] > BUSY]
    rest = [pair for pair in pairs if pair[0]["gract"] <= BUSY]
    cases = [
        (f"time of a step, GPU busy for more than {BUSY:.0%} of it", busy, ""),
        ("time of a step, other jobs", rest, ""),
        *((f"{name.upper()} times step, all jobs", pairs, name) for name in ("gract", "smact", "drama")),
    ]
    lines = []
    for words, readings, name in cases:
        apart = [abs(_work(again, name) / _work(first, name) - 1) for first, again in readings]
        lines.append([words, str(len(apart)), f"{statistics.median(apart):.1%}", f"{_quantile(apart, 0.9):.1%}"])
    return table(["figure", "readings", "median difference", "90th percentile"], lines)


def _work(row: Row, name: str) -> float:
    return float(row["step_s"][0] * (row[name] if name else 1))


def _number(value: float | None, digits: int) -> str:
    return "?" if value is None else f"{value:.{digits}f}"


# Pictures: SVG with a background of its own, so that they can be read on a light page and on a dark one.

STYLE = """
.back { fill: #ffffff; } text { fill: #1f2933; font: 12px system-ui, sans-serif; } .title { font-weight: 600; }
.axis { stroke: #7b8794; fill: none; } .grid { stroke: #e4e7eb; fill: none; }
.time-slicing { stroke: #c2570c; fill: #c2570c; } .mps { stroke: #1f6feb; fill: #1f6feb; }
.line { fill: none; stroke-width: 2; }
.dot { stroke-width: 0; fill-opacity: 0.75; } .limit { stroke: #7b8794; stroke-dasharray: 4 3; fill: none; }
@media (prefers-color-scheme: dark) {
  .back { fill: #1e2129; } text { fill: #e2e4e9; } .axis, .limit { stroke: #9aa5b1; } .grid { stroke: #353a45; }
  .time-slicing { stroke: #f0883e; fill: #f0883e; } .mps { stroke: #6cb6ff; fill: #6cb6ff; }
}
"""


def svg(width: int, height: int, parts: Iterable[str], label: str) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'role="img" aria-label="{escape(label)}"><style>{STYLE}</style>'
        f'<rect class="back" width="{width}" height="{height}" rx="6"/>{"".join(parts)}</svg>\n'
    )


@dataclass(frozen=True)
class Panel:
    """A plot inside a picture: where it is, and what its axes go to."""

    left: float
    top: float
    width: float
    height: float
    x: tuple[float, float]
    y: tuple[float, float]

    def at(self, x: float, y: float) -> tuple[float, float]:
        across = (x - self.x[0]) / (self.x[1] - self.x[0])
        up = (y - self.y[0]) / (self.y[1] - self.y[0])
        return self.left + across * self.width, self.top + (1 - up) * self.height

    def frame(self, title: str, x_title: str, x_ticks: Ticks, y_ticks: Ticks) -> list[str]:
        bottom = self.top + self.height
        parts = [f'<text class="title" x="{self.left:.1f}" y="{self.top - 10:.1f}">{escape(title)}</text>']
        for tick, words in y_ticks.items():
            y = self.at(self.x[0], tick)[1]
            parts.append(f'<path class="grid" d="M{self.left:.1f} {y:.1f}h{self.width:.1f}"/>')
            parts.append(f'<text x="{self.left - 5:.1f}" y="{y + 4:.1f}" text-anchor="end">{words}</text>')
        for tick, words in x_ticks.items():
            x = self.at(tick, self.y[0])[0]
            parts.append(f'<text x="{x:.1f}" y="{bottom + 16:.1f}" text-anchor="middle">{words}</text>')
        middle = self.left + self.width / 2
        parts.append(f'<text x="{middle:.1f}" y="{bottom + 33:.1f}" text-anchor="middle">{escape(x_title)}</text>')
        parts.append(f'<path class="axis" d="M{self.left:.1f} {self.top:.1f}V{bottom:.1f}h{self.width:.1f}"/>')
        return parts


def ticks(high: float) -> Ticks:
    """Four or so round numbers from 0 on: 0, 20, 40 and 60 up to 70."""
    rough = high / 4
    power = 10.0 ** math.floor(math.log10(rough))
    step = power * min((1, 2, 5, 10), key=lambda times: abs(times * power - rough))
    return {place * step: f"{place * step:g}" for place in range(int(high / step + 1e-9) + 1)}


def times_ticks(high: float) -> Ticks:
    """Factors on an axis of their logarithms, up to one."""
    return {math.log10(times): f"{times:g}" for times in (0.5, 1, 2, 5, 10, 20, 50, 100) if times <= high}


def legend(x: float, y: float) -> list[str]:
    parts = []
    for place, (how, words) in enumerate(HOWS.items()):
        at = x + 110 * place
        parts.append(
            f'<circle class="{how} dot" cx="{at}" cy="{y - 4}" r="5"/><text x="{at + 10}" y="{y}">{words}</text>'
        )
    return parts


PANELS = {
    "step": "time of a step, ms",
    "rate": "steps a second",
    "smact": "SMACT, %",
    "memory": "memory, GiB",
    "energy": "energy of a step, J",
}


def uniform_picture(sets: Sequence[Shared], job: str) -> str:
    """One job: five figures over the number of copies."""
    size, words = JOBS[job]
    both = {how: uniform(sets, job, how) for how in HOWS}
    parts = [f'<text class="title" x="16" y="24">{size}: {escape(words)}</text>', *legend(560, 24)]
    for place, (name, title) in enumerate(PANELS.items()):
        known = {
            how: [(n, one[name]) for n, one in curve.items() if one[name] is not None] for how, curve in both.items()
        }
        values = [value for points in known.values() for _, value in points if value is not None]
        if not values:
            continue
        high = 100 if name == "smact" else 1.1 * max(values)
        panel = Panel(46 + 188 * place, 66, 132, 130, (0.5, 7.5), (0, high))
        parts += panel.frame(title, "copies", {float(n): str(n) for n in COPIES}, ticks(high))
        for how, points in known.items():
            places = [panel.at(n, value or 0) for n, value in points]
            line = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
            parts.append(f'<polyline class="{how} line" points="{line}"/>')
            parts += [f'<circle class="{how}" cx="{x:.1f}" cy="{y:.1f}" r="3"/>' for x, y in places]
    return svg(
        968, 244, parts, f"Copies of a {size} job, {words}: time of a step, throughput, SMACT, memory and energy"
    )


def smact_picture(sets: Sequence[Shared]) -> str:
    """Every set: work done, and the slowest job, over the sum of SMACT alone."""
    several = [one for one in sets if len(one.row["jobs"]) > 1]
    most = 100 * max(one.smact_alone for one in several)
    parts = legend(16, 24)
    worst = max(max(one.slowdowns) for one in several)
    best = 1.05 * max(one.throughput for one in several)
    low, high = math.log10(0.5), math.log10(1.2 * worst)
    figures = (
        ("work done in the time of 1", lambda one: one.throughput, 1.0, (0.0, best), ticks(best)),
        (
            "slowest job: its step takes so many times as long",
            lambda one: math.log10(max(one.slowdowns)),
            0.0,
            (low, high),
            times_ticks(1.2 * worst),
        ),
    )
    for place, (title, figure, level, ends, y_ticks) in enumerate(figures):
        panel = Panel(46 + 470 * place, 66, 400, 240, (0, 1.03 * most), ends)
        parts += panel.frame(title, "sum of the jobs' SMACT alone, %", ticks(most), y_ticks)
        x, y = panel.at(80, level)
        lines = f"M{x:.1f} {panel.top}v{panel.height}M{panel.left} {y:.1f}h{panel.width}"
        parts.append(f'<path class="limit" d="{lines}"/><text x="{x + 4:.1f}" y="{panel.top + 12}">80%</text>')
        for one in sorted(several, key=lambda one: one.how):
            x, y = panel.at(100 * one.smact_alone, figure(one))
            parts.append(f'<circle class="{one.how} dot" cx="{x:.1f}" cy="{y:.1f}" r="3.2"/>')
    return svg(968, 356, parts, "Work done and the slowest job of every set, over the sum of the jobs' SMACT alone")


def written(text: str, name: str, content: str, page: Path = PAGE) -> str:
    """The text of a page with what lies between a pair of comments written anew."""
    pattern = re.compile(rf"(<!-- {name} -->\n).*?(<!-- end -->)", re.DOTALL)
    if not pattern.search(text):
        raise SystemExit(f"needed <!-- {name} --> and <!-- end --> in {page}")
    return pattern.sub(lambda match: f"{match[1]}\n{content}\n\n{match[2]}", text)


def show(tables: Mapping[str, str], page: Path, write: bool) -> None:
    """Print tables, and put them into their page if `write` is set."""
    for name, text in tables.items():
        print(text, end="\n\n")
        if write:
            page.write_text(written(page.read_text(), f"collocation: {name}", text, page))


def counts_line(alone: dict[tuple[str, str], Alone], sets: Sequence[Shared]) -> str:
    several = [one for one in sets if len(one.row["jobs"]) > 1]
    by_how = ", ".join(f"{sum(one.how == how for one in several)} {words}" for how, words in HOWS.items())
    counts = sorted(Counter(len(one.row["jobs"]) for one in several).items())
    sizes = ", ".join(f"{count} of {n}" for n, count in counts)
    readings = sum(len(one.rows) for one in alone.values())
    jobs = len({name for _, name in alone})
    return f"{len(several)} sets of {jobs} jobs ({by_how}; {sizes} jobs), and {readings} readings of single jobs."


def filled(page: str, rows: Sequence[Row]) -> str:
    alone, sets = read(rows)
    tables = {
        "counts": counts_line(alone, sets),
        "uniform": uniform_table(sets),
        "sizes": by_size_table(sets),
        "smact": by_smact_table(sets) + "\n\n" + worst_line(sets),
        "memory": memory_table(rows) + "\n\n" + same_memory_line(alone),
        "ways": ways_table(sets),
        "noise": noise_table(alone),
    }
    for name, content in tables.items():
        page = written(page, f"collocation: {name}", content)
    return page


def pictures(rows: Sequence[Row]) -> dict[str, str]:
    sets = read(rows)[1]
    drawn = {f"collocation_{size}.svg": uniform_picture(sets, job) for job, (size, _) in JOBS.items()}
    return drawn | {"collocation_sets.svg": smact_picture(sets)}


def main() -> None:
    rows = lines()
    PAGE.write_text(filled(PAGE.read_text(), rows))
    for name, picture in pictures(rows).items():
        (IMAGES / name).write_text(picture)


if __name__ == "__main__":
    main()
