"""Runs scenarios on the same traces and seeds on several cores, and summarizes them with confidence intervals.

wanted = cases(sources, scenarios, seeds=range(10))
rows = summarize(wanted, run_cases(wanted, workers=8))
"""

import functools
import hashlib
import json
import multiprocessing
import signal
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from multiprocessing import connection
from pathlib import Path
from typing import Any

from ullage.errors import InvalidValue, UllageError
from ullage.jobs.model import rows_so_far
from ullage.manager.simulation import engine
from ullage.manager.simulation.generator import generate_trace
from ullage.manager.simulation.measures import MEASURES, Target
from ullage.manager.simulation.reading import read_trace
from ullage.manager.simulation.result import Figures
from ullage.manager.simulation.scenario import Scenario
from ullage.manager.simulation.statistics import Interval, changes
from ullage.manager.simulation.trace import JobTrace


@dataclass(frozen=True)
class TraceSource:
    """The source of a trace: a file, or the arguments `drawn` of `generate_trace`, which runs again for each seed."""

    path: str | None = None
    format: str | None = None
    limit: int | None = None
    mix: str = "mixed"
    drawn: tuple[tuple[str, Any], ...] = ()

    def read(self, seed: int) -> JobTrace:
        if self.path is None:
            return generate_trace(seed=seed, mix=self.mix, **dict(self.drawn))
        return read_trace(self.path, format=self.format, limit=self.limit, mix=self.mix, seed=seed)

    @property
    def name(self) -> str:
        """Return the name of the source in tables.

        >>> TraceSource("traces/philly.csv").name, TraceSource(drawn=(("jobs", 500), ("load", 0.8))).name
        ('philly.csv', '500 drawn jobs')
        """
        return f"{dict(self.drawn)['jobs']} drawn jobs" if self.path is None else Path(self.path).name

    @functools.cached_property
    def identity(self) -> str:
        """Return a key of the trace's content, independent of its file's name."""
        digest = hashlib.sha256()
        try:
            for file in [] if self.path is None else sorted(_files(Path(self.path))):
                digest.update(file.read_bytes())
        except OSError as error:
            raise InvalidValue(f"cannot read {self.path}: {error.strerror}") from None
        return json.dumps([digest.hexdigest(), self.format, self.limit, self.mix, self.drawn])


def _files(path: Path) -> list[Path]:
    return [file for file in path.iterdir() if file.is_file()] if path.is_dir() else [path]


@dataclass(frozen=True)
class Case:
    """A simulation to run. The scenario's seed is also the seed of the trace."""

    source: TraceSource
    scenario: Scenario

    @property
    def key(self) -> str:
        """Return a key of the case, independent of its name."""
        content = json.dumps([self.source.identity, replace(self.scenario, label=None).to_dict()], sort_keys=True)
        return hashlib.sha256(content.encode()).hexdigest()[:24]


@dataclass(frozen=True)
class CaseOutcome:
    """The outcome of a case: its figures, or an error."""

    case: Case
    figures: Figures | None = None
    error: str | None = None


def cases(sources: Sequence[TraceSource], scenarios: Sequence[Scenario], seeds: Iterable[int]) -> list[Case]:
    """Return every scenario on every trace with every seed, grouped by trace."""
    pairs = [(source, seed) for source in sources for seed in seeds]
    return [Case(source, replace(scenario, seed=seed)) for source, seed in pairs for scenario in scenarios]


def run_cases(wanted: Sequence[Case], workers: int = 1, cache: Path | None = None) -> Iterator[CaseOutcome]:
    """Run cases in processes and yield each as it is done, with its error if it fails. Cases in the file `cache` do not
    run again; new ones are added to it."""
    known = {} if cache is None else _cached_figures(cache)
    left = []
    for case in wanted:
        if cache is not None and case.key in known:
            yield CaseOutcome(case, known[case.key])
        else:
            left.append(case)
    for outcome in map(run_case, left) if min(workers, len(left)) <= 1 else _in_processes(left, workers):
        if cache is not None and outcome.figures is not None:
            _keep(cache, outcome)
        yield outcome


def run_case(case: Case) -> CaseOutcome:
    """Simulate a case in this process."""
    try:
        trace = _read(case.source, case.scenario.seed)
        return CaseOutcome(case, engine.simulate(trace, case.scenario).figures)
    except UllageError as error:
        return CaseOutcome(case, error=str(error))


@functools.lru_cache(maxsize=1)
def _read(source: TraceSource, seed: int) -> JobTrace:
    return source.read(seed)


def _in_processes(left: Sequence[Case], workers: int) -> Iterator[CaseOutcome]:
    context = multiprocessing.get_context("spawn")
    waiting = deque(left)
    busy: dict[Any, tuple[Any, Case]] = {}  # process and case by our end of its pipe

    def give(pipe: Any, process: Any) -> None:
        case = waiting.popleft()
        busy[pipe] = (process, case)
        pipe.send(case)

    try:
        while waiting or busy:
            while waiting and len(busy) < workers:
                pipe, other = context.Pipe()
                process = context.Process(target=_work, args=(other,), daemon=True)
                process.start()
                other.close()
                give(pipe, process)
            ready: list[Any] = connection.wait(list(busy))
            for pipe in ready:
                process, case = busy.pop(pipe)
                try:
                    yield pipe.recv()
                except (EOFError, OSError):
                    process.join()
                    yield CaseOutcome(case, error=f"its process ended with exit code {process.exitcode}")
                    continue
                if waiting:
                    give(pipe, process)
                else:
                    process.terminate()
    finally:
        for process, _ in busy.values():
            process.terminate()


def _work(pipe: Any) -> None:
    """Run cases until the parent ends this process; Ctrl-C is for the parent only."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    while True:
        try:
            pipe.send(run_case(pipe.recv()))
        except EOFError:
            return


def _cached_figures(file: Path) -> dict[str, Figures]:
    try:
        return {row["key"]: Figures.from_dict(row["figures"]) for row in rows_so_far(file)}
    except (KeyError, TypeError):
        raise InvalidValue(f"{file} must hold figures of 'ullage simulate'; it was not changed") from None


def _keep(file: Path, outcome: CaseOutcome) -> None:
    assert outcome.figures is not None
    case = outcome.case
    row = {"key": case.key, "trace": case.source.name, "scenario": case.scenario.to_dict()}
    try:
        with file.open("a", encoding="utf-8") as lines:
            lines.write(json.dumps(row | {"figures": outcome.figures.to_dict()}) + "\n")
    except OSError as error:
        raise InvalidValue(f"cannot write to {file}: {error.strerror}") from None


# Summaries.


@dataclass(frozen=True)
class SweepRow:
    """A scenario on a trace over all seeds: intervals of known figures, and of changes against the first scenario."""

    source: TraceSource
    scenario: Scenario
    figures: Mapping[str, Interval]
    changes: Mapping[str, Interval]
    errors: Sequence[str]

    @property
    def trace(self) -> str:
        return self.source.name

    @property
    def name_but_gpus(self) -> str:
        gpus, unnamed = self.scenario.gpus, replace(self.scenario, label=None).name
        return unnamed if self.scenario.name == gpus else self.scenario.name.removesuffix(f", {gpus}")

    def mean(self, name: str) -> float | None:
        """Return the mean of a figure; None if unknown."""
        return self.figures[name].mean if name in self.figures else None

    def to_dict(self) -> dict[str, Any]:
        """The row as a dictionary of plain values."""
        scenario = self.scenario.to_dict()
        del scenario["seed"]
        return {
            "trace": self.trace,
            "scenario": scenario,
            "figures": {name: interval.to_dict() for name, interval in self.figures.items()},
            "changes": {name: interval.to_dict() for name, interval in self.changes.items()},
            "errors": list(self.errors),
        }


def summarize(wanted: Sequence[Case], outcomes: Iterable[CaseOutcome]) -> list[SweepRow]:
    """Return a row for each scenario on each trace, in the order of the cases."""
    by_case = {outcome.case: outcome for outcome in outcomes}
    groups: dict[TraceSource, dict[Scenario, list[CaseOutcome]]] = {}
    for case in wanted:
        if case in by_case:
            same = groups.setdefault(case.source, {}).setdefault(replace(case.scenario, seed=0), [])
            same.append(by_case[case])
    return [_row(group, next(iter(each.values()))) for each in groups.values() for group in each.values()]


def _row(group: Sequence[CaseOutcome], base: Sequence[CaseOutcome]) -> SweepRow:
    figures, changed = {}, {}
    first = {outcome.case.scenario.seed: outcome.figures for outcome in base if outcome.figures is not None}
    for name, measure in MEASURES.items():
        values = {outcome.case.scenario.seed: measure.of(outcome.figures) for outcome in group if outcome.figures}
        known = {seed: value for seed, value in values.items() if value is not None}
        if known:
            figures[name] = Interval.of(list(known.values()))
        pairs = [(value, measure.of(first[seed])) for seed, value in known.items() if seed in first]
        whole = [(value, before) for value, before in pairs if before is not None]
        change = changes([value for value, _ in whole], [before for _, before in whole]) if group is not base else None
        if change is not None:
            changed[name] = change
    case = group[0].case
    return SweepRow(case.source, case.scenario, figures, changed, [each.error for each in group if each.error])


@dataclass(frozen=True)
class TargetAnswer:
    """For scenarios that differ only in GPUs: the first that meets a target, if any, and the one before it."""

    trace: str
    name: str
    enough: SweepRow | None
    short: SweepRow | None


def answers(rows: Sequence[SweepRow], target: Target) -> list[TargetAnswer]:
    """Return how many GPUs each scenario needs on each trace to meet the target, with every job placed."""
    groups: dict[tuple[TraceSource, Scenario], list[SweepRow]] = {}
    for row in rows:
        alike = replace(row.scenario, gpus="", label=None, seed=0)
        groups.setdefault((row.source, alike), []).append(row)
    results = []
    for (source, _), group in groups.items():
        met = [not row.mean("unplaced") and target.met(row.mean(target.measure.name)) for row in group]
        place = met.index(True) if True in met else len(group)
        short, enough = group[place - 1] if place else None, group[place] if place < len(group) else None
        results.append(TargetAnswer(source.name, group[0].name_but_gpus, enough, short))
    return results
