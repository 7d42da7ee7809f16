"""Options that several commands share, and the conversion of a command line to a request.

Options for a job are made from the fields of `Model`, `Script`, `Ranks` and `Training`, with their help.
"""

import inspect
import json
import os
import warnings
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args, get_type_hints

import typer

from ullage.cli import completion
from ullage.cli.completion import Completer
from ullage.errors import InvalidValue
from ullage.hardware import default_gpu_note
from ullage.jobs.job import JobRequest, Ranks, Script, request_of
from ullage.jobs.kinds import SCRIPT, check_script, kind_of
from ullage.jobs.model import Model, parse_shape
from ullage.jobs.ranks import LAUNCHERS, NOT_FOLLOWED
from ullage.performance.cost import Training
from ullage.sandbox.interpreter import active_environment
from ullage.units import parse_duration
from ullage.virtual import releases

if TYPE_CHECKING:
    from ullage.estimation.jobs.command import ScriptCommand

MODEL, RANKS, LENGTH = (
    "Model (if SOURCE is a model's name)",
    "Many GPUs",
    "Training time and cost",
)
ALL = "all"  # stands for all GPUs, or all estimators
_DEFAULT = "local if there is one, else H200"
_GPU = "GPU: a name from 'ullage gpus', a TOML file, or 'local' for this machine's GPU."


def option(
    help: str,
    *spelling: str,
    default: str | None = None,
    panel: str | None = None,
    complete: Completer | list[str] | None = None,
    **shown: Any,
) -> Any:
    """Make an option for typer from its help and its spelling, such as "--limit -n N".

    Without names, the spelling is that of the parameter. `default` describes the default in words. `complete` is a
    completer for shells, or a list of the values.
    """
    words = " ".join(spelling).split()
    names = [word for word in words if word.startswith("-")]
    shown.setdefault("metavar", " ".join(word for word in words if word not in names) or None)
    if default is not None:
        shown["show_default"] = default
    if isinstance(complete, list):
        complete = completion.completer(complete)
    return typer.Option(*names, help=help, rich_help_panel=panel, autocompletion=complete, **shown)


def argument(help: str, metavar: str, complete: Completer | None = None, default: str | bool = False) -> Any:
    return typer.Argument(help=help, metavar=metavar, show_default=default, autocompletion=complete)


def command_group(help: str) -> typer.Typer:
    return typer.Typer(help=help, no_args_is_help=True, rich_markup_mode="rich")


Json = Annotated[bool, option("Print JSON.", "--json")]
Gpu = Annotated[str | None, option(_GPU, "--gpu -g NAME", default=_DEFAULT, complete=completion.gpus)]
Gpus = Annotated[
    str | None,
    option(
        _GPU + " Several (with commas) or 'all' give a table.",
        "--gpu -g NAME",
        default=_DEFAULT,
        complete=completion.several_gpus,
    ),
]
MeasuredGpu = Annotated[
    str | None,
    option(
        "GPU that the runs were measured on.",
        "--gpu -g NAME",
        default="H200, A100-40GB for .csv",
        complete=completion.gpus,
    ),
]
Source = Annotated[str, argument("Model name, or path of a script.", "SOURCE", complete=completion.sources)]
ScriptArguments = Annotated[list[str] | None, argument("Script arguments, after --.", "ARGS")]
MOMENT_FORMS = "2026-11-01, 2026-11-01T08:00, or how long ago (7d, 12h)"
Seed = Annotated[int, option("Random seed.", "N", min=0)]
Pytorch = Annotated[
    str | None,
    option(
        "PyTorch release on the GPU machine, such as 2.11; it changes kernels and workspaces.",
        "--pytorch RELEASE",
        envvar=releases.VARIABLE,
        show_envvar=False,
        complete=completion.releases,
        default="the installed one",
    ),
]
Steps = Annotated[int, option("Minimum number of optimizer steps to follow.", "N")]
Settings = Annotated[
    list[str] | None,
    option(
        "Another field of ullage.Model (attention=flash), config value (n_layer=12) or argument. Can be repeated.",
        "--set KEY=VALUE",
        panel=MODEL,
    ),
]
Options = dict[str, tuple[Any, Any]]  # annotation and default by parameter name

_COMPLETERS = {
    "optimizer": completion.optimizers,
    "precision": completion.precisions,
    "quantize": completion.quantizations,
    "parallel": completion.parallel,
    "interconnect": completion.interconnects,
    "python": completion.pythons,
    "policy": completion.several_policies,
    "estimator": completion.promising_estimators,
    "sharing": completion.simulated_sharing,
    "unknown": completion.completer(["exclusive", "floor"]),
}
_WORDS = ("TIME", "SIZE", "SHARE")  # metavars of numbers with a unit


def options_of(made: type, *names: str, panel: str | None = None) -> Options:
    """Return the options for fields of a dataclass, by default for all fields with a help.

    >>> list(options_of(Ranks, "size", "nodes"))
    ['world_size', 'nodes']
    """
    hints = get_type_hints(made)
    options: Options = {}
    for spec in fields(made):
        if "help" not in spec.metadata or names and spec.name not in names:
            continue
        about = spec.metadata
        long = about.get("option", spec.name.replace("_", "-"))
        words = [f"--{long}/--no-{long}" if spec.default is True else f"--{long}"]
        words += [f"-{letter}" for letter in about.get("letter", "")]
        kinds = {hints[spec.name], *get_args(hints[spec.name])}
        kind: Any = bool
        shown: dict[str, Any] = {"panel": panel, "complete": _COMPLETERS.get(spec.name)}
        if bool in kinds:
            default, taken = spec.default, option(about["help"], *words, **shown)
        else:
            number = about["metavar"] not in _WORDS and next((each for each in (int, float) if each in kinds), None)
            kind, default = number or str, None
            kind = (list[kind] if about.get("several") else kind) | None
            default_words = about.get("default") or (None if spec.default in (None, ()) else str(spec.default))
            several = " Several with commas." if about.get("several") else ""
            shown |= {"metavar": about["metavar"], "default": default_words, "min": about.get("least")}
            taken = option(about["help"] + several, *words, **shown)
        options[long.replace("-", "_")] = Annotated[kind, taken], default
    return options


# The fields of a model that have their own options; --set accepts the others.
_MODEL_FIELDS = (
    "batch_size",
    "input_shape",
    "sequence_length",
    "optimizer",
    "precision",
    "checkpointing",
    "lora",
    "quantize",
    "inference",
)
MODEL_OPTIONS = options_of(Model, *_MODEL_FIELDS, panel=MODEL) | {"set": (Settings, None)}
SCRIPT_OPTIONS = options_of(Script, "module", "network", "python") | {"pytorch": (Pytorch, None)}
FOLLOW_OPTIONS = SCRIPT_OPTIONS | {"steps": (Steps, 3)} | options_of(Script, "timeout")
RANK_OPTIONS = options_of(Ranks, "size", "nodes", "follow", panel=RANKS)
NETWORK_OPTIONS = options_of(Ranks, "interconnect", panel=RANKS)
SPREAD_OPTIONS = options_of(Ranks, "parallel", panel=RANKS)
TRAINING_OPTIONS = options_of(Training, panel=LENGTH)
Network, Timeout = SCRIPT_OPTIONS["network"][0], FOLLOW_OPTIONS["timeout"][0]


def with_options(*shared: Options | type) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator that gives a command these options, or those of classes, as keyword arguments."""

    def added(command: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(command, eval_str=True)
        own = [p for p in signature.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
        others = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind)
            for options in map(_options, shared)
            for name, (kind, default) in options.items()
        ]
        command.__signature__ = signature.replace(parameters=[*own, *others])  # type: ignore[attr-defined]
        return command

    return added


def _options(shared: Options | type) -> Options:
    if isinstance(shared, dict):
        return shared
    hints = get_type_hints(shared, include_extras=True)
    return {name: (kind, getattr(shared, name)) for name, kind in hints.items()}


def given(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that the user gave, by name, for `request_of`."""
    typed = {name: value for name, value in values.items() if value is not None and value is not False and value != []}
    return {name: _READ[name](value) if name in _READ else value for name, value in typed.items()}


def _shape(text: str) -> list[int]:
    return parse_shape(text, "--input-shape")


def _numbers(text: str) -> tuple[int, ...]:
    words = text.split(",")
    if not all(word.strip().isdecimal() for word in words):
        raise InvalidValue(f"--follow-ranks must be numbers separated by commas such as 0,7, got {text!r}")
    return tuple(dict.fromkeys(map(int, words)))


def _settings(texts: list[str]) -> dict[str, Any]:
    settings = dict(parse_setting(text) for text in texts)
    lists = {name for name in ("freeze", "lora_targets") if isinstance(settings.get(name), str)}
    settings |= {name: [word.strip() for word in settings[name].split(",") if word.strip()] for name in lists}
    if isinstance(settings.get("input_shape"), str):
        settings["input_shape"] = _shape(settings["input_shape"])
    return settings


_READ: dict[str, Callable[[Any], Any]] = {
    "input_shape": _shape,
    "follow_ranks": _numbers,
    "set": _settings,
    "timeout": parse_duration,
}


def parse_interval(text: str) -> float:
    seconds = parse_duration(text)
    if not 0.1 <= seconds <= 3600:
        raise InvalidValue(f"--interval must be from 0.1s to 1h, got {text!r}")
    return seconds


def parse_setting(text: str) -> tuple[str, Any]:
    """Split a setting into its key and its value: JSON, or else a word.

    >>> parse_setting("layers=[2, 2]"), parse_setting("hidden_act=gelu")
    (('layers', [2, 2]), ('hidden_act', 'gelu'))
    """
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise InvalidValue(f"--set must be KEY=VALUE such as n_layer=12, got {text!r}")
    words = {"True": True, "False": False, "None": None}
    try:
        return key.strip(), words[value] if value in words else json.loads(value)
    except json.JSONDecodeError:
        return key.strip(), value


def request_from(
    source: str, args: list[str] | None = None, *, estimator: str = "ullage", steps: int = 3, **options: Any
) -> JobRequest:
    """Return the request of a command line; refuse options that its kind of source does not have."""
    if pytorch := options.pop("pytorch", None):  # children read the variable, so the release holds for all
        os.environ[releases.VARIABLE] = releases.named(pytorch).name
    from ullage.estimation.estimators.registry import check_name
    from ullage.estimation.jobs.command import EACH_GPU

    check_name(estimator)
    chosen = given(options)
    by = _launched(source, args)
    if by is not None:
        if "world_size" not in chosen:
            chosen |= {"world_size": by.world_size} if by.world_size else {}
            chosen |= {"nodes": by.nodes} if by.nodes > 1 else {}
            if by.world_size == EACH_GPU and by.launched_by[:1] != ("accelerate",):  # it has its own config
                raise InvalidValue(f"{source} does not say how many ranks; type --world-size 8 before {source}")
        source, args = by.source, by.args
        chosen |= {"module": True} if by.module else {}
        chosen |= {"launcher": by.launcher_text} if by.launcher_text else {}
    if steps < 1:
        raise InvalidValue(f"--steps must be at least 1, got {steps}")
    kind = kind_of(source, chosen.get("module", False))
    if kind == SCRIPT:
        if not chosen.get("module"):
            check_script(source)
        if "python" not in chosen and (active := active_environment()):
            chosen["python"] = active
    elif args:
        raise InvalidValue(f"{' '.join(args)!r}: arguments after -- are for scripts; {source} is a model's name")
    else:
        warnings.simplefilter("ignore")  # torchvision, timm and transformers warn while a model is built
        os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    return request_of(source, {"steps": steps, **chosen, **({"args": args} if args else {})}, estimator)


def _launched(source: str, args: list[str] | None) -> "ScriptCommand | None":
    if Path(source).name in NOT_FOLLOWED:
        raise InvalidValue(f"Ullage does not follow {source}; type the script alone, with --world-size")
    if Path(source).name.removesuffix("3") not in (*LAUNCHERS, "python"):
        return None
    from ullage.estimation.jobs.launchers import launched

    inner = launched([source, *(args or [])])
    script = inner.script
    if inner.refusal is not None:
        raise InvalidValue(f"{source}: {inner.refusal}")
    if inner.folder is not None:
        raise InvalidValue(f"{source}: it runs in another folder; type cd {inner.folder}, and leave that option out")
    if script is None:
        raise InvalidValue(f"{source} must start a script such as train.py, got {' '.join(args or [])!r}")
    os.environ.update(inner.variables)
    return script


def default_gpu_hint(gpu: str | None, taken: str) -> str:
    """Return a hint that names the default GPU that was used; empty if the user chose one."""
    return "" if gpu is not None else default_gpu_note(taken)
