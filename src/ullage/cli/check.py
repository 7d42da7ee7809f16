"""`ullage check`: does it fit? One line and an exit code, for pipelines and pre-commit."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ullage.cli.job import Script, Source, Steps, Timeout, job_of
from ullage.cli.model_options import with_model_options
from ullage.cli.options import Gpu, Json
from ullage.errors import InvalidValue, UllageError
from ullage.units import format_bytes, parse_bytes

if TYPE_CHECKING:
    from ullage.estimate import Estimate
    from ullage.gpus import GPU

FITS, DOES_NOT_FIT, CANNOT_TELL = 0, 1, 2


@with_model_options
def check(
    source: Source,
    args: Script = None,
    gpu: Gpu = "H200",
    module: Annotated[bool, typer.Option("--module", "-m", help="SOURCE is a module, as in python -m.")] = False,
    steps: Steps = 3,
    timeout: Timeout = None,
    margin: Annotated[
        str, typer.Option(help="Room that must be left: a size (2GiB) or a share of the GPU (5%).")
    ] = "0",
    upper: Annotated[bool, typer.Option("--upper", help="Judge by the upper bound instead of the estimate.")] = False,
    as_json: Json = False,
    **model: Any,
) -> None:
    """Exit 0 if a job fits on a GPU, 1 if it does not, 2 if that cannot be told (a wrong name, a broken script).

    Example: ullage check torchvision:resnet50 --batch-size 64 --gpu RTX-4090 --margin 10%
    """

    def run(card: GPU) -> Estimate:
        return job_of(source, args, module, steps, timeout, False, model).run(card)

    answer_with(run, source, gpu, margin, upper, as_json)


def answer_with(run: Callable[[GPU], Estimate], source: str, gpu: str, margin: str, upper: bool, as_json: bool) -> None:
    """Estimate by `run`, print one line (or JSON) and leave with the exit code."""
    from ullage.gpus import gpu as find_gpu

    try:
        card = find_gpu(gpu)
        needed = parse_margin(margin, card.usable)
        answer = run(card)
    except Exception as error:  # whatever it is, it must not look like "does not fit" to a pipeline
        known = isinstance(error, UllageError)
        print(f"ullage: {error}" if known else f"ullage: {type(error).__name__}: {error}", file=sys.stderr)
        raise typer.Exit(CANNOT_TELL) from None
    passed, line = judge(answer, needed, upper)
    if as_json:
        print(json.dumps({"passed": passed, "margin": needed, **answer.to_dict(timeline=False)}))
    else:
        print(f"{source}: {line}")
    raise typer.Exit(FITS if passed else DOES_NOT_FIT)


def judge(answer: Estimate, margin: int, upper: bool) -> tuple[bool, str]:
    """Whether an estimate leaves `margin` bytes, and the line that says so."""
    taken = answer.bound if upper else answer.figure
    passed = answer.fits and taken + margin <= answer.gpu_memory
    if passed or not answer.fits:
        line = answer.verdict
    else:
        what = "at most" if upper else "it takes"
        line = f"TOO LITTLE ROOM on {answer.gpu}: {what} {format_bytes(taken)} of {format_bytes(answer.gpu_memory)}" + (
            f", and {format_bytes(margin)} must be left" if margin else ""
        )
    return passed, line


def parse_margin(text: str, whole: int) -> int:
    """Bytes from a size or from a share of `whole`.

    >>> parse_margin("5%", 1000), parse_margin("1KiB", 1000)
    (50, 1024)
    """
    share = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*%\s*", text)
    if share is not None and float(share[1]) <= 100:
        return int(whole * float(share[1]) / 100)
    try:
        return parse_bytes(text)
    except InvalidValue:
        raise InvalidValue(f"--margin: needed a size such as 2GiB or a share such as 5%; found {text!r}") from None
