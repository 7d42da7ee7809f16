"""Options that several commands share, and what a command line asks to estimate.

An option has the name of the argument of `ullage.estimate` that it stands for.
"""

from __future__ import annotations

import inspect
import json
import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from ullage.cli import completion
from ullage.errors import InvalidValue
from ullage.jobs.ranks import LAUNCHERS, NOT_FOLLOWED
from ullage.units import parse_duration
from ullage.virtual import releases

if TYPE_CHECKING:
    from ullage.estimation.jobs.command import ScriptCommand
    from ullage.estimation.result import Estimate
    from ullage.hardware import GPU
    from ullage.jobs import Workload

RANKS = "Many GPUs"
_DEFAULT = "local, where there is one, else H200"
ALL = "all"  # the word for all GPUs, or all estimators

Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Gpu = Annotated[
    str | None, typer.Option("--gpu", "-g", help="The GPU to estimate for: a name from 'ullage gpus', the path of a "
                             "TOML file, or 'local' for the GPU of this machine.", metavar="NAME",
                             show_default=_DEFAULT, autocompletion=completion.gpus)
]  # fmt: skip
Gpus = Annotated[
    str | None, typer.Option("--gpu", "-g", help="The GPU to estimate for: a name from 'ullage gpus', the path of a "
                             "TOML file, or 'local' for the GPU of this machine. Several with commas, or 'all', give "
                             "a table.", metavar="NAME", show_default=_DEFAULT,
                             autocompletion=completion.several_gpus)
]  # fmt: skip
MeasuredGpu = Annotated[
    str | None, typer.Option("--gpu", "-g", help="The GPU on which the runs were measured.", metavar="NAME",
                             show_default="H200, A100-40GB for .csv", autocompletion=completion.gpus)
]  # fmt: skip
Source = Annotated[
    str, typer.Argument(help="A model's name or the path of a script.", metavar="SOURCE", show_default=False,
                        autocompletion=completion.sources)
]  # fmt: skip
ScriptArguments = Annotated[
    list[str] | None, typer.Argument(help="Arguments of the script, after --.", metavar="ARGS",
                                     show_default=False)
]  # fmt: skip
Seed = Annotated[
    int, typer.Option(help="Seed of the random generator; the same seed gives the same result.", metavar="N", min=0)
]
Network = Annotated[bool, typer.Option("--network", help="Let a script reach other machines, to download something.")]
Timeout = Annotated[
    str | None, typer.Option(help="Give up on a script after this long, such as 90s or 10m.", metavar="TIME",
                             show_default="5m")
]  # fmt: skip
Pytorch = Annotated[
    str | None, typer.Option("--pytorch", help="The release of PyTorch on the GPU, such as 2.11: which attention runs "
                             "and which workspaces stay differ.", metavar="RELEASE",
                             envvar=releases.VARIABLE, show_envvar=False, autocompletion=completion.releases,
                             show_default="the one that is installed; 2.11 for newer CPU builds")
]  # fmt: skip
InterconnectNames = Annotated[
    str | None, typer.Option("--interconnect", help="The networks by which ranks reach each other: inside a machine "
                             "(nvlink1 to nvlink5, pcie3 to pcie5), between machines (ib-hdr, ib-ndr, eth-100, ...), "
                             "or both with a comma. 4xib-ndr means four adapters in each machine.",
                             metavar="NAME[,NAME]", show_default="as machines with this GPU are sold",
                             rich_help_panel=RANKS, autocompletion=completion.interconnects)
]  # fmt: skip


class ScriptOptions:
    """How a script is started; every command that takes one has these options."""

    module: Annotated[bool, typer.Option("--module", "-m", help="SOURCE is a module, as in python -m.")] = False
    network: Network = False
    python: Annotated[
        str | None, typer.Option("--python", help="Run a script in another Python, which needs PyTorch but not Ullage: "
                                 "its path, an environment's folder, or the name of a conda environment.",
                                 metavar="PATH", autocompletion=completion.pythons,
                                 show_default="the active environment if it has PyTorch, or else Ullage's own")
    ] = None  # fmt: skip
    pytorch: Pytorch = None


class FollowOptions(ScriptOptions):
    """And for how long it is followed."""

    steps: Annotated[
        int, typer.Option(help="Follow the job for at least this many optimizer steps.", metavar="N")
    ] = 3  # fmt: skip
    timeout: Timeout = None


class RankOptions:
    """The ranks of a job of many GPUs, and which of them to follow."""

    world_size: Annotated[
        int | None, typer.Option("--world-size", help="Run as one rank of N, with what torchrun would set. Each rank "
                                 "has a GPU.", metavar="N", show_default="as the script is started", min=1,
                                 rich_help_panel=RANKS)
    ] = None  # fmt: skip
    rank: Annotated[
        int, typer.Option("--rank", help="The rank to follow.", metavar="N", min=0, rich_help_panel=RANKS)
    ] = 0  # fmt: skip
    ranks: Annotated[
        str | None, typer.Option("--ranks", help="Several ranks to follow, such as 0,7. The one that takes most "
                                 "decides.", metavar="N,N", show_default="0, and the last stage of a pipeline",
                                 rich_help_panel=RANKS)
    ] = None  # fmt: skip
    nodes: Annotated[
        int, typer.Option("--nodes", help="On how many machines the ranks are.", metavar="N", min=1,
                          rich_help_panel=RANKS)
    ] = 1  # fmt: skip


MODEL = "Model (when SOURCE is a model's name)"
TRAINING = "Training (when SOURCE is a model's name)"


class ModelOptions:
    """The options that describe a model and its training; every command that takes a model's name has them."""

    batch_size: Annotated[
        int | None, typer.Option("--batch-size", "-b", help="Samples in a batch.", metavar="N", show_default="32",
                                 rich_help_panel=TRAINING)
    ] = None  # fmt: skip
    input_shape: Annotated[
        str | None, typer.Option(help="Shape of one sample, such as 3,224,224.", metavar="C,H,W",
                                 show_default="what the model was made for", rich_help_panel=MODEL)
    ] = None  # fmt: skip
    sequence_length: Annotated[
        int | None, typer.Option(help="Tokens in a sample.", metavar="N",
                                 show_default="the model's limit, at most 1024", rich_help_panel=MODEL)
    ] = None  # fmt: skip
    num_classes: Annotated[
        int | None, typer.Option(help="Number of classes.", metavar="N", show_default="the model's own",
                                 rich_help_panel=MODEL)
    ] = None  # fmt: skip
    config: Annotated[
        str | None, typer.Option(help="For hf:CLASS, a config: a JSON file, a folder with a config.json, or the name "
                                 "of a model on the hub.", metavar="PATH", rich_help_panel=MODEL)
    ] = None  # fmt: skip
    set: Annotated[
        list[str] | None, typer.Option(help="For hf: models, a value of the config, such as n_layer=12 or "
                                       "text_config.vocab_size=1000. For other models, an argument of the model. "
                                       "Can be given more than once.",
                                       metavar="KEY=VALUE", rich_help_panel=MODEL)
    ] = None  # fmt: skip
    attention: Annotated[
        str | None, typer.Option(help="sdpa, eager, or one of PyTorch's kernels: flash, efficient, cudnn, math.",
                                 metavar="NAME", show_default="the model's own", rich_help_panel=MODEL,
                                 autocompletion=completion.attentions)
    ] = None  # fmt: skip
    freeze: Annotated[
        list[str] | None, typer.Option(help="Layers that are not trained, such as 'layer1' or 'blocks.[0-5].*'. "
                                       "Can be given more than once.", metavar="PATTERN", rich_help_panel=MODEL)
    ] = None  # fmt: skip
    lora: Annotated[
        int | None, typer.Option("--lora", help="Train only LoRA adapters of this rank (needs peft).",
                                 metavar="N", rich_help_panel=MODEL)
    ] = None  # fmt: skip
    lora_targets: Annotated[
        str | None, typer.Option(help="The layers that get adapters, such as q_proj,v_proj.", metavar="NAMES",
                                 show_default="every linear one but the last", rich_help_panel=MODEL)
    ] = None  # fmt: skip
    quantize: Annotated[
        str | None, typer.Option(help="For hf: models, hold the frozen weights in nf4, fp4 or int8 (needs "
                                 "bitsandbytes).", metavar="NAME", rich_help_panel=MODEL,
                                 autocompletion=completion.quantizations)
    ] = None  # fmt: skip
    dtype: Annotated[
        str | None, typer.Option(help="The type that the weights are loaded in: float32, bfloat16 or float16.",
                                 metavar="NAME", show_default="as --precision says; for hf:ORG/NAME as saved",
                                 rich_help_panel=MODEL, autocompletion=completion.dtypes)
    ] = None  # fmt: skip
    optimizer: Annotated[
        str | None, typer.Option("--optimizer", "-O", help="sgd, sgdm, adam, adamw, adamw_fused, rmsprop, adagrad, "
                                 "adafactor, or any class of torch.optim.", metavar="NAME", show_default="adamw",
                                 rich_help_panel=TRAINING, autocompletion=completion.optimizers)
    ] = None  # fmt: skip
    precision: Annotated[
        str | None, typer.Option("--precision", "-p", help="fp32, tf32, amp_fp16, amp_bf16, bf16 or fp16.",
                                 metavar="NAME", show_default="fp32", rich_help_panel=TRAINING,
                                 autocompletion=completion.precisions)
    ] = None  # fmt: skip
    gradient_accumulation: Annotated[
        int | None, typer.Option(help="Batches for each optimizer step.", metavar="N", show_default="1",
                                 rich_help_panel=TRAINING)
    ] = None  # fmt: skip
    checkpointing: Annotated[
        bool, typer.Option("--checkpointing", help="Recompute activations in the backward pass.",
                           rich_help_panel=TRAINING)
    ] = False  # fmt: skip
    channels_last: Annotated[
        bool, typer.Option("--channels-last", help="Keep images and weights in channels-last order.",
                           rich_help_panel=TRAINING)
    ] = False  # fmt: skip
    inference: Annotated[
        bool, typer.Option("--inference", help="Run the forward pass only, without gradients.",
                           rich_help_panel=TRAINING)
    ] = False  # fmt: skip


def with_options(*shared: type) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the options that these classes have; it gets them as keyword arguments."""

    def added(command: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(command, eval_str=True)
        own = [p for p in signature.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
        others = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=getattr(one, name), annotation=kind)
            for one in shared
            for name, kind in get_type_hints(one, include_extras=True).items()
        ]
        command.__signature__ = signature.replace(parameters=[*own, *others])  # type: ignore[attr-defined]
        return command

    return added


def given_options(values: dict[str, Any]) -> dict[str, Any]:
    """The model options that were given, as the library takes them.

    >>> given_options({"input_shape": "3,32,32", "set": ["n_layer=2"], "freeze": [], "inference": False})
    {'input_shape': [3, 32, 32], 'set': {'n_layer': 2}}
    """
    given = {name: value for name, value in values.items() if value is not None and value is not False and value != []}
    if "input_shape" in given:
        from ullage.jobs.configuration import parse_shape

        given["input_shape"] = parse_shape(given["input_shape"], "--input-shape")
    if "lora_targets" in given:
        given["lora_targets"] = [name.strip() for name in given["lora_targets"].split(",") if name.strip()]
    if "set" in given:
        given["set"] = dict(parse_setting(text) for text in given["set"])
    return given


def parse_setting(text: str) -> tuple[str, Any]:
    """A key and its value: JSON, or else a word.

    >>> parse_setting("layers=[2, 2]"), parse_setting("hidden_act=gelu")
    (('layers', [2, 2]), ('hidden_act', 'gelu'))
    """
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise InvalidValue(f"--set: needed key=value such as n_layer=12; found {text!r}")
    words = {"True": True, "False": False, "None": None}
    try:
        return key.strip(), words[value] if value in words else json.loads(value)
    except json.JSONDecodeError:
        return key.strip(), value


@dataclass(frozen=True)
class EstimateTarget:
    """What to estimate and with which estimator; `options` are those that were given, `workload` what they describe.

    >>> target_of("torchvision:resnet18", batch_size=8).options
    {'steps': 3, 'batch_size': 8}
    """

    source: str
    options: dict[str, Any]
    workload: Workload
    estimator: str = "ullage"

    @property
    def is_ullage(self) -> bool:
        """Whether Ullage's own estimator is used."""
        return self.estimator == "ullage"

    def telling(self, progress: Callable[[str], None]) -> EstimateTarget:
        """The same for a script, whose run tells what takes long."""
        return replace(self, workload=replace(self.workload, run=replace(self.workload.run, progress=progress)))

    def run(self, gpu: GPU, **how: Any) -> Estimate:
        """The estimate on one GPU; `how` are further run options, such as `trace`."""
        from ullage.estimation.asking import estimate_workload

        workload = replace(self.workload, run=replace(self.workload.run, **how)) if how else self.workload
        return estimate_workload(workload, gpu, self.estimator)


def target_of(
    source: str,
    args: list[str] | None = None,
    *,
    estimator: str = "ullage",
    module: bool = False,
    steps: int = 3,
    timeout: str | None = None,
    show_output: bool = False,
    network: bool = False,
    python: str | None = None,
    world_size: int | None = None,
    rank: int = 0,
    ranks: str | None = None,
    nodes: int = 1,
    interconnect: str | None = None,
    parallel: str | None = None,
    pytorch: str | None = None,
    **model: Any,
) -> EstimateTarget:
    """What the command line describes; options that do not belong to this kind of source are refused."""
    if pytorch:  # children read the variable, so the whole command follows this release
        os.environ[releases.VARIABLE] = releases.named(pytorch).name
    from ullage.jobs.kinds import SCRIPT, check_script, kind_of

    if source.endswith(".py") and not module:
        check_script(source)  # at once: the rest takes longer to import
    from ullage.estimation.estimators.registry import check_name
    from ullage.estimation.jobs.command import EACH_GPU
    from ullage.jobs.workload import workload_of
    from ullage.sandbox.interpreter import active_environment

    check_name(estimator)
    by = _launched(source, args)
    if by is not None:
        if world_size is None:
            world_size, nodes = by.world_size or None, by.nodes
            if by.world_size == EACH_GPU and by.launched_by[:1] != ("accelerate",):  # which knows more than its words
                raise InvalidValue(f"{source}: needed a number of ranks; type --world-size 8 before {source}")
        source, args, module = by.source, by.args, by.module
    if steps < 1:
        raise InvalidValue(f"--steps: needed a whole number of at least 1; found {steps}")
    kind = kind_of(source, module)
    if kind == SCRIPT and not module:
        check_script(source)
    if kind != SCRIPT and args:
        raise InvalidValue(f"{' '.join(args)!r}: arguments after -- are for scripts; {source} is a model's name")
    of_script = {
        "args": args,
        "module": module,
        "timeout": None if timeout is None else parse_duration(timeout),
        "show_output": show_output,
        "network": network,
        "python": python or (active_environment() if kind == SCRIPT else None),
        "world_size": world_size,
        "rank": rank,
        "ranks": _numbers(ranks),
        "nodes": nodes if nodes > 1 else None,
        "interconnect": interconnect,
        "launcher": by and by.launcher_text,
        "parallel": parallel,
    }
    options = {"steps": steps, **given_options(model), **{name: value for name, value in of_script.items() if value}}
    if kind != SCRIPT:
        _silence_model_packages()
    return EstimateTarget(source, options, workload_of(source, options, estimator), estimator)


def _numbers(ranks: str | None) -> tuple[int, ...]:
    words = ranks.split(",") if ranks is not None else []
    if not all(word.strip().isdecimal() for word in words):
        raise InvalidValue(f"--ranks: needed numbers with commas between them, such as 0,7; found {ranks!r}")
    return tuple(dict.fromkeys(map(int, words)))


def _launched(source: str, args: list[str] | None) -> ScriptCommand | None:
    """The script that a launcher starts, where SOURCE is one."""
    if Path(source).name in NOT_FOLLOWED:
        raise InvalidValue(f"{source} is not followed; type the script alone, with --world-size")
    if Path(source).name.removesuffix("3") not in (*LAUNCHERS, "python"):
        return None
    from ullage.estimation.jobs.launchers import launched

    inner = launched([source, *(args or [])])
    found = inner.script
    if inner.refusal is not None:
        raise InvalidValue(f"{source}: {inner.refusal}")
    if inner.folder is not None:
        raise InvalidValue(f"{source}: it runs in another folder; type cd {inner.folder}, and leave that option out")
    if found is None:
        raise InvalidValue(f"needed a script after {source}, such as {source} train.py; found {' '.join(args or [])!r}")
    os.environ.update(inner.variables)
    return found


def _silence_model_packages() -> None:
    """Warnings of torchvision, timm and transformers while a model is built are not about memory."""
    warnings.simplefilter("ignore")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")


def default_gpu_hint(gpu: str | None, taken: str) -> str:
    """For the end of an answer: that nobody named the GPU that was taken; empty if the user did.

    >>> default_gpu_hint(None, "H200")
    'no GPU was named: H200 was taken; name another with --gpu NAME'
    """
    from ullage.hardware import nobody_named

    return "" if gpu is not None else nobody_named(taken)
