"""A job and how to estimate it: a model by name, a script, a function, or the summary of a model.

`Model` (in `model.py`), `Script` and `Ranks` describe the job; `JobRequest` adds how to follow it.
"""

import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from ullage.allocator import AllocatorConfig
from ullage.errors import InvalidValue, UnknownName
from ullage.fields import described
from ullage.jobs.kinds import FUNCTION, MODEL, SCRIPT, SUMMARY, kind_of
from ullage.jobs.model import Model
from ullage.jobs.parallel import DDP, check_parallel
from ullage.jobs.ranks import TORCHRUN, Rank
from ullage.jobs.sources.names import check_model_name
from ullage.performance.networks import check_interconnect

DEFAULT_TIMEOUT = 300.0  # seconds


@dataclass(frozen=True)
class Script:
    """An unchanged training script with its arguments.

    With `module`, `path` is the name of a module, as in `python -m`. `python` is another Python to run it with: a path,
    the folder of an environment, or the name of a conda environment. It needs PyTorch but not Ullage.

    >>> Script("train.py", ["--batch-size", 64], timeout=60.0).args
    ('--batch-size', '64')
    """

    path: str | Path
    args: Sequence[str] = ()
    _: KW_ONLY
    module: bool = described(False, "SOURCE is a module, as in python -m.", letter="m")
    python: str | Path | None = described(
        None,
        "Python for a script, with PyTorch but without Ullage: a path, an environment's folder or a conda name.",
        metavar="PATH",
        default="the active environment, or Ullage's own",
    )
    timeout: float = described(
        DEFAULT_TIMEOUT, "Give up on a script after this long, such as 90s or 10m.", metavar="TIME", default="5m"
    )
    network: bool = described(False, "Let a script use the network.")
    show_output: bool = described(False, "Show the script's output.")

    def __post_init__(self) -> None:
        object.__setattr__(self, "path", str(self.path))
        object.__setattr__(self, "args", tuple(map(str, self.args)))


@dataclass(frozen=True)
class Ranks:
    """The ranks of a job, each with one GPU. The job runs once, as one of them.

    `follow` lists the ranks to run as; the estimate is that of the rank that needs most, and `Estimate.ranks` has the
    figures of each. `launcher` is `"torchrun"`, `"mpirun"` or `"srun"`, whose variables the job gets, or `"accelerate
    launch"` with options that accelerate itself reads, perhaps with the `size`.

    >>> Ranks(16, nodes=2, follow=[0, 7, 7]).follow
    (0, 7)
    """

    size: int | None = described(
        None,
        "Run as one rank of N, each with a GPU.",
        metavar="N",
        option="world-size",
        default="set by the launcher, if any",
    )
    nodes: int = described(1, "Number of machines.", metavar="N")
    follow: Sequence[int] = described(
        (),
        "Ranks to follow, such as 0,7. The result is the largest of their estimates.",
        metavar="N,N",
        option="follow-ranks",
        default="0, and the last stage of a pipeline",
    )
    parallel: str | None = described(
        None, "Strategy for a model by name: ddp, fsdp2, tp or pp.", metavar="NAME", default="ddp"
    )
    interconnect: str | None = described(
        None,
        "Network inside a machine (nvlink1 to 5, pcie3 to 5), between machines (ib-hdr, eth-100, 4xib-ndr for four "
        "adapters), or both.",
        metavar="NAME[,NAME]",
        default="as machines with this GPU are sold",
    )
    launcher: str = described(TORCHRUN, "The program that starts the ranks.", metavar="COMMAND")

    def __post_init__(self) -> None:
        object.__setattr__(self, "follow", tuple(dict.fromkeys(self.follow)))
        if self.parallel is not None:
            check_parallel(self.parallel)
            if self.size is None:
                raise InvalidValue("a way to spread a model needs the number of ranks: --world-size, Ranks(size=...)")
        if self.interconnect is not None:
            check_interconnect(self.interconnect)

    @property
    def spread(self) -> str | None:
        """Return the strategy of a model by name: `parallel`, or else a whole model on each rank."""
        return None if self.size is None else self.parallel or DDP

    @property
    def first(self) -> Rank | None:
        """Return the first rank to run as; `None` if no launcher starts the job."""
        if self.size is None and (self.follow or self.nodes > 1):
            raise InvalidValue("a rank and a number of nodes need the number of ranks: --world-size, Ranks(size=...)")
        if self.size is None:
            return None
        number = self.follow[0] if self.follow else 0
        return Rank(self.size, number, self.nodes, (shlex.split(self.launcher) or [""])[0])


@dataclass(frozen=True)
class Summary:
    """The text of a model summary (torchsummary, torchinfo), for the estimators that read one. A text without output
    shapes needs the `sequence_length`, which may be in the file's name, as in `bert_bs=32_sl=512.txt`."""

    file: str
    text: str
    batch_size: int | None = None
    sequence_length: int | None = None

    @classmethod
    def read(cls, file: str | Path) -> "Summary":
        sizes = dict(_SIZES.findall(Path(file).name))
        batch_size, sequence_length = (int(sizes[name]) if name in sizes else None for name in ("bs", "sl"))
        try:
            with open(file, encoding="utf-8") as source:
                text = source.read(_LARGEST_SUMMARY + 1)
        except (OSError, ValueError) as error:
            raise InvalidValue(f"cannot read {file} as a model summary: {error}") from None
        if len(text) > _LARGEST_SUMMARY:
            raise InvalidValue(f"a model summary must have at most {_LARGEST_SUMMARY >> 20} MiB, got more in {file}")
        return cls(str(file), text, batch_size, sequence_length)


_LARGEST_SUMMARY = 64 << 20  # characters
_SIZES = re.compile(r"(?<![^_])(bs|sl)[:=](\d{1,18})(?!\d)")
Function = Callable[[], Any]
Job = Model | Script | Summary | Function

_ADVICE = {
    MODEL: "The path of a script ends in .py",
    FUNCTION: "Wrap the call: ullage.estimate(lambda: train(batch_size=64), gpu=...)",
    SCRIPT: "A script takes its own arguments: args=['--batch-size', '64'], or after -- on the command line",
    SUMMARY: "For a model summary only batch_size and sequence_length count",
}


@dataclass(frozen=True)
class JobRequest:
    """A job and how an estimator runs it.

    The estimator follows it for at least `steps` optimizer steps; `None` runs it to its end. `trace` is an empty
    `ullage.estimation.timeline.trace.Trace`, which receives every allocator request. `progress` is called with a
    description of long operations. `options` are the estimator's own, such as `{"stage": 3}` for deepspeed.
    """

    job: Job
    _: KW_ONLY
    ranks: Ranks = Ranks()
    steps: int | None = 3
    allocator: AllocatorConfig | None = None
    trace: Any = None
    progress: Callable[[str], None] | None = None
    estimator: str = "ullage"
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.ranks.parallel is not None and self.model is None:
            raise _wrong_kind("parallel", MODEL, self.kind)

    @property
    def kind(self) -> str:
        """Return the kind of job: "model", "function", "script" or "summary"."""
        kinds = {Model: MODEL, Script: SCRIPT, Summary: SUMMARY}
        return next((kind for made, kind in kinds.items() if isinstance(self.job, made)), FUNCTION)

    @property
    def model(self) -> Model | None:
        return self.job if isinstance(self.job, Model) else None

    @property
    def script(self) -> Script | None:
        return self.job if isinstance(self.job, Script) else None

    @property
    def summary(self) -> Summary | None:
        return self.job if isinstance(self.job, Summary) else None

    @property
    def function(self) -> Function | None:
        return None if isinstance(self.job, Model | Script | Summary) else self.job

    @property
    def source(self) -> str | None:
        """Return the user's name for the job; `None` for a function."""
        match self.job:
            case Model(name=name):
                return name
            case Script(path=path, module=module):
                return f"-m {path}" if module else str(path)
            case Summary(file=file):
                return file
        return None

    @property
    def is_ullage(self) -> bool:
        return self.estimator == "ullage"

    def as_rank(self, number: int) -> "JobRequest":
        return replace(self, ranks=replace(self.ranks, follow=(number,)))

    @classmethod
    def from_row(cls, row: Mapping[str, Any]) -> "JobRequest":
        """Read the job in a line of measurements: a model, or `{"script": "train.py", "args": [...], "run": {...}}`.

        `run` has more values, by the names of `request_of`.
        """
        if "script" not in row:
            return cls(Model.from_row(row))
        values = {**row.get("run", {}), "args": row.get("args", ())}
        return request_of(Script(str(row["script"])), values)

    def to_row(self) -> dict[str, Any]:
        """Return the job as plain values, for `from_row` in another process."""
        if self.model is not None:
            return self.model.to_row()
        if self.script is None:
            raise InvalidValue(f"the job must be a model's name or a script, got a {self.kind}")
        script = self.script
        run = {name: value for name, value in vars(script).items() if name not in ("path", "args", "show_output")}
        run |= {name: getattr(self.ranks, field) for name, field in _OF_RANKS.items()}
        run = {name: value for name, value in run.items() if value is not None and name != "parallel"}
        return {
            "script": script.path if script.module else str(Path(script.path).resolve()),
            "args": list(script.args),
            "run": {**run, "steps": self.steps},
        }


_OF_RANKS = {spec.metadata.get("option", spec.name).replace("-", "_"): spec.name for spec in fields(Ranks)}
_OF_KIND: dict[str, list[str]] = {
    MODEL: [spec.name for spec in fields(Model)[1:]],
    SCRIPT: [spec.name for spec in fields(Script)[1:]],
    SUMMARY: [spec.name for spec in fields(Summary)[2:]],
    FUNCTION: [],
}
_OF_ALL = ["steps", "allocator", "trace", "progress"]
OPTIONS = list(dict.fromkeys([*_OF_KIND[MODEL], *_OF_KIND[SCRIPT], *_OF_RANKS, *_OF_ALL]))


def request_of(source: Any, options: Mapping[str, Any] | None = None, estimator: str = "ullage") -> JobRequest:
    """Return the request for a source with options by name, as on the command line and in the HTTP API.

    The names are the fields of `Model`, `Script` and `Ranks` (its `size` is `world_size`, its `follow` is
    `follow_ranks`) and of the request. `set` has more fields of the model, the estimator's own options prefixed with
    its name (`{"deepspeed.stage": 3}`), and settings of the model.

    >>> request_of("torchvision:resnet18", {"batch_size": 8, "set": {"num_classes": 10}}).model.num_classes
    10
    """
    given = dict(options or {})
    job = job_of(source, bool(given.get("module")))
    kind = JobRequest(job).kind
    own: dict[str, Any] = {}
    settings: dict[str, Any] = {}
    prefix = estimator.partition("+")[0] + "."
    for name, value in given.pop("set", {}).items():
        if name.startswith(prefix):
            own[name.removeprefix(prefix)] = value
        elif name in _OF_KIND[MODEL] and kind != FUNCTION:
            given.setdefault(name, value)
        else:
            settings[name] = value
    if settings:
        given["settings"] = {**given.get("settings", {}), **settings}
    for name in given:
        _check_option(name, kind)
    of_ranks = {field: given.pop(name) for name, field in _OF_RANKS.items() if name in given}
    of_all = {name: given.pop(name) for name in _OF_ALL if name in given}
    if not isinstance(job, Model | Script | Summary):
        return JobRequest(job, ranks=Ranks(**of_ranks), estimator=estimator, options=own, **of_all)
    made = with_saved_types(replace(job, **given))
    return JobRequest(made, ranks=Ranks(**of_ranks), estimator=estimator, options=own, **of_all)


def job_of(source: Any, module: bool = False, args: Sequence[str] = (), **sizes: int | None) -> Job:
    """Return the job for a name, a path or a function; a job stays as it is.

    >>> job_of("train.py", args=["--lr", "0.1"]).args
    ('--lr', '0.1')
    """
    job = source if isinstance(source, Model | Script | Summary) else _named(source, module)
    kind = JobRequest(job).kind
    if args:
        if not isinstance(job, Script):
            raise _wrong_kind("args", SCRIPT, kind)
        job = replace(job, args=args)
    given = {name: size for name, size in sizes.items() if size is not None}
    if given and not isinstance(job, Model | Summary):
        raise _wrong_kind(next(iter(given)), MODEL, kind)
    return replace(job, **given) if given else job  # type: ignore[type-var]


def _named(source: Any, module: bool) -> Job:
    kind = kind_of(source, module)
    if kind == FUNCTION:
        function: Function = source
        return function
    name = str(source)
    if kind == MODEL:
        return Model(name)
    return Summary.read(name) if kind == SUMMARY else Script(name, module=module)


def with_saved_types(job: Job) -> Job:
    """Return the job with the types of its saved weights; refuse an unknown model name."""
    if not isinstance(job, Model):
        return job
    if not job.is_saved:
        check_model_name(job.source, job.short_name)
    return job.as_saved()


def _check_option(name: str, kind: str) -> None:
    """Refuse an option that this kind of job does not have."""
    if name in _OF_KIND[kind] or name in _OF_ALL and kind != SUMMARY or name == "steps":
        return
    if name in _OF_RANKS and kind != SUMMARY and (name != "parallel" or kind == MODEL):
        return
    others = [other for other, names in _OF_KIND.items() if name in names]
    if name == "parallel":
        others = [MODEL]
    if not others:
        raise UnknownName("option", name, OPTIONS)
    raise _wrong_kind(name, others[0], kind)


def _wrong_kind(name: str, other: str, kind: str) -> InvalidValue:
    return InvalidValue(f"{name!r} is an option for a {other}; this is a {kind}. {_ADVICE[kind]}")
