"""What the command line was asked about: a model by its name or a script, and how to run it on one GPU."""

from __future__ import annotations

import os
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ullage.cli import completion
from ullage.cli.model_options import chosen
from ullage.errors import InvalidValue
from ullage.units import parse_duration

if TYPE_CHECKING:
    from ullage.estimate import Estimate
    from ullage.gpus import GPU
    from ullage.workload import Configuration

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
        from ullage.estimators.choice import estimate

        return estimate(self.source, gpu=card, estimator=self.estimator, **self.options, **more)

    def configuration(self) -> Configuration | None:
        """What a model's name and its options mean; `None` for a script."""
        from ullage.estimate.dispatch import split_options
        from ullage.workload import Configuration

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
    from ullage.estimators.registry import find

    find(estimator)  # a wrong name is told at once, before PyTorch is imported
    from ullage.estimate.dispatch import SCRIPT, kind_of
    from ullage.estimators.choice import is_summary

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
