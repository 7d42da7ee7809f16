"""The options of `ullage simulate` that say which jobs come and in which scenarios they run.

An option that takes several values stands for several scenarios.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from ullage.cli import completion
from ullage.cli.options import with_options
from ullage.errors import InvalidValue, UnknownName
from ullage.units import parse_bytes, parse_duration

if TYPE_CHECKING:
    from ullage.manager.simulation.scenario import Scenario
    from ullage.manager.simulation.sweeps import TraceSource

RULES, WORLD, DRAWN = "Rules of placement", "The simulated world", "Drawn jobs"
_RANGE = re.compile(r"\s*([0-9]+)\.\.([0-9]+)(?::([0-9]+))?\s*[x×*]\s*([^,]+)")
_OFF = ("off", "none")


class DrawnOptions:
    """The options that say which jobs are drawn."""

    generate: Annotated[
        int | None,
        typer.Option(
            help="Generate a trace of N known workloads from the seed.", metavar="N", min=1, rich_help_panel=DRAWN
        ),
    ] = None
    load: Annotated[
        float,
        typer.Option(
            help="Demand as a fraction of the first --gpus, without sharing; above 1 the queue grows.",
            metavar="X",
            rich_help_panel=DRAWN,
        ),
    ] = 0.8
    burst: Annotated[
        float,
        typer.Option(
            help="Mean number of jobs that a user submits at once.", metavar="X", min=1.0, rich_help_panel=DRAWN
        ),
    ] = 1.0
    daily: Annotated[
        float,
        typer.Option(
            help="Daily swing of arrivals, from 0 to 1.", metavar="X", min=0.0, max=1.0, rich_help_panel=DRAWN
        ),
    ] = 0.0
    users: Annotated[
        int, typer.Option(help="Number of users who submit jobs.", metavar="N", min=1, rich_help_panel=DRAWN)
    ] = 10
    tail: Annotated[
        str,
        typer.Option(
            help="Distribution of the work of jobs: lognormal or pareto.",
            metavar="NAME",
            rich_help_panel=DRAWN,
            autocompletion=lambda: ["lognormal", "pareto"],
        ),
    ] = "lognormal"
    spread: Annotated[
        float,
        typer.Option(
            help="Standard deviation of the logarithm (lognormal), or the index (pareto).",
            metavar="X",
            rich_help_panel=DRAWN,
        ),
    ] = 1.0


class TraceOptions:
    """The options that say how a trace is read."""

    trace_format: Annotated[
        str | None,
        typer.Option(
            help="Format of the trace.",
            metavar="NAME",
            show_default="recognised by how the file begins",
            autocompletion=completion.trace_formats,
        ),
    ] = None
    limit: Annotated[
        int | None, typer.Option("--limit", "-n", help="Read only the first N jobs of a trace.", metavar="N", min=1)
    ] = None
    mix: Annotated[
        str,
        typer.Option(
            help="Mix of known workloads for jobs that are drawn, or whose trace does not say what they train: mixed "
            "(65 % light, 27 % medium, 8 % large) or heavy (83 % medium, 17 % large).",
            metavar="NAME",
        ),
    ] = "mixed"


def _count(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise InvalidValue(f"needed a whole number above 0; found {text!r}")
    return int(text)


def _number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise InvalidValue(f"needed a number of 0 or more; found {text!r}")
    return value


def _share(text: str) -> float:
    try:
        return float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        raise InvalidValue(f"needed a share such as 0.8 or 80%; found {text!r}") from None


def _or_off(read: Callable[[str], Any]) -> Callable[[str], Any]:
    return lambda text: None if text in _OFF else read(text)


@dataclass(frozen=True)
class ScenarioSetting:
    """An option that sets a field of a scenario, its rules or its world: the `field`, how its text is read, and what
    the help says of it. `several`: it takes several values, between commas."""

    field: str
    read: Callable[[str], Any]
    help: str
    metavar: str
    default: str
    panel: str | None = None
    several: bool = False
    complete: Callable[..., Any] | None = None
    short: tuple[str, ...] = ()


# By the name of the option; in the names of scenarios the policy comes first.
SETTINGS = {
    "policy": ScenarioSetting(
        "policy",
        str,
        "How GPUs are chosen for jobs: ullage, exclusive, round-robin, magm, lug, mug, or with true memory first-fit, "
        "best-fit, worst-fit, least-utilized. Or a function in a Python file.",
        "NAME|FILE.py:FUNCTION",
        "ullage",
        several=True,
        complete=completion.several_policies,
    ),
    "estimator": ScenarioSetting(
        "estimator",
        str,
        "Estimator whose estimates are promised: ullage, another one from 'ullage lab compare', oracle for true "
        "memory, or none.",
        "NAME",
        "ullage",
        several=True,
        complete=completion.promising_estimators,
        short=("--estimator", "-e"),
    ),
    "sharing": ScenarioSetting(
        "sharing",
        lambda text: "timeslice" if text == "time-slicing" else text,
        "How jobs share a GPU: mps, timeslice, mig (with the instances: mig:2g.10gb) or off.",
        "WAY",
        "mps",
        several=True,
        complete=completion.simulated_sharing,
    ),
    "smact_limit": ScenarioSetting(
        "smact_limit", _or_off(_share), "Share a GPU only up to this SM activity, or off.", "SHARE", "0.8", RULES, True
    ),
    "free_floor": ScenarioSetting(
        "free_floor",
        _or_off(parse_bytes),
        "Free memory required for a job of unknown memory (with --unknown floor), or off.",
        "SIZE",
        "5GiB",
        RULES,
        True,
    ),
    "margin": ScenarioSetting(
        "margin", parse_bytes, "Extra memory to leave free on a shared GPU.", "SIZE", "2GiB", RULES, True
    ),
    "min_speed": ScenarioSetting(
        "min_speed",
        _share,
        "Put no job where one would keep less of its speed than this.",
        "SHARE",
        "any speed",
        RULES,
        True,
    ),
    "unknown": ScenarioSetting(
        "unknown",
        str,
        "A job of unknown memory gets a GPU to itself (exclusive) or one with --free-floor free (floor).",
        "exclusive|floor",
        "exclusive",
        RULES,
        complete=lambda: ["exclusive", "floor"],
    ),
    "queue_depth": ScenarioSetting(
        "at_a_time", _count, "Number of jobs that a pass looks at, from the head of the queue.", "N", "all", RULES
    ),
    "exclusive_after": ScenarioSetting(
        "exclusive_after",
        _count,
        "Number of times a job runs out of memory until it gets a GPU to itself.",
        "N",
        "3",
        RULES,
    ),
    "interference_error": ScenarioSetting(
        "interference_error",
        _number,
        "Difference between true and predicted slowdowns: the standard deviation of the logarithm of what jobs lose.",
        "X",
        "0.4 under MPS, 0.2 time-sliced",
        WORLD,
    ),
    "startup": ScenarioSetting(
        "startup_s", parse_duration, "Time from the start of a job until it takes its memory.", "TIME", "10s", WORLD
    ),
    "fragmentation": ScenarioSetting(
        "fragmentation", parse_bytes, "Free GPU memory lost to fragmentation.", "SIZE", "0B", WORLD
    ),
    "monitor_delay": ScenarioSetting(
        "monitor_delay_s", parse_duration, "Age of the readings used for placement.", "TIME", "1s", WORLD
    ),
    "retry": ScenarioSetting(
        "retry_s", parse_duration, "Time from a failure until the job is queued again.", "TIME", "0s", WORLD
    ),
    "node_mtbf": ScenarioSetting(
        "node_mtbf_s",
        parse_duration,
        "Mean time to a failure of a node, such as 30d.",
        "TIME",
        "no node fails",
        WORLD,
    ),
    "node_gpus": ScenarioSetting("node_gpus", _count, "Number of GPUs of a node.", "N", "8", WORLD),
    "node_repair": ScenarioSetting(
        "node_repair_s", parse_duration, "Time that a node is away after it failed.", "TIME", "1h", WORLD
    ),
}


class ScenarioOptions:
    """The options without a text to read; those of `SETTINGS` are added below."""

    gpus: Annotated[
        list[str] | None,
        typer.Option(
            help="The GPUs, such as 4xA100-40GB, or 8xH200,4xT4. 4..16xA100-40GB is every number from 4 to 16, "
            "8..64:8xH200 every eighth. Can be given more than once.",
            metavar="GPUS",
            autocompletion=completion.counted_gpus,
        ),
    ] = None
    use_predictions: Annotated[
        bool,
        typer.Option(
            "--use-predictions/--no-use-predictions",
            help="Whether placement knows what jobs will do on a GPU, or only what the monitor sees.",
            rich_help_panel=RULES,
        ),
    ] = True
    track_promises: Annotated[
        bool,
        typer.Option(
            "--track-promises/--no-track-promises",
            help="Whether placement remembers promises, or uses only the monitor's last reading.",
            rich_help_panel=RULES,
        ),
    ] = True
    disable: Annotated[
        str | None,
        typer.Option(
            help="Switch parts off: interference, errors, startup, fragmentation, delay, retry, failures, or all. "
            "Several with commas.",
            metavar="PARTS",
            rich_help_panel=WORLD,
            autocompletion=completion.parts_of_world,
        ),
    ] = None


def _add_settings() -> None:
    for name, setting in SETTINGS.items():
        option = typer.Option(
            *setting.short,
            help=setting.help + (" Several with commas." if setting.several else ""),
            metavar=setting.metavar,
            show_default=setting.default,
            rich_help_panel=setting.panel,
            autocompletion=setting.complete,
        )
        kind = list[str] | None if setting.several else str | None
        ScenarioOptions.__annotations__[name] = Annotated[kind, option]
        setattr(ScenarioOptions, name, None)


_add_settings()
with_scenario_options = with_options(ScenarioOptions, TraceOptions, DrawnOptions)


def sources_of(traces: Sequence[Path], options: dict[str, Any]) -> list[TraceSource]:
    """The traces that were named, and the one that is to be drawn."""
    from ullage.hardware import gpu_list
    from ullage.manager.simulation.sweeps import TraceSource

    found = [TraceSource(str(file), options["trace_format"], options["limit"], options["mix"]) for file in traces]
    if options["generate"] is not None:
        gpus = len(gpu_list(gpu_choices(options["gpus"][0])[0])) if options["gpus"] else 1
        found.append(drawn_source(gpus, options))
    return found


def drawn_source(gpus: int, options: dict[str, Any]) -> TraceSource:
    """A trace that is drawn, by the load of a number of GPUs."""
    from ullage.manager.simulation.sweeps import TraceSource

    if not 0 < options["load"] < math.inf:  # before any simulation; the other options have their limits
        raise InvalidValue(f"--load: needed a number above 0, such as 0.8; found {options['load']:g}")
    drawn = {"jobs": options["generate"], "gpus": gpus}
    drawn |= {name: options[name] for name in get_type_hints(DrawnOptions) if name != "generate"}
    return TraceSource(mix=options["mix"], drawn=tuple(drawn.items()))


def scenarios_of(options: dict[str, Any], seed: int) -> list[Scenario]:
    """Every combination of the values that were typed."""
    from ullage.manager.simulation.asking import variants
    from ullage.manager.simulation.scenario import Scenario

    if not options["gpus"]:
        raise InvalidValue("needed the GPUs, such as --gpus 4xA100-40GB")
    choices = choices_of(options)
    return variants(Scenario(gpus=choices["gpus"][0], seed=seed).but(**settings_of(options)), choices)


def choices_of(options: dict[str, Any]) -> dict[str, list[Any]]:
    """The values of each setting that can have several; in names the policy comes first, the GPUs last."""
    choices: dict[str, list[Any]] = {}
    for name, setting in SETTINGS.items():
        if setting.several and options[name]:
            choices[setting.field] = [setting.read(each.strip()) for text in options[name] for each in text.split(",")]
    if options["gpus"]:
        choices["gpus"] = [text for given in options["gpus"] for text in gpu_choices(given)]
    return choices


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


def settings_of(options: dict[str, Any]) -> dict[str, Any]:
    """The settings that have one value each, as far as they were given."""
    from ullage.manager.simulation.scenario import PARTS_OF_WORLD

    switches = {"foresight": options["use_predictions"], "bookkeeping": options["track_promises"]}
    found: dict[str, Any] = {name: False for name, on in switches.items() if not on}
    for name, setting in SETTINGS.items():
        if not setting.several and options[name] is not None:
            found[setting.field] = setting.read(options[name])
    for part in (options["disable"] or "").split(",") if options["disable"] else []:
        if part not in (*PARTS_OF_WORLD, "all"):
            raise UnknownName("part of the simulated world", part, [*PARTS_OF_WORLD, "all"])
        for name, settings in PARTS_OF_WORLD.items():
            found |= settings if part in (name, "all") else {}
    return found


def labelled(scenarios: list[Scenario], labels: list[str]) -> list[Scenario]:
    """The scenarios with the labels that were given."""
    if labels and len(labels) != len(scenarios):
        names = "; ".join(scenario.name for scenario in scenarios)
        raise InvalidValue(f"needed a --label for each of {len(scenarios)} runs ({names}); found {len(labels)}")
    if not labels:
        return scenarios
    return [scenario.but(label=label) for scenario, label in zip(scenarios, labels, strict=True)]
