"""The options of `ullage simulate` for its jobs and its scenarios.

Options of a scenario are made from the fields of `Scenario`, its rules and its world. One with several values stands
for several scenarios.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import Field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

from ullage.cli import completion
from ullage.cli.options import option, options_of, with_options
from ullage.errors import InvalidValue, UnknownName
from ullage.hardware import gpu_list
from ullage.manager.placement import RecoveryRules, Rules
from ullage.manager.simulation.scenario import PARTS_OF_WORLD, Scenario, World, variants
from ullage.units import parse_bytes, parse_duration

if TYPE_CHECKING:
    from ullage.manager.simulation.sweeps import TraceSource

JOBS, RULES, WORLD = "Source of the jobs", "Rules of placement", "Simulated world"
_RANGE = re.compile(r"\s*([0-9]+)\.\.([0-9]+)(?::([0-9]+))?\s*[x×*]\s*([^,]+)")
_LOAD = "Demand as a fraction of the first --gpus, without sharing; above 1 the queue grows."
_SPREAD = "Standard deviation of the logarithm (lognormal), or index (pareto)."
_MIX = (
    "Known workloads for a trace without any: mixed (65% light, 27% medium, 8% large) or heavy (83% medium, 17% large)."
)
_GPUS = "GPUs: 4xA100-40GB; 8xH200,4xT4; 4..16xT4 (each number); 8..64:8xH200 (every eighth). Can be repeated."
_PARTS = "Parts to switch off: interference, errors, startup, fragmentation, delay, retry, failures or all."


class DrawnOptions:
    generate: Annotated[
        int | None, option("Generate a trace of N jobs from known workloads.", "N", min=1, panel=JOBS)
    ] = None
    load: Annotated[float, option(_LOAD, "X", panel=JOBS)] = 0.8
    burst: Annotated[float, option("Mean number of jobs per submission.", "X", min=1.0, panel=JOBS)] = 1.0
    daily: Annotated[float, option("Daily swing of arrivals.", "X", min=0.0, max=1.0, panel=JOBS)] = 0.0
    users: Annotated[int, option("Number of users.", "N", min=1, panel=JOBS)] = 10
    tail: Annotated[
        str, option("Distribution of work: lognormal or pareto.", "NAME", panel=JOBS, complete=["lognormal", "pareto"])
    ] = "lognormal"
    spread: Annotated[float, option(_SPREAD, "X", panel=JOBS)] = 1.0


class TraceOptions:
    trace_format: Annotated[
        str | None,
        option("Format of the trace.", "NAME", default="detected", panel=JOBS, complete=completion.trace_formats),
    ] = None
    limit: Annotated[int | None, option("Read only the first N jobs.", "--limit -n N", min=1, panel=JOBS)] = None
    mix: Annotated[str, option(_MIX, "NAME", panel=JOBS)] = "mixed"


class ScenarioOptions:
    """Options of a scenario that are not fields of it."""

    gpus: Annotated[list[str] | None, option(_GPUS, "GPUS", complete=completion.counted_gpus)] = None
    disable: Annotated[str | None, option(_PARTS, "PARTS", panel=WORLD, complete=completion.parts_of_world)] = None


# The order of settings in names of scenarios: the policy first.
_SETTINGS = (
    options_of(Scenario, "policy", "estimator", "sharing")
    | options_of(Rules, panel=RULES)
    | options_of(Scenario, "min_speed", panel=RULES)
    | options_of(RecoveryRules, panel=RULES)
    | options_of(World, panel=WORLD)
)
_FIELDS = {
    spec.metadata.get("option", spec.name).replace("-", "_"): spec
    for kind in (Scenario, Rules, RecoveryRules, World)
    for spec in fields(kind)
    if "help" in spec.metadata
}
with_scenario_options = with_options(ScenarioOptions, _SETTINGS, TraceOptions, DrawnOptions)


def _share(text: str) -> float:
    try:
        return float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        raise InvalidValue(f"a share must be a number such as 0.8 or 80%, got {text!r}") from None


_READ = {"TIME": parse_duration, "SIZE": parse_bytes, "SHARE": _share}


def _value(spec: Field[Any], typed: Any) -> Any:
    if typed in ("off", "none") and "None" in str(spec.type):
        return None
    return _READ.get(spec.metadata.get("metavar", ""), lambda value: value)(typed)


def sources_of(traces: Sequence[Path], options: dict[str, Any]) -> "list[TraceSource]":
    """Return the named traces, and the trace to draw, if any."""
    from ullage.manager.simulation.sweeps import TraceSource

    sources = [TraceSource(str(file), options["trace_format"], options["limit"], options["mix"]) for file in traces]
    if options["generate"] is not None:
        gpus = len(gpu_list(gpu_choices(options["gpus"][0])[0])) if options["gpus"] else 1
        sources.append(drawn_source(gpus, options))
    return sources


def drawn_source(gpus: int, options: dict[str, Any]) -> "TraceSource":
    """Return a trace to draw; its load refers to this number of GPUs."""
    from ullage.manager.simulation.sweeps import TraceSource

    if not 0 < options["load"] < math.inf:  # checked before any simulation; other options have limits
        raise InvalidValue(f"--load must be a number above 0 such as 0.8, got {options['load']:g}")
    drawn = {"jobs": options["generate"], "gpus": gpus}
    drawn |= {name: options[name] for name in get_type_hints(DrawnOptions) if name != "generate"}
    return TraceSource(mix=options["mix"], drawn=tuple(drawn.items()))


def scenarios_of(options: dict[str, Any], seed: int) -> list[Scenario]:
    if not options["gpus"]:
        raise InvalidValue("--gpus must be given; type for example: --gpus 4xA100-40GB")
    choices = choices_of(options)
    return variants(Scenario(gpus=choices["gpus"][0], seed=seed).but(**settings_of(options)), choices)


def choices_of(options: dict[str, Any]) -> dict[str, list[Any]]:
    """Return the values of settings that can have several, in the order of names: policy first, GPUs last."""
    choices: dict[str, list[Any]] = {}
    for name in _SETTINGS:
        spec = _FIELDS[name]
        if spec.metadata.get("several") and options[name]:
            choices[spec.name] = [_value(spec, each.strip()) for text in options[name] for each in text.split(",")]
    if options["gpus"]:
        choices["gpus"] = [text for given in options["gpus"] for text in gpu_choices(given)]
    return choices


def gpu_choices(text: str) -> list[str]:
    """Parse GPUs as typed; a range of numbers stands for several choices.

    >>> gpu_choices("2..4xT4"), gpu_choices("8..24:8xH200"), gpu_choices("2xH200,T4")
    (['2xT4', '3xT4', '4xT4'], ['8xH200', '16xH200', '24xH200'], ['2xH200,T4'])
    """
    match = _RANGE.fullmatch(text)
    if match is None:
        gpu_list(text)
        return [text]
    first, last, step = int(match[1]), int(match[2]), int(match[3] or 1)
    gpu_list(match[4])
    if not 1 <= first <= last or not step:
        raise InvalidValue(f"--gpus must be a range such as 4..16xA100-40GB, got {text!r}")
    return [f"{count}x{match[4].strip()}" for count in range(first, last + 1, step)]


def settings_of(options: dict[str, Any]) -> dict[str, Any]:
    """Return the settings with a single value that the user typed."""
    given = {spec: options[name] for name, spec in _FIELDS.items() if not spec.metadata.get("several")}
    values = {spec.name: _value(spec, typed) for spec, typed in given.items() if typed is not None}
    for part in (options["disable"] or "").split(",") if options["disable"] else []:
        if part not in (*PARTS_OF_WORLD, "all"):
            raise UnknownName("part of the simulated world", part, [*PARTS_OF_WORLD, "all"])
        for name, settings in PARTS_OF_WORLD.items():
            values |= settings if part in (name, "all") else {}
    return values


def labelled(scenarios: list[Scenario], labels: list[str]) -> list[Scenario]:
    if labels and len(labels) != len(scenarios):
        names = "; ".join(scenario.name for scenario in scenarios)
        raise InvalidValue(f"--label must be given once per run ({len(scenarios)}: {names}), got {len(labels)}")
    if not labels:
        return scenarios
    return [scenario.but(label=label) for scenario, label in zip(scenarios, labels, strict=True)]
