"""`ullage simulate` and `ullage sweep`: what would become of a trace of jobs on these GPUs."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ullage.cli import completion
from ullage.cli.jobs import client
from ullage.cli.options import Json, Seed, with_options
from ullage.cli.progress import Following, following
from ullage.cli.report import moment
from ullage.cli.tables import fitted
from ullage.errors import InvalidValue, UnknownName
from ullage.text import plain
from ullage.units import parse_bytes, parse_duration

if TYPE_CHECKING:
    from ullage.simulation.result import SimulationResult
    from ullage.simulation.scenario import Scenario
    from ullage.simulation.trace import JobTrace

RULES, WORLD = "Rules of placement", "The simulated world"
_RANGE = re.compile(r"\s*([0-9]+)\.\.([0-9]+)(?::([0-9]+))?\s*[x×*]\s*([^,]+)")
_OFF = ("off", "none")


class ScenarioOptions:
    """The options that say what jobs meet; those that take several values compare every combination of them."""

    gpus: Annotated[
        list[str] | None, typer.Option(help="The GPUs, such as 4xA100-40GB, or 8xH200,4xT4. 4..16xA100-40GB is every "
                                       "number from 4 to 16, 8..64:8xH200 every eighth. Can be given more than once.",
                                       metavar="GPUS", autocompletion=completion.counted_gpus)
    ] = None  # fmt: skip
    policy: Annotated[
        list[str] | None, typer.Option(help="How GPUs are chosen for jobs: ullage, exclusive, round-robin, magm, lug, "
                                       "mug, or with true memory first-fit, best-fit, worst-fit, least-utilized. "
                                       "Several with commas.", metavar="NAME", show_default="ullage",
                                       autocompletion=completion.several_policies)
    ] = None  # fmt: skip
    estimator: Annotated[
        list[str] | None, typer.Option("--estimator", "-e", help="Whose estimates jobs are promised: ullage, another "
                                       "one that the trace has, oracle for true memory, or none. Several with commas.",
                                       metavar="NAME", show_default="ullage",
                                       autocompletion=completion.promising_estimators)
    ] = None  # fmt: skip
    sharing: Annotated[
        list[str] | None, typer.Option(help="How jobs share a GPU: mps, timeslice, mig (with the instances: "
                                       "mig:2g.10gb) or off. Several with commas.", metavar="WAY", show_default="mps",
                                       autocompletion=completion.simulated_sharing)
    ] = None  # fmt: skip
    trace_format: Annotated[
        str | None, typer.Option(help="The form of the trace.", metavar="NAME",
                                 show_default="recognised by how the file begins",
                                 autocompletion=completion.trace_formats)
    ] = None  # fmt: skip
    mix: Annotated[
        str, typer.Option(help="For traces that do not say what their jobs train: the mix of known workloads that "
                          "they are given.", metavar="NAME")
    ] = "mixed"  # fmt: skip
    smact_limit: Annotated[
        list[str] | None, typer.Option(help="Share a GPU only up to this SM activity, such as 0.8, or off. Several "
                                       "with commas.", metavar="SHARE", rich_help_panel=RULES, show_default="0.8")
    ] = None  # fmt: skip
    free_floor: Annotated[
        list[str] | None, typer.Option(help="What must be free for a job of unknown memory (with --unknown floor), or "
                                       "off. Several with commas.", metavar="SIZE", rich_help_panel=RULES,
                                       show_default="5GiB")
    ] = None  # fmt: skip
    margin: Annotated[
        list[str] | None, typer.Option(help="What is left free beside a job's promise where others are. Several with "
                                       "commas.", metavar="SIZE", rich_help_panel=RULES, show_default="2GiB")
    ] = None  # fmt: skip
    min_speed: Annotated[
        list[str] | None, typer.Option(help="Put no job where one would keep less of its speed than this. Several "
                                       "with commas.", metavar="SHARE", rich_help_panel=RULES, show_default="0.8")
    ] = None  # fmt: skip
    unknown: Annotated[
        str | None, typer.Option(help="A job of unknown memory gets a GPU to itself (exclusive) or one with "
                                 "--free-floor free (floor).", metavar="exclusive|floor", rich_help_panel=RULES,
                                 show_default="exclusive", autocompletion=lambda: ["exclusive", "floor"])
    ] = None  # fmt: skip
    exclusive_after: Annotated[
        int | None, typer.Option(help="A job that ran out of memory so often gets a GPU to itself.", metavar="N",
                                 min=1, rich_help_panel=RULES, show_default="3")
    ] = None  # fmt: skip
    without: Annotated[
        str | None, typer.Option(help="Switch parts off: interference, errors, startup, fragmentation, delay, retry, "
                                 "failures, or all. Several with commas.", metavar="PARTS", rich_help_panel=WORLD,
                                 autocompletion=completion.parts_of_world)
    ] = None  # fmt: skip
    interference_error: Annotated[
        float | None, typer.Option(help="How far true slowdowns are from predicted ones: the standard deviation of "
                                   "the logarithm.", metavar="X", min=0.0, rich_help_panel=WORLD)
    ] = None  # fmt: skip
    startup: Annotated[
        str | None, typer.Option(help="From the start of a job until it takes its memory.", metavar="TIME",
                                 rich_help_panel=WORLD)
    ] = None  # fmt: skip
    fragmentation: Annotated[
        str | None, typer.Option(help="What no job can have of a GPU although it is free.", metavar="SIZE",
                                 rich_help_panel=WORLD)
    ] = None  # fmt: skip
    monitor_delay: Annotated[
        str | None, typer.Option(help="How old the readings are that a placement sees.", metavar="TIME",
                                 rich_help_panel=WORLD)
    ] = None  # fmt: skip
    retry: Annotated[
        str | None, typer.Option(help="From a failure until the job stands in the queue again.", metavar="TIME",
                                 rich_help_panel=WORLD)
    ] = None  # fmt: skip
    node_mtbf: Annotated[
        str | None, typer.Option(help="How long a node works until it fails, on average, such as 30d.",
                                 metavar="TIME", rich_help_panel=WORLD, show_default="no node fails")
    ] = None  # fmt: skip
    node_gpus: Annotated[
        int | None, typer.Option(help="How many GPUs a node has.", metavar="N", min=1, rich_help_panel=WORLD,
                                 show_default="8")
    ] = None  # fmt: skip
    node_repair: Annotated[
        str | None, typer.Option(help="How long a node is away after it failed.", metavar="TIME",
                                 rich_help_panel=WORLD, show_default="1h")
    ] = None  # fmt: skip


def _with_scenario(command: Callable[..., None]) -> Callable[..., None]:
    return with_options(command, ScenarioOptions)


@_with_scenario
def simulate(
    trace: Annotated[
        Path | None, typer.Argument(help="A trace of jobs, in any form that is known.", metavar="TRACE",
                                    show_default=False)
    ] = None,
    from_history: Annotated[
        bool, typer.Option("--from-history", help="Simulate again what the daemon ran, beside what really happened. "
                           "GPUs, policy, sharing and rules are the daemon's unless others are given.")
    ] = False,
    since: Annotated[
        str, typer.Option(help="With --from-history, jobs submitted from then on: a date (2026-11-01), a time "
                          "(2026-11-01T08:00), or how long ago (30d, 12h).", metavar="TIME")
    ] = "7d",
    until: Annotated[
        str | None, typer.Option(help="With --from-history, jobs submitted before then, in the same way.",
                                 metavar="TIME", show_default="now")
    ] = None,
    label: Annotated[
        list[str] | None, typer.Option(help="What a run is called; once for each run, in their order.", metavar="TEXT")
    ] = None,
    seed: Seed = 0,
    save: Annotated[
        Path | None, typer.Option(help="Write everything about the runs to this file, packed if it ends in .gz.",
                                  metavar="FILE.json")
    ] = None,
    beside: Annotated[
        list[Path] | None, typer.Option(help="Show the runs of a --save file before these. Can be given more than "
                                        "once.", metavar="FILE.json")
    ] = None,
    report: Annotated[
        Path | None, typer.Option(help="Write figures and plots of all runs to one HTML page.", metavar="FILE.html")
    ] = None,
    as_json: Json = False,
    **options: Any,
) -> None:  # fmt: skip
    """Tell what would become of a trace of jobs on shared GPUs.

    The decisions are made by the code that 'ullage serve' runs, under a virtual clock. Where an option has several
    values, every combination is simulated and compared with the first.

    Examples:

      ullage simulate jobs.csv --gpus 4xA100-40GB --policy magm --estimator gpumemnet --sharing mps
      ullage simulate jobs.csv --gpus 4xA100-40GB --policy exclusive,magm,ullage --report runs.html
      ullage simulate jobs.csv --gpus 4xA100-40GB --gpus 2xH200 --save runs.json.gz
      ullage simulate jobs.csv --gpus 4xA100-40GB --policy magm --estimator none --unknown floor --without startup
      ullage simulate --beside yesterday.json --beside today.json --report both.html
      ullage simulate --from-history --since 30d --sharing mps --policy magm,ullage
      ullage simulate --from-history --since 30d --gpus 2..8xA100-40GB
    """
    from ullage.simulation.result import read_results, write_results

    runs = [run for file in beside or [] for run in read_results(file)]
    if trace is None and not runs and not from_history:
        raise InvalidValue("needed a trace of jobs, such as: ullage simulate jobs.csv --gpus 4xA100-40GB")
    if trace is not None and from_history:
        raise InvalidValue(f"needed a trace or --from-history; found both ({trace})")
    notes: Sequence[str] = ()
    if from_history:
        replayed, notes = _replayed(since, until, options, seed, label or [])
        runs += replayed
    if trace is not None:
        runs += _simulated(trace, _labelled(_scenarios(options, seed), label or []), options)
    if save is not None:
        write_results(save, runs)
    if report is not None:
        from ullage.simulation.pages.runs import write

        write(runs, report)
    if as_json:
        print(json.dumps({"runs": [run.summary() for run in runs], "notes": list(notes)}))
        return
    print(_table(runs))
    for line in [*_remarks(runs), *notes]:
        print(line)
    for file in (save, report):
        if file is not None:
            print(f"written: {file}")


def _simulated(trace: Path, scenarios: Sequence[Scenario], options: dict[str, Any]) -> list[SimulationResult]:
    from ullage.simulation.reading import read_trace

    with following("reading the trace") as going:
        jobs = read_trace(trace, format=options["trace_format"], mix=options["mix"], seed=scenarios[0].seed)
        return _all_of(jobs, scenarios, going)


def _all_of(jobs: JobTrace, scenarios: Sequence[Scenario], going: Following) -> list[SimulationResult]:
    from ullage.simulation import engine

    found = []
    going.begin("simulating", len(scenarios))
    for scenario in scenarios:

        def told(over: int, total: int, name: str = scenario.name) -> None:
            going.doing(f"{name}: {over:,} of {total:,} jobs")

        told(0, len(jobs.jobs))
        found.append(engine.simulate(jobs, scenario, told))
        going.step()
    return found


def _replayed(
    since: str, until: str | None, options: dict[str, Any], seed: int, labels: list[str]
) -> tuple[list[SimulationResult], Sequence[str]]:
    """What really happened, the same simulated, what it is compared with; and what was assumed."""
    from ullage.simulation.history import as_it_was, scenario_of_history, trace_of_history

    now = time.time()
    told = client().trace(moment(since, now), None if until is None else moment(until, now))
    base = scenario_of_history(told).but(seed=seed, **_world(options))
    jobs = trace_of_history(told)
    if not jobs.jobs:
        left_out = "".join(f"; {note}" for note in jobs.notes)
        raise InvalidValue(f"needed jobs that ran on a GPU and are over; found none since {since}{left_out}")
    choices = _choices(options)
    scenarios = [base.but(label="simulated as it was")]
    if choices:
        scenarios += _labelled(_variants(base, choices), labels)
    with following("simulating") as going:
        return [as_it_was(told), *_all_of(jobs, scenarios, going)], jobs.notes


# From options to scenarios.


def _scenarios(options: dict[str, Any], seed: int) -> list[Scenario]:
    from ullage.simulation.scenario import Scenario

    if not options["gpus"]:
        raise InvalidValue("needed the GPUs, such as --gpus 4xA100-40GB")
    choices = _choices(options)
    return _variants(Scenario(gpus=choices["gpus"][0], seed=seed).but(**_world(options)), choices)


def _variants(base: Scenario, choices: dict[str, list[Any]]) -> list[Scenario]:
    from ullage.simulation.asking import variants

    return variants(base, choices)


def _choices(options: dict[str, Any]) -> dict[str, list[Any]]:
    choices: dict[str, list[Any]] = {}
    if options["gpus"]:
        choices["gpus"] = [text for given in options["gpus"] for text in gpu_choices(given)]
    for name, read in _READERS.items():
        given = [text.strip() for values in options[name] or [] for text in values.split(",")]
        if given:
            choices[name] = [read(text) for text in given]
    return _ordered(choices)


def _ordered(choices: dict[str, list[Any]]) -> dict[str, list[Any]]:
    """The policy comes first in names, the GPUs last."""
    return {name: choices[name] for name in sorted(choices, key=lambda name: name == "gpus")}


def gpu_choices(text: str) -> list[str]:
    """GPUs as they were typed; a range of numbers stands for several choices.

    >>> gpu_choices("2..4xT4"), gpu_choices("8..24:8xH200"), gpu_choices("2xH200,T4")
    (['2xT4', '3xT4', '4xT4'], ['8xH200', '16xH200', '24xH200'], ['2xH200,T4'])
    """
    from ullage.hardware import gpu_list

    match = _RANGE.fullmatch(text)
    if match is None:
        gpu_list(text)
        return [text]
    first, last, step = int(match[1]), int(match[2]), int(match[3] or 1)
    gpu_list(match[4])
    if not 1 <= first <= last or not step:
        raise InvalidValue(f"--gpus: needed a range such as 4..16xA100-40GB; found {text!r}")
    return [f"{count}x{match[4].strip()}" for count in range(first, last + 1, step)]


def share_or_off(text: str) -> float | None:
    """A share, or None for off.

    >>> share_or_off("80%"), share_or_off("0.8"), share_or_off("off")
    (0.8, 0.8, None)
    """
    return None if text in _OFF else _share(text)


def _share(text: str) -> float:
    try:
        return float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        raise InvalidValue(f"needed a share such as 0.8 or 80%; found {text!r}") from None


_READERS: dict[str, Callable[[str], Any]] = {
    "policy": str,
    "estimator": str,
    "sharing": lambda text: "timeslice" if text == "time-slicing" else text,
    "smact_limit": share_or_off,
    "free_floor": lambda text: None if text in _OFF else parse_bytes(text),
    "margin": parse_bytes,
    "min_speed": _share,
}


def _world(options: dict[str, Any]) -> dict[str, Any]:
    """The settings that have one value each."""
    from ullage.simulation.scenario import PARTS_OF_WORLD

    readers: dict[str, tuple[str, Callable[[Any], Any]]] = {
        "unknown": ("unknown", str), "exclusive_after": ("exclusive_after", int),
        "interference_error": ("interference_error", float), "startup": ("startup_s", parse_duration),
        "fragmentation": ("fragmentation", parse_bytes), "monitor_delay": ("monitor_delay_s", parse_duration),
        "retry": ("retry_s", parse_duration), "node_mtbf": ("node_mtbf_s", parse_duration),
        "node_gpus": ("node_gpus", int), "node_repair": ("node_repair_s", parse_duration),
    }  # fmt: skip
    found = {name: read(options[option]) for option, (name, read) in readers.items() if options[option] is not None}
    for part in (options["without"] or "").split(",") if options["without"] else []:
        if part not in (*PARTS_OF_WORLD, "all"):
            raise UnknownName("part of the simulated world", part, [*PARTS_OF_WORLD, "all"])
        for name, settings in PARTS_OF_WORLD.items():
            found |= settings if part in (name, "all") else {}
    return found


def _labelled(scenarios: list[Scenario], labels: list[str]) -> list[Scenario]:
    if labels and len(labels) != len(scenarios):
        names = "; ".join(scenario.name for scenario in scenarios)
        raise InvalidValue(f"needed a --label for each of {len(scenarios)} runs ({names}); found {len(labels)}")
    if not labels:
        return scenarios
    return [scenario.but(label=label) for scenario, label in zip(scenarios, labels, strict=True)]


# What is printed.

_COLUMNS = ("total", "waiting", "running", "completion", "slowdown", "ooms", "energy", "smact", "memory")
_GIVE_WAY = ("memory", "smact", "slowdown", "running", "Δ energy", "waiting")


def _table(runs: Sequence[SimulationResult]) -> str:
    from ullage.simulation.measures import MEASURES, change

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


def _remarks(runs: Sequence[SimulationResult]) -> list[str]:
    """What the table does not say and somebody should know."""
    told = []
    for run in runs:
        found, scenario = run.figures, run.scenario
        lost = [f"{found.failed} of {found.jobs} jobs failed"] if found.failed else []
        lost += [f"{found.unplaced} could not be placed on any GPU"] if found.unplaced else []
        lost += [f"{found.lost} attempts lost their GPU"] if found.lost else []
        if lost:
            told.append(f"{plain(run.name)}: {', '.join(lost)}")
        if scenario.estimator == "none" and scenario.rules.unknown == "exclusive" and scenario.policy != "exclusive":
            told.append(f"{plain(run.name)}: memory is unknown, so each job had a GPU to itself; see --unknown floor")
    return told
