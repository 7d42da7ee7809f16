"""What `ullage simulate` and `ullage sweep` are asked: options that say which jobs come and what they meet.

An option that takes several values stands for several scenarios.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
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

    load: Annotated[
        float, typer.Option(help="The share of the GPUs (of the first --gpus) that the jobs need if none shares; above "
                            "1 the queue grows.", metavar="X", rich_help_panel=DRAWN)
    ] = 0.8  # fmt: skip
    burst: Annotated[
        float, typer.Option(help="Jobs that a user submits at once, on average.", metavar="X", min=1.0,
                            rich_help_panel=DRAWN)
    ] = 1.0  # fmt: skip
    daily: Annotated[
        float, typer.Option(help="How much arrivals swing over a day, from 0 to 1.", metavar="X", min=0.0, max=1.0,
                            rich_help_panel=DRAWN)
    ] = 0.0  # fmt: skip
    users: Annotated[
        int, typer.Option(help="How many users submit jobs.", metavar="N", min=1, rich_help_panel=DRAWN)
    ] = 10  # fmt: skip
    tail: Annotated[
        str, typer.Option(help="How the work of jobs spreads: lognormal or pareto.", metavar="NAME",
                          rich_help_panel=DRAWN, autocompletion=lambda: ["lognormal", "pareto"])
    ] = "lognormal"  # fmt: skip
    spread: Annotated[
        float, typer.Option(help="Of lognormal the standard deviation of the logarithm, of pareto the index.",
                            metavar="X", rich_help_panel=DRAWN)
    ] = 1.0  # fmt: skip


class TraceOptions:
    """The options that say how a trace is read."""

    trace_format: Annotated[
        str | None, typer.Option(help="The form of the trace.", metavar="NAME",
                                 show_default="recognised by how the file begins",
                                 autocompletion=completion.trace_formats)
    ] = None  # fmt: skip
    limit: Annotated[
        int | None, typer.Option("--limit", "-n", help="Take only so many jobs of a trace, those that come first.",
                                 metavar="N", min=1)
    ] = None  # fmt: skip
    mix: Annotated[
        str, typer.Option(help="For traces that do not say what their jobs train: the mix of known workloads that "
                          "they are given.", metavar="NAME")
    ] = "mixed"  # fmt: skip


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
                                       "Or a function of your own in a Python file. Several with commas.",
                                       metavar="NAME|FILE.py:FUNCTION", show_default="ullage",
                                       autocompletion=completion.several_policies)
    ] = None  # fmt: skip
    estimator: Annotated[
        list[str] | None, typer.Option("--estimator", "-e", help="Whose estimates jobs are promised: ullage, another "
                                       "one from 'ullage lab compare', oracle for true memory, or none. Several with "
                                       "commas.",
                                       metavar="NAME", show_default="ullage",
                                       autocompletion=completion.promising_estimators)
    ] = None  # fmt: skip
    sharing: Annotated[
        list[str] | None, typer.Option(help="How jobs share a GPU: mps, timeslice, mig (with the instances: "
                                       "mig:2g.10gb) or off. Several with commas.", metavar="WAY", show_default="mps",
                                       autocompletion=completion.simulated_sharing)
    ] = None  # fmt: skip
    generate: Annotated[
        int | None, typer.Option(help="Draw a trace of so many known workloads by the seed.", metavar="N", min=1,
                                 rich_help_panel=DRAWN)
    ] = None  # fmt: skip
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
                                       "with commas.", metavar="SHARE", rich_help_panel=RULES,
                                       show_default="what serves all together")
    ] = None  # fmt: skip
    unknown: Annotated[
        str | None, typer.Option(help="A job of unknown memory gets a GPU to itself (exclusive) or one with "
                                 "--free-floor free (floor).", metavar="exclusive|floor", rich_help_panel=RULES,
                                 show_default="exclusive", autocompletion=lambda: ["exclusive", "floor"])
    ] = None  # fmt: skip
    foresight: Annotated[
        bool, typer.Option("--foresight/--no-foresight", help="Whether placement knows what jobs will do on a GPU, or "
                           "only what the monitor sees.", rich_help_panel=RULES)
    ] = True  # fmt: skip
    at_a_time: Annotated[
        int | None, typer.Option(help="A pass looks at so many jobs, from the head of the queue.", metavar="N", min=1,
                                 rich_help_panel=RULES, show_default="all of them")
    ] = None  # fmt: skip
    bookkeeping: Annotated[
        bool, typer.Option("--bookkeeping/--no-bookkeeping", help="Whether placement remembers what it promised, or "
                           "goes by what the monitor saw last.", rich_help_panel=RULES)
    ] = True  # fmt: skip
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
                                   "the logarithm of what jobs lose.", metavar="X", min=0.0, rich_help_panel=WORLD,
                                   show_default="0.4 under MPS, 0.2 time-sliced")
    ] = None  # fmt: skip
    startup: Annotated[
        str | None, typer.Option(help="From the start of a job until it takes its memory.", metavar="TIME",
                                 rich_help_panel=WORLD, show_default="10s")
    ] = None  # fmt: skip
    fragmentation: Annotated[
        str | None, typer.Option(help="What no job can have of a GPU although it is free.", metavar="SIZE",
                                 rich_help_panel=WORLD, show_default="0B")
    ] = None  # fmt: skip
    monitor_delay: Annotated[
        str | None, typer.Option(help="How old the readings are that a placement sees.", metavar="TIME",
                                 rich_help_panel=WORLD, show_default="1s")
    ] = None  # fmt: skip
    retry: Annotated[
        str | None, typer.Option(help="From a failure until the job stands in the queue again.", metavar="TIME",
                                 rich_help_panel=WORLD, show_default="0s")
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


with_scenario_options = with_options(ScenarioOptions, TraceOptions, DrawnOptions)


def sources_of(traces: Sequence[Path], options: dict[str, Any]) -> list[TraceSource]:
    """The traces that were named, and the one that is to be drawn."""
    from ullage.hardware import gpu_list
    from ullage.manager.simulation.sweeps import TraceSource

    found = [TraceSource(str(file), options["trace_format"], options["limit"], options["mix"]) for file in traces]
    if options["generate"] is not None:
        gpus = len(gpu_list(gpu_choices(options["gpus"][0])[0])) if options["gpus"] else 1
        found.append(drawn_source(options["generate"], gpus, options))
    return found


def drawn_source(jobs: int, gpus: int, options: dict[str, Any]) -> TraceSource:
    """A trace that is drawn, by the load of so many GPUs."""
    from ullage.manager.simulation.sweeps import TraceSource

    if not 0 < options["load"] < math.inf:  # before a sweep begins; the other options have their limits
        raise InvalidValue(f"--load: needed a number above 0, such as 0.8; found {options['load']:g}")
    drawn = {"jobs": jobs, "gpus": gpus, **{name: options[name] for name in get_type_hints(DrawnOptions)}}
    return TraceSource(mix=options["mix"], drawn=tuple(drawn.items()))


def scenarios_of(options: dict[str, Any], seed: int) -> list[Scenario]:
    """Every combination of what was typed."""
    from ullage.manager.simulation.asking import variants
    from ullage.manager.simulation.scenario import Scenario

    if not options["gpus"]:
        raise InvalidValue("needed the GPUs, such as --gpus 4xA100-40GB")
    choices = choices_of(options)
    return variants(Scenario(gpus=choices["gpus"][0], seed=seed).but(**settings_of(options)), choices)


def choices_of(options: dict[str, Any]) -> dict[str, list[Any]]:
    """The values of each setting that can have several; in names the policy comes first, the GPUs last."""
    choices: dict[str, list[Any]] = {}
    for name, read in _READERS.items():
        given = [text.strip() for values in options[name] or [] for text in values.split(",")]
        if given:
            choices[name] = [read(text) for text in given]
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


def settings_of(options: dict[str, Any]) -> dict[str, Any]:
    """The settings that have one value each, where they were given."""
    from ullage.manager.simulation.scenario import PARTS_OF_WORLD

    readers: dict[str, tuple[str, Callable[[Any], Any]]] = {
        "unknown": ("unknown", str), "exclusive_after": ("exclusive_after", int),
        "at_a_time": ("at_a_time", int),
        "interference_error": ("interference_error", float), "startup": ("startup_s", parse_duration),
        "fragmentation": ("fragmentation", parse_bytes), "monitor_delay": ("monitor_delay_s", parse_duration),
        "retry": ("retry_s", parse_duration), "node_mtbf": ("node_mtbf_s", parse_duration),
        "node_gpus": ("node_gpus", int), "node_repair": ("node_repair_s", parse_duration),
    }  # fmt: skip
    found: dict[str, Any] = {name: False for name in ("foresight", "bookkeeping") if not options[name]}
    found |= {name: read(options[option]) for option, (name, read) in readers.items() if options[option] is not None}
    for part in (options["without"] or "").split(",") if options["without"] else []:
        if part not in (*PARTS_OF_WORLD, "all"):
            raise UnknownName("part of the simulated world", part, [*PARTS_OF_WORLD, "all"])
        for name, settings in PARTS_OF_WORLD.items():
            found |= settings if part in (name, "all") else {}
    return found


def labelled(scenarios: list[Scenario], labels: list[str]) -> list[Scenario]:
    """The scenarios with names of their own, where those were given."""
    if labels and len(labels) != len(scenarios):
        names = "; ".join(scenario.name for scenario in scenarios)
        raise InvalidValue(f"needed a --label for each of {len(scenarios)} runs ({names}); found {len(labels)}")
    if not labels:
        return scenarios
    return [scenario.but(label=label) for scenario, label in zip(scenarios, labels, strict=True)]
