"""`ullage simulate`: traces of jobs on simulated GPUs, once or with many seeds."""

import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ullage.cli import completion
from ullage.cli.exit_codes import FAILED
from ullage.cli.options import MOMENT_FORMS, Json, Seed, argument, option
from ullage.cli.progress import Following, following
from ullage.cli.scenarios import (
    JOBS,
    choices_of,
    labelled,
    scenarios_of,
    settings_of,
    sources_of,
    with_scenario_options,
)
from ullage.cli.tables import fitted
from ullage.errors import InvalidValue
from ullage.manager.client import Client
from ullage.manager.report_words import moment
from ullage.text import plain
from ullage.units import format_moment

if TYPE_CHECKING:
    from ullage.manager.simulation.measures import Target
    from ullage.manager.simulation.result import SimulationResult
    from ullage.manager.simulation.scenario import Scenario
    from ullage.manager.simulation.sweeps import CaseOutcome, SweepRow, TargetAnswer, TraceSource
    from ullage.manager.simulation.trace import JobTrace


_TARGET = "Find the number of GPUs needed to reach a figure, such as 'waiting<=10m'."


@with_scenario_options
def simulate(
    traces: Annotated[list[Path] | None, argument("Traces of jobs, in any known format.", "TRACE")] = None,
    label: Annotated[list[str] | None, option("Name of a run; repeat for each run, in order.", "TEXT")] = None,
    seed: Seed = 0,
    save: Annotated[Path | None, option("Write complete runs to this .json or .json.gz file.", "FILE.json")] = None,
    compare_with: Annotated[list[Path] | None, option("Show the runs of this --save file first.", "FILE.json")] = None,
    report: Annotated[Path | None, option("Write figures and plots to one HTML page.", "FILE.html")] = None,
    seeds: Annotated[int | None, option("Number of seeds; figures are then means.", "N", min=1, default="1")] = None,
    target: Annotated[str | None, option(_TARGET, "TARGET", complete=completion.targets)] = None,
    workers: Annotated[int | None, option("Number of concurrent simulations.", "N", min=1, default="all cores")] = None,
    resume: Annotated[Path | None, option("Save figures here; skip runs already in it.", "FILE.jsonl")] = None,
    from_history: Annotated[bool, option("Simulate what the daemon ran.", "--from-history", panel=JOBS)] = False,
    database: Annotated[Path | None, option("state.db of a stopped daemon, or its folder.", "PATH", panel=JOBS)] = None,
    since: Annotated[str | None, option(f"First job: {MOMENT_FORMS}.", "TIME", default="7d", panel=JOBS)] = None,
    until: Annotated[str | None, option("Last job, in the same form.", "TIME", default="now", panel=JOBS)] = None,
    save_history: Annotated[
        Path | None, option("Write the history, to simulate it elsewhere.", "FILE.json", panel=JOBS)
    ] = None,
    as_json: Json = False,
    **options: Any,
) -> None:
    """Simulate a job trace on shared GPUs with the daemon's placement code.

    Give an option several values to compare every combination with the first. Several --seeds or traces give means with
    95% confidence intervals. --from-history takes GPUs, policy and rules from the daemon unless you set them. Ctrl-C
    prints the runs done so far.

    Examples:

      ullage simulate jobs.csv --gpus 4xA100-40GB --policy exclusive,ullage --report runs.html
      ullage simulate --generate 500 --load 1.2 --gpus 8xH200 --seeds 50 --policy exclusive,ullage
      ullage simulate jobs.csv --gpus 4..16xA100-40GB --target "waiting<=10m"
      ullage simulate --from-history --since 30d --sharing mps --policy magm,ullage
    """
    from ullage.manager.simulation import report as pages
    from ullage.manager.simulation.result import check_results_file

    if save is not None:
        check_results_file(save)
    if report is not None:
        pages.check_page(report)
    sources = sources_of(traces or [], options)
    if not sources and not compare_with and not from_history:
        raise InvalidValue(
            "simulate needs a trace or --generate N, got none; type: ullage simulate jobs.csv --gpus 4xA100-40GB"
        )
    if sources and from_history:
        raise InvalidValue(f"{sources[0].name} and --from-history exclude each other, got both; leave one out")
    for name, value in (("--save-history", save_history), ("--database", database)):
        if value is not None and not from_history:
            raise InvalidValue(f"{name} works only with --from-history; add it")
    many = {
        "several traces": len(sources) > 1,
        "--seeds": seeds is not None and seeds > 1,
        "--target": target,
        "--resume": resume,
    }
    averaging = [name for name, value in many.items() if value]
    if not averaging:
        history = _history(database, since, until) if from_history else None
        if history is not None and save_history is not None:
            from ullage.manager.simulation.history import write_history

            write_history(history, save_history)
        _one_by_one(sources, history, options, seed, label or [], compare_with or [], save, report, as_json)
        if save_history is not None and not as_json:
            print(f"written: {save_history}")
        return
    others = {"--save": save, "--compare-with": compare_with, "--from-history": from_history, "--label": label}
    for name, given in others.items():
        if given:
            raise InvalidValue(f"{name} and {averaging[0]} exclude each other, since means have no runs; leave one out")
    _many(sources, options, range(seed, seed + (seeds or 1)), target, workers, resume, report, as_json)


def _one_by_one(
    sources: Sequence["TraceSource"],
    history: dict[str, Any] | None,
    options: dict[str, Any],
    seed: int,
    labels: list[str],
    compare_with: Sequence[Path],
    save: Path | None,
    report: Path | None,
    as_json: bool,
) -> None:
    from ullage.manager.simulation import report as pages
    from ullage.manager.simulation.history import is_history, read_history
    from ullage.manager.simulation.result import read_results, write_results

    for source in sources:
        if source.path is not None and is_history(Path(source.path)):
            history, sources = read_history(Path(source.path)), []
    runs = [run for file in compare_with for run in read_results(file)]
    notes: Sequence[str] = ()
    with following("reading the trace", stoppable=True) as going:
        if history is not None:
            notes = _replay(history, options, seed, labels, runs, going)
        for source in sources:
            scenarios = labelled(scenarios_of(options, seed), labels)
            jobs = source.read(seed)
            notes = jobs.notes
            _simulate(jobs, scenarios, runs, going)
    if as_json:
        print(json.dumps({"runs": [run.summary() for run in runs], "notes": list(notes)}))
    elif runs:
        print(runs_table(runs))
        for line in [*runs_remarks(runs), *map(plain, notes)]:
            print(line)
    if save is not None and runs:
        write_results(save, runs)
    if report is not None and runs:
        pages.write_runs(runs, report)
    for file in () if as_json or not runs else (save, report):
        if file is not None:
            print(f"written: {file}")
    going.end()


def _many(
    sources: Sequence["TraceSource"],
    options: dict[str, Any],
    seeds: range,
    target: str | None,
    workers: int | None,
    resume: Path | None,
    report: Path | None,
    as_json: bool,
) -> None:
    """Simulate every scenario on every trace with every seed, and print means."""
    from ullage.manager.simulation import report as pages
    from ullage.manager.simulation import sweeps as sweeping
    from ullage.manager.simulation.measures import Target

    wanted_target = Target.parse(target or "waiting<=10m")
    wanted = sweeping.cases(sources, scenarios_of(options, seeds[0]), seeds)
    outcomes: list[CaseOutcome] = []
    with following("simulating", len(wanted), stoppable=True) as going:
        for outcome in sweeping.run_cases(wanted, workers or len(os.sched_getaffinity(0)), resume):
            outcomes.append(outcome)
            going.step(outcome.case.scenario.name)
    rows = sweeping.summarize(wanted, outcomes)
    answers = sweeping.answers(rows, wanted_target) if target else []
    if as_json:
        enough = [
            {"trace": each.trace, "scenario": each.name, "enough": each.enough and each.enough.scenario.gpus}
            for each in answers
        ]
        print(json.dumps({"rows": [row.to_dict() for row in rows], "target": target, "answers": enough}))
    else:
        print("\n\n".join(_sweep_tables(rows, changes=not target)))
        remarks = _sweep_remarks(rows, len(seeds), changes=not target)
        for line in [*remarks, *(_target_words(each, wanted_target) for each in answers)]:
            print(line)
    if report is not None and rows:
        pages.write_sweep(rows, report)
        print(f"written: {report}", file=sys.stderr if as_json else sys.stdout)
    going.end()
    if not any(row.figures for row in rows):
        raise typer.Exit(FAILED)


def _simulate(
    jobs: "JobTrace", scenarios: Sequence["Scenario"], results: list["SimulationResult"], going: Following
) -> None:
    from ullage.manager.simulation import engine

    going.begin("simulating", len(scenarios))
    for scenario in scenarios:

        def show_progress(over: int, total: int, name: str = scenario.name) -> None:
            going.doing(f"{name}: {over:,} of {total:,} jobs")

        show_progress(0, len(jobs.jobs))
        results.append(engine.simulate(jobs, scenario, show_progress))
        going.step()


def _history(database: Path | None, since: str | None, until: str | None) -> dict[str, Any]:
    now = time.time()
    end = None if until is None else moment(until, now)
    if database is None:
        return Client().trace(moment(since or "7d", now), end)
    from ullage.manager.core.export import stored_trace

    return stored_trace(database, 0.0 if since is None else moment(since, now), end)


def _replay(
    history: dict[str, Any],
    options: dict[str, Any],
    seed: int,
    labels: list[str],
    results: list["SimulationResult"],
    going: Following,
) -> Sequence[str]:
    """Add the history's real outcome, its simulation, and the other scenarios to `results`; return the assumptions."""
    from ullage.manager.policy_files import own_name
    from ullage.manager.simulation.history import as_it_was, scenario_of_history, trace_of_history
    from ullage.manager.simulation.scenario import variants

    choices = choices_of(options)
    theirs = own_name(history["policy"])
    named = next((each for each in choices.get("policy", ()) if theirs and own_name(each) == theirs), None)
    others = theirs is not None and named is None and "policy" in choices  # the real policy cannot be simulated
    base = scenario_of_history(history, choices["policy"][0] if others else named).but(
        seed=seed, **settings_of(options)
    )
    startup_s = base.world.startup_s
    jobs = trace_of_history(history, startup_s=startup_s)
    if not jobs.jobs:
        left_out = "".join(f"; {note}" for note in jobs.notes)
        since = format_moment(history["since"])
        raise InvalidValue(f"no jobs that ran on a GPU have ended since {since}{left_out}")
    scenarios = [] if others else [base.but(label="simulated as it was")]
    if choices:
        scenarios += labelled(variants(base, choices), labels)
    results.append(as_it_was(history, startup_s=startup_s))
    _simulate(jobs, scenarios, results, going)
    if not others:
        return jobs.notes
    copy = plain(theirs or "")
    return [
        f"the daemon's policy was {copy}; to see that simulated as well, name your copy: --policy {copy}",
        *jobs.notes,
    ]


# Printed tables.

_COLUMNS = ("total", "waiting", "running", "completion", "slowdown", "ooms", "energy", "smact", "memory")
_GIVE_WAY = ("memory", "smact", "slowdown", "running", "Δ energy", "waiting")


def runs_table(runs: Sequence["SimulationResult"]) -> str:
    from ullage.manager.simulation.measures import MEASURES, change

    compared = ("total", "energy") if len(runs) > 1 else ()
    heads, rows = ["run"], [[plain(run.name)] for run in runs]
    for name in _COLUMNS:
        values = [MEASURES[name].of(run.figures) for run in runs]
        heads += [name, f"Δ {name}"] if name in compared else [name]
        for row, value in zip(rows, values, strict=True):
            row.append(MEASURES[name].short(value))
            if name in compared:
                row.append("" if row is rows[0] else change(value, values[0]))
    return fitted(heads, rows, give_way=[name for name in _GIVE_WAY if name in heads])


def runs_remarks(runs: Sequence["SimulationResult"]) -> list[str]:
    notes = []
    for run in runs:
        figures, scenario = run.figures, run.scenario
        lost = [f"{figures.failed} of {figures.jobs} jobs failed"] if figures.failed else []
        lost += [f"{figures.unplaced} could not be placed on any GPU"] if figures.unplaced else []
        lost += [f"{figures.lost} attempts lost their GPU"] if figures.lost else []
        if lost:
            notes.append(f"{plain(run.name)}: {', '.join(lost)}")
        if scenario.estimator == "none" and scenario.rules.unknown == "exclusive" and scenario.policy != "exclusive":
            notes.append(f"{plain(run.name)}: memory is unknown, so each job had a GPU to itself; see --unknown floor")
    return notes


_SWEPT = ("total", "waiting", "completion", "slowdown", "ooms", "energy", "smact")


def _sweep_tables(rows: Sequence["SweepRow"], changes: bool) -> list[str]:
    """Return tables of the figures on each trace, and of their changes against the first scenario."""
    from ullage.manager.simulation.measures import MEASURES, change_text, interval_text

    tables = []
    traces = dict.fromkeys(row.source for row in rows)
    for source in traces:
        own = [row for row in rows if row.source == source]
        title = f"{plain(source.name)}\n" if len(traces) > 1 else ""
        cells = [
            [plain(row.scenario.name), *(interval_text(MEASURES[name], row.figures.get(name)) for name in _SWEPT)]
            for row in own
        ]
        ways = ["smact", "slowdown", "ooms", "completion", "energy"]
        tables.append(title + fitted(["scenario", *_SWEPT], cells, give_way=ways))
        if changes and len(own) > 1:
            against = [name for name in _SWEPT if any(name in row.changes for row in own)]
            cells = [
                [plain(row.scenario.name), *(change_text(row.changes.get(name)) for name in against)] for row in own[1:]
            ]
            head = f"against {plain(own[0].scenario.name)}"
            tables.append(fitted([head, *against], cells, give_way=[name for name in ways if name in against]))
    return tables


def _sweep_remarks(rows: Sequence["SweepRow"], seeds: int, changes: bool) -> list[str]:
    remarks = [f"{plain(row.scenario.name)}: {plain(error)}" for row in rows for error in dict.fromkeys(row.errors)]
    for name, words in (("failed", "jobs failed"), ("unplaced", "jobs could not be placed on any GPU")):
        remarks += [
            f"{plain(row.scenario.name)}: {row.mean(name):.3g} {words}, on average" for row in rows if row.mean(name)
        ]
    shown = [row.changes[name] for row in rows for name in _SWEPT if name in row.changes] if changes else []
    if any(change.half and not change.sign for change in shown):
        remarks.append("changes in brackets may be chance")
    if seeds > 1 and rows and all(row.figures["total"].half == 0 for row in rows if "total" in row.figures):
        remarks.append("every seed gave the same: nothing is drawn here; see --generate and --interference-error")
    return remarks


def _target_words(answer: "TargetAnswer", target: "Target") -> str:
    from ullage.manager.simulation.measures import interval_text

    where = f"{plain(answer.name)} on {plain(answer.trace)}"

    def words_of(row: "SweepRow") -> str:
        interval = row.figures.get(target.measure.name)
        value = "not every job is placed" if row.mean("unplaced") else interval_text(target.measure, interval)
        return f"{plain(row.scenario.gpus)} ({value})"

    last = f"; the last was {words_of(answer.short)}" if answer.short else ""
    if answer.enough is None:
        return f"{target} with {where}: none of these is enough{last}"
    interval = answer.enough.figures[target.measure.name]
    sure = interval.half is None or target.met(interval.low) and target.met(interval.high)
    less = f"; {words_of(answer.short)} is not" if answer.short else ""
    return f"{target} with {where}: {words_of(answer.enough)} is enough{'' if sure else ' on average'}{less}"
