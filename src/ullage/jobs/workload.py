"""What an estimator is asked about, whatever the user gave: a model's name, a function, a script or a model summary."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ullage.allocator import AllocatorConfig
from ullage.errors import InvalidValue, UnknownName
from ullage.hardware.networks import check_interconnect
from ullage.jobs.configuration import MODEL_OPTIONS, Configuration
from ullage.jobs.kinds import FUNCTION, MODEL, SCRIPT, SUMMARY, kind_of
from ullage.jobs.parallel import DDP, check_parallel
from ullage.jobs.ranks import TORCHRUN, Rank
from ullage.jobs.sources.hub import is_checkpoint
from ullage.jobs.sources.names import check_model_name

_RUN_OPTIONS = {
    FUNCTION: (
        "steps", "allocator_config", "trace", "world_size", "rank", "ranks", "nodes", "interconnect", "launcher",
    ),
    MODEL: ("steps", "allocator_config", "trace", "world_size", "rank", "nodes", "interconnect", "parallel"),
    SCRIPT: (
        "steps", "allocator_config", "trace_file", "module", "timeout", "show_output", "network", "python", "progress",
        "world_size", "rank", "ranks", "nodes", "interconnect", "launcher",
    ),
}  # fmt: skip
_OPTIONS = {
    MODEL: (*MODEL_OPTIONS, *_RUN_OPTIONS[MODEL]),
    FUNCTION: _RUN_OPTIONS[FUNCTION],
    SCRIPT: ("args", *_RUN_OPTIONS[SCRIPT]),
    SUMMARY: ("batch_size", "steps"),
}
_ADVICE = {
    MODEL: "The path of a script ends in .py",
    FUNCTION: "Wrap the call: ullage.estimate(lambda: train(batch_size=64), gpu=...)",
    SCRIPT: "A script takes its own arguments: args=['--batch-size', '64'], or after -- on the command line",
    SUMMARY: "For a model summary only batch_size counts",
}


@dataclass(frozen=True)
class RunOptions:
    """How a workload runs on a virtual GPU.

    It is followed for at least `steps` optimizer steps; `None` lets it run to its end. `trace` is an empty
    `ullage.estimation.timeline.trace.Trace` that is filled with every request. `world_size`, `rank` and `nodes` are
    what the launcher would say, `interconnect` names the networks by which ranks reach each other. `parallel` says
    how a model by name is spread over them. The others are for scripts.
    """

    steps: int | None = 3
    allocator_config: AllocatorConfig | None = None
    trace: Any = None
    trace_file: str | Path | None = None
    module: bool = False
    timeout: float | None = None
    show_output: bool = False
    network: bool = False
    python: str | Path | None = None
    progress: Callable[[str], None] | None = None
    world_size: int | None = None
    rank: int = 0
    ranks: tuple[int, ...] = ()
    nodes: int = 1
    interconnect: str | None = None
    launcher: str = TORCHRUN
    parallel: str | None = None

    def __post_init__(self) -> None:
        if self.parallel is not None:
            check_parallel(self.parallel)
            if self.world_size is None:
                raise InvalidValue("a way to spread a model needs the number of ranks: --world-size, world_size=")
        if self.interconnect is not None:
            check_interconnect(self.interconnect)

    @property
    def spread(self) -> str | None:
        """How a model by name is spread: as `parallel` says, a whole one on each rank where it says nothing."""
        return None if self.world_size is None else self.parallel or DDP

    @property
    def as_rank(self) -> Rank | None:
        """The rank that the workload runs as; `None` where no launcher starts it."""
        if self.world_size is None and (self.rank or self.ranks or self.nodes > 1):
            raise InvalidValue("a rank and a number of nodes need the number of ranks: --world-size, world_size=")
        if self.world_size is None:
            return None
        return Rank(self.world_size, self.rank, self.nodes, (shlex.split(self.launcher) or [""])[0])


@dataclass(frozen=True)
class Workload:
    """What an estimator is asked about: a configuration, a function, a script, or the text of a model summary.

    `options` are the estimator's own, such as `{"stage": 3}` for deepspeed. `run` says how to run it on a virtual GPU,
    `batch_size` is that of a summary, and `source` is what the user called it.

    >>> Workload(configuration=Configuration(model="mlp:x", widths=[8, 4], batch_size=2)).kind
    'model'
    """

    configuration: Configuration | None = None
    function: Callable[[], Any] | None = None
    script: str | None = None
    args: tuple[str, ...] = ()
    summary_text: str | None = None
    batch_size: int | None = None
    options: dict[str, Any] = field(default_factory=dict)
    run: RunOptions = RunOptions()
    source: str | None = None

    @property
    def kind(self) -> str:
        """The kind of workload: "model", "function", "script" or "summary"."""
        kinds = {
            MODEL: self.configuration,
            FUNCTION: self.function,
            SCRIPT: self.script,
            SUMMARY: self.summary_text,
        }
        given = [kind for kind, value in kinds.items() if value is not None]
        if len(given) != 1:
            found = " and ".join(given) or "none of them"
            raise InvalidValue(f"needed one of a configuration, a function, a script or a summary; found {found}")
        return given[0]

    @classmethod
    def from_row(cls, row: dict[str, Any]) -> Workload:
        """The workload in a line of measurements: a configuration, or `{"script": "train.py", "args": [...]}`.

        `run` in the line holds run options.

        >>> Workload.from_row({"script": "train.py", "args": ["--epochs", "1"]}).args
        ('--epochs', '1')
        """
        run = RunOptions(**row.get("run", {}))
        if "script" in row:
            return cls(script=str(row["script"]), args=tuple(row.get("args", ())), run=run)
        return cls(configuration=Configuration.from_row(row), run=run)


def workload_of(source: Any, options: Mapping[str, Any], estimator: str = "ullage") -> Workload:
    """The workload that a source and the given options of `ullage.estimate` describe.

    Options of the estimator itself are in `set`, with its name before them: `{"deepspeed.stage": 3}`.

    >>> workload_of("torchvision:resnet18", {"batch_size": 8}).configuration.batch_size
    8
    """
    options = dict(options)
    if isinstance(options.get("config"), AllocatorConfig):  # the name of `allocator_config` before it had its own
        options["allocator_config"] = options.pop("config")
    kind = kind_of(source, bool(options.get("module")))
    own, options = _own_options(estimator, options)
    check_options(kind, options)
    run = RunOptions(**{name: options[name] for name in _RUN_OPTIONS.get(kind, ()) if name in options})
    if kind == FUNCTION:
        return Workload(function=source, run=run, options=own)
    name = str(source)
    if kind == SCRIPT:
        words = tuple(str(word) for word in options.get("args") or ())
        return Workload(script=name, args=words, run=run, options=own, source=f"-m {name}" if run.module else name)
    if kind == SUMMARY:
        return Workload(summary_text=_read_summary(Path(name)), batch_size=options.get("batch_size"), source=name)
    model_options = {option: value for option, value in options.items() if option in MODEL_OPTIONS}
    configuration = Configuration.from_options(name, **model_options)
    if configuration.source != "hf" or not is_checkpoint(configuration.name):
        check_model_name(configuration.source, configuration.name)
    return Workload(configuration=configuration, run=run, options=own, source=name)


def check_options(kind: str, options: Mapping[str, Any]) -> None:
    """Refuse options that this kind of source does not have."""
    for name in options:
        if name in _OPTIONS[kind]:
            continue
        others = [other for other, names in _OPTIONS.items() if name in names]
        if others:
            raise InvalidValue(f"{name!r} is an option for a {others[0]}; this is a {kind}. {_ADVICE[kind]}")
        raise UnknownName("option", name, _OPTIONS[kind])


def _own_options(estimator: str, options: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The estimator's own options out of `set`, and all other options."""
    prefix = estimator.partition("+")[0] + "."
    settings = options.get("set") or {}
    own = {key.removeprefix(prefix): value for key, value in settings.items() if key.startswith(prefix)}
    rest = {key: value for key, value in settings.items() if not key.startswith(prefix)}
    others = {key: value for key, value in options.items() if key != "set"}
    return own, others | ({"set": rest} if rest else {})


def _read_summary(file: Path) -> str:
    try:
        return file.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidValue(f"cannot read {file} as a model summary: {error}") from None
