"""Options that several commands share, so that a word means the same everywhere."""

from __future__ import annotations

import inspect
import json
import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from ullage.cli import completion
from ullage.errors import InvalidValue
from ullage.units import parse_duration

if TYPE_CHECKING:
    from ullage.estimation.result import Estimate
    from ullage.hardware import GPU
    from ullage.workloads import Configuration


Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
Gpu = Annotated[
    str, typer.Option("--gpu", "-g", help="The GPU: a name of 'ullage gpus', a TOML file of one's own, or local.",
                      autocompletion=completion.gpus)
]  # fmt: skip


# The options that describe a model and its training, the same for every command that takes a model's name.

MODEL = "The model (for a model's name)"
TRAINING = "Training (for a model's name)"


class ModelOptions:
    """Each attribute is an option; its name is that of the argument of `ullage.estimate`."""

    batch_size: Annotated[
        int | None, typer.Option("--batch-size", "-b", help="Samples that go through at once.", show_default="32",
                                 rich_help_panel=TRAINING)
    ] = None  # fmt: skip
    input_shape: Annotated[
        str | None, typer.Option(help="Shape of one sample, such as 3,224,224.", metavar="C,H,W",
                                 show_default="what the model is made for", rich_help_panel=MODEL)
    ] = None  # fmt: skip
    sequence_length: Annotated[
        int | None, typer.Option(help="Tokens in a sample.", show_default="the model's limit, at most 1024",
                                 rich_help_panel=MODEL)
    ] = None  # fmt: skip
    num_classes: Annotated[
        int | None, typer.Option(help="Number of classes.", show_default="the model's own", rich_help_panel=MODEL)
    ] = None
    config: Annotated[
        Path | None, typer.Option(help="hf: a config as JSON, or a model folder that has a config.json.",
                                  rich_help_panel=MODEL)
    ] = None  # fmt: skip
    set: Annotated[
        list[str] | None, typer.Option(help="hf: a value of the config, such as n_layer=12 or text_config.vocab_size="
                                       "1000; others: an argument of the model. Repeat it for more.",
                                       metavar="KEY=VALUE", rich_help_panel=MODEL)
    ] = None  # fmt: skip
    attention: Annotated[
        str | None, typer.Option(help="sdpa, eager, or one kernel of PyTorch's: flash, efficient, cudnn, math.",
                                 show_default="the model's own", rich_help_panel=MODEL,
                                 autocompletion=completion.attentions)
    ] = None  # fmt: skip
    freeze: Annotated[
        list[str] | None, typer.Option(help="Layers that are not trained, such as 'layer1' or 'blocks.[0-5].*'. "
                                       "Repeat it for more.", metavar="PATTERN", rich_help_panel=MODEL)
    ] = None  # fmt: skip
    lora_rank: Annotated[
        int | None, typer.Option(help="Train only LoRA adapters of this rank (needs peft).", rich_help_panel=MODEL)
    ] = None
    optimizer: Annotated[
        str | None, typer.Option("--optimizer", "-o", help="sgd, sgdm, adam, adamw, adamw_fused, rmsprop, adagrad, "
                                 "adafactor, or any class of torch.optim.", show_default="adamw",
                                 rich_help_panel=TRAINING, autocompletion=completion.optimizers)
    ] = None  # fmt: skip
    precision: Annotated[
        str | None, typer.Option("--precision", "-p", help="fp32, tf32, amp_fp16, amp_bf16, bf16 or fp16.",
                                 show_default="fp32", rich_help_panel=TRAINING, autocompletion=completion.precisions)
    ] = None  # fmt: skip
    gradient_accumulation: Annotated[
        int | None, typer.Option(help="Batches a step of the optimizer.", show_default="1", rich_help_panel=TRAINING)
    ] = None
    checkpointing: Annotated[
        bool, typer.Option("--checkpointing", help="Recompute activations in the backward pass.",
                           rich_help_panel=TRAINING)
    ] = False  # fmt: skip
    channels_last: Annotated[
        bool, typer.Option("--channels-last", help="Images and weights in channels-last order.",
                           rich_help_panel=TRAINING)
    ] = False  # fmt: skip
    inference: Annotated[
        bool, typer.Option("--inference", help="The forward pass only, without gradients.", rich_help_panel=TRAINING)
    ] = False


def with_model_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options above; it gets them as keyword arguments."""
    signature = inspect.signature(command, eval_str=True)
    own = [p for p in signature.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
    types = get_type_hints(ModelOptions, include_extras=True)
    added = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=getattr(ModelOptions, name), annotation=kind)
        for name, kind in types.items()
    ]
    command.__signature__ = signature.replace(parameters=[*own, *added])  # type: ignore[attr-defined]
    return command


def chosen(values: dict[str, Any]) -> dict[str, Any]:
    """The options that were given, as the library takes them.

    >>> chosen({"batch_size": 8, "input_shape": "3,32,32", "set": ["n_layer=2"], "freeze": [], "inference": False})
    {'batch_size': 8, 'input_shape': [3, 32, 32], 'set': {'n_layer': 2}}
    """
    given = {name: value for name, value in values.items() if value is not None and value is not False and value != []}
    if "input_shape" in given:
        given["input_shape"] = parse_shape(given["input_shape"])
    if "set" in given:
        given["set"] = dict(parse_setting(text) for text in given["set"])
    return given


def parse_shape(text: str) -> list[int]:
    """A shape from numbers with commas (or x) between them.

    >>> parse_shape("3x224x224")
    [3, 224, 224]
    """
    parts = text.replace("x", ",").split(",")
    if not all(part.strip().isdigit() and int(part) for part in parts):
        raise InvalidValue(f"--input-shape: needed whole numbers such as 3,224,224; found {text!r}")
    return [int(part) for part in parts]


def parse_setting(text: str) -> tuple[str, Any]:
    """A key and a JSON value; what is no JSON is a word.

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


# What the command line was asked about: a model by its name or a script, and how to run it on one GPU.

Source = Annotated[
    str, typer.Argument(help="A model's name or a script.", autocompletion=completion.sources, show_default=False)
]
Script = Annotated[list[str] | None, typer.Argument(help="After --: the script's own arguments.", show_default=False)]
Steps = Annotated[int, typer.Option(help="Optimizer steps to follow at least.")]
Timeout = Annotated[
    str | None, typer.Option(help="Give a script up after so long, such as 90s or 10m.", metavar="TIME")
]


@dataclass
class Job:
    """A source with its options; `run` estimates it on one GPU.

    >>> job_of("torchvision:resnet18", None, False, 3, None, False, {"batch_size": 8}).options
    {'steps': 3, 'batch_size': 8}
    """

    source: str
    is_script: bool
    options: dict[str, Any]
    estimator: str = "ullage"

    @property
    def is_ullage(self) -> bool:
        """Whether Ullage itself is asked."""
        return self.estimator == "ullage"

    def run(self, card: GPU, **more: Any) -> Estimate:
        """The estimate on one GPU."""
        from ullage.estimation.asking import estimate

        return estimate(self.source, gpu=card, estimator=self.estimator, **self.options, **more)

    def configuration(self) -> Configuration | None:
        """What a model's name and its options mean; `None` for a script."""
        from ullage.estimation.running import split_options
        from ullage.workloads import Configuration

        return None if self.is_script else Configuration.from_options(self.source, **split_options(self.options)[0])


def job_of(
    source: str,
    args: list[str] | None,
    module: bool,
    steps: int,
    timeout: str | None,
    show_output: bool,
    model: dict[str, Any],
    estimator: str = "ullage",
) -> Job:
    """The job that the command line describes; options that do not belong to it are refused."""
    from ullage.estimation.estimators.registry import find

    find(estimator)  # a wrong name is told at once, before PyTorch is imported
    from ullage.estimation.asking import is_summary
    from ullage.estimation.running import SCRIPT, kind_of

    if steps < 1:
        raise InvalidValue(f"--steps: needed a whole number of at least 1; found {steps}")
    options: dict[str, Any] = {"steps": steps, **chosen(model)}
    of_script = {
        "args": args,
        "module": module,
        "timeout": None if timeout is None else parse_duration(timeout),
        "show_output": show_output,
    }
    given = {name: value for name, value in of_script.items() if value}
    is_script = kind_of(source, module) == SCRIPT and not is_summary(source)
    if is_script:
        return Job(source, True, options | given, estimator)
    if args:
        raise InvalidValue(f"{' '.join(args)!r}: arguments after -- are for scripts; {source} is a model's name")
    _quiet()
    return Job(source, False, options | given, estimator)


def _quiet() -> None:
    """What packages of models have to say while they are built is not about memory."""
    warnings.simplefilter("ignore")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
