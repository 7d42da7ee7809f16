"""`ullage estimate`, `ullage check` and `ullage max-batch`: the memory that a job needs, and what fits."""

import json
import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from ullage.cli import completion
from ullage.cli.exit_codes import DONE, FAILED, WRONG
from ullage.cli.measured_files import check_file
from ullage.cli.options import (
    ALL,
    FOLLOW_OPTIONS,
    MODEL_OPTIONS,
    NETWORK_OPTIONS,
    RANK_OPTIONS,
    SPREAD_OPTIONS,
    TRAINING_OPTIONS,
    Gpu,
    Gpus,
    Json,
    ScriptArguments,
    Source,
    default_gpu_hint,
    given,
    option,
    options_of,
    request_from,
    with_options,
)
from ullage.cli.progress import following
from ullage.errors import InvalidValue, UllageError
from ullage.estimation.advice import Suggestion, suggestions
from ullage.estimation.asking import answer_over_gpus, answer_request, check_plan
from ullage.estimation.result import Estimate
from ullage.hardware import default_gpu, gpu_list
from ullage.hardware import gpu as find_gpu
from ullage.hardware import gpus as all_gpus
from ullage.jobs.job import JobRequest, Script
from ullage.performance.cost import Training
from ullage.units import format_bytes, parse_bytes

FITS, DOES_NOT_FIT, CANNOT_TELL = DONE, FAILED, WRONG  # exit codes of `ullage check`
_SHOWN = options_of(Script, "show_output")

_SIZES = ["batch-size", "sequence-length", "image-size"]
_ESTIMATOR = "Estimator: ullage, or another such as horus, deepspeed or accelerate (options: --set NAME.KEY=VALUE)."


@with_options(FOLLOW_OPTIONS, MODEL_OPTIONS, RANK_OPTIONS)
def check(
    source: Source,
    args: ScriptArguments = None,
    gpu: Gpu = None,
    margin: Annotated[str, option("Memory to keep free: a size (2GiB) or a share of the GPU (5%).", "SIZE")] = "0",
    upper: Annotated[bool, option("Use the upper bound instead of the estimate.", "--upper")] = False,
    as_json: Json = False,
    **options: Any,
) -> None:
    """Check that a job fits on a GPU.

    Prints one line. Exits with 0 if the job fits, 1 if not, 2 if there is no estimate.

    Examples:

      ullage check torchvision:resnet50 --batch-size 64 --gpu RTX-4090 --margin 10%
      ullage check train.py --gpu A100-40GB --upper -- --batch-size 256
    """
    try:
        card = find_gpu(gpu or default_gpu())
        needed = parse_margin(margin, card.usable)
        request = request_from(source, args, **options)
        with Console(stderr=True).status(f"running {source} on a virtual {card.name} ..."):
            answer = answer_request(request, card)
    except Exception as error:  # no error may look like "does not fit" to a pipeline
        known = isinstance(error, UllageError)
        print(f"ullage: {error}" if known else f"ullage: {type(error).__name__}: {error}", file=sys.stderr)
        raise typer.Exit(CANNOT_TELL) from None
    answer = answer if gpu is not None else answer.on_assumed_gpu()
    passed, line = judge(answer, needed, upper)
    if as_json:
        print(json.dumps({"passed": passed, "margin": needed, **answer.to_dict(timeline=False, layers=False)}))
    else:
        hint = default_gpu_hint(gpu, card.name)
        print(f"{source}: {line}" + (f" ({hint})" if hint else ""))
    raise typer.Exit(FITS if passed else DOES_NOT_FIT)


def judge(answer: Estimate, margin: int, upper: bool) -> tuple[bool, str]:
    """Return whether an estimate leaves `margin` bytes free, and the line to print."""
    taken = answer.bound if upper else answer.needed
    passed = bool(answer.fits) and taken + margin <= answer.gpu_memory
    if passed or not answer.fits:
        line = answer.verdict
    else:
        what = "at most" if upper else "it takes"
        line = f"TOO LITTLE ROOM on {answer.gpu}: {what} {format_bytes(taken)} of {format_bytes(answer.gpu_memory)}" + (
            f", and {format_bytes(margin)} must be left" if margin else ""
        )
    return passed, line


def parse_margin(text: str, whole: int) -> int:
    """Parse a size, or a share of `whole`; return bytes."""
    share = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*%\s*", text)
    if share is not None and float(share[1]) <= 100:
        return int(whole * float(share[1]) / 100)
    try:
        return parse_bytes(text)
    except InvalidValue:
        raise InvalidValue(f"--margin must be a size such as 2GiB or a share such as 5%, got {text!r}") from None


@with_options(FOLLOW_OPTIONS, MODEL_OPTIONS, RANK_OPTIONS)
def max_batch(
    source: Source,
    args: ScriptArguments = None,
    gpu: Gpu = None,
    maximize: Annotated[
        str, option("Size to maximize: batch-size, sequence-length or image-size.", "NAME", complete=_SIZES)
    ] = "batch-size",
    jobs: Annotated[bool, option("Count how many copies of the job fit on the GPU.", "--jobs")] = False,
    batch_arg: Annotated[str | None, option("Script argument that sets the size, such as --batch-size.", "ARG")] = None,
    as_json: Json = False,
    **options: Any,
) -> None:
    """Find the largest batch size that fits on a GPU.

    Examples:

      ullage max-batch timm:vit_small_patch16_224 --gpu RTX-4090
      ullage max-batch train.py --batch-arg=--batch-size --gpu L4 -- --epochs 1
    """
    request = request_from(source, args, **options)
    if jobs:
        _count_jobs(request, gpu, as_json)
        return
    from ullage.estimation.largest_batch import WHAT, search

    with following("searching") as going:

        def after_trial(trial: int, number: int, answer: Estimate) -> None:
            going.doing(f"{number} {'fits' if answer.fits else 'does not fit'}", trial)

        start = given(options).get(WHAT[maximize][0]) if maximize in WHAT else None
        card = gpu or default_gpu()
        best = search(request, card, what=maximize, batch_arg=batch_arg, start=start, progress=after_trial)
    if as_json:
        print(json.dumps(best.to_dict()))
        return
    print(best.report())
    print(f"{best.trials} estimates in {best.seconds:.1f} s, without a GPU")
    _print_default_gpu(gpu, best.gpu)


def _count_jobs(request: JobRequest, gpu: str | None, as_json: bool) -> None:
    from ullage.estimation.largest_batch import jobs_together

    with Console(stderr=True).status(f"estimating {request.source} ..."):
        answer = answer_request(request, find_gpu(gpu or default_gpu()))
    count = jobs_together(answer)
    if as_json:
        print(json.dumps({"jobs": count, "estimate": answer.to_dict(timeline=False, layers=False)}))
        return
    each = f"each needs at most {format_bytes(answer.bound)} of {format_bytes(answer.gpu_memory)}"
    print(f"{count} such jobs fit on {answer.gpu} together: {each}")
    _print_default_gpu(gpu, answer.gpu)


def _print_default_gpu(gpu: str | None, taken: str) -> None:
    if hint := default_gpu_hint(gpu, taken):
        print(hint)


@with_options(FOLLOW_OPTIONS, _SHOWN, MODEL_OPTIONS, RANK_OPTIONS, NETWORK_OPTIONS, SPREAD_OPTIONS, TRAINING_OPTIONS)
def estimate(
    source: Source,
    args: ScriptArguments = None,
    gpu: Gpus = None,
    estimator: Annotated[str, option(_ESTIMATOR, "--estimator -e NAME", complete=completion.estimators)] = "ullage",
    as_json: Json = False,
    timeline: Annotated[Path | None, option("Write memory over time as an HTML page.", "FILE.html")] = None,
    snapshot: Annotated[Path | None, option("Write a snapshot for pytorch.org/memory_viz.", "FILE.pickle")] = None,
    advice: Annotated[bool, option("If the job does not fit, suggest changes.", "--advice/--no-advice")] = True,
    layers: Annotated[bool, option("Show each layer's output, parameters and activations.", "--layers")] = False,
    depth: Annotated[int, option("With --layers: levels of modules to show.", "N")] = 3,
    **options: Any,
) -> None:
    """Estimate the GPU memory, step time and cost of a training job.

    SOURCE is one of:

      torchvision:NAME         a model of torchvision
      timm:NAME                a model of timm
      hf:ORG/NAME, hf:FOLDER   a model of the Hugging Face hub, or a folder with a config.json
      hf:CLASS                 a class of transformers
      package.module:factory   a function that returns a model
      path/file.py:factory     the same, in a file
      path/script.py           a training script; put its arguments after --
      summary.txt              output of torchsummary or torchinfo, for --estimator horus, gpumemnet or gpuutilnet

    Examples:

      ullage estimate torchvision:resnet50 --batch-size 64 --gpu A100-40GB
      ullage estimate train.py --gpu RTX-4090 -- --epochs 90
      ullage estimate hf:Qwen/Qwen3-8B --lora 16 --quantize nf4 --gpu all
      ullage estimate --gpu H100 torchrun --nproc-per-node 8 train.py
    """
    training = given({name: options.pop(name) for name in TRAINING_OPTIONS})
    request = request_from(source, args, estimator=estimator, **options)
    length = {f"--{name.replace('_', '-')}": value for name, value in training.items()}
    if not request.is_ullage:
        own = {"--timeline": timeline, "--snapshot": snapshot, "--layers": layers} | length
        if refused := next((name for name, value in own.items() if value), None):
            raise InvalidValue(f"{refused} is for Ullage's own estimate, got --estimator {estimator}; leave one out")
    plan = Training(**training)
    check_plan(plan, request)
    if gpu is not None and ("," in gpu or gpu.strip().casefold() == ALL):
        _over_gpus(request, plan, gpu, as_json)
        return
    card = find_gpu(gpu or default_gpu())
    for file in (timeline, snapshot):
        check_file(file)
    errors = Console(stderr=True)
    doing = f"running {request.source} on a virtual {card.name}" if request.is_ullage else f"asking {request.estimator}"
    with errors.status(f"{doing} ...") as status:
        request = replace(request, progress=lambda text: status.update(f"{doing} ... {text}"))
        if timeline or snapshot:
            from ullage.estimation.timeline.trace import Trace  # imports PyTorch

            request = replace(request, trace=Trace())
        answer = answer_request(request, card)
    answer = (answer if gpu is not None else answer.on_assumed_gpu()).for_training(plan)
    if timeline is not None:
        from ullage.estimation.timeline import page

        page.write(request.trace, answer, timeline)
    if snapshot is not None:
        from ullage.estimation.timeline import snapshot as snapshot_file

        snapshot_file.write(request.trace, snapshot)
    if as_json:
        print(answer.to_json(timeline=False, layers=layers))
        return
    changes: Sequence[Suggestion] = ()
    if advice and not answer.fits and request.is_ullage:
        with errors.status("looking for changes that make it fit ...") as status:
            changes = suggestions(
                request, card, answer_request, answer, lambda text: status.update(f"estimating {text} ...")
            )
    from ullage.estimation.tables import print_layers, print_report

    print_report(answer, Console(), changes)
    if layers:
        print()
        print_layers(answer, Console(), depth)


def _over_gpus(request: JobRequest, plan: Training, names: str, as_json: bool) -> None:
    from ullage.estimation.tables import print_gpu_table

    whole = [card for card in all_gpus() if not card.is_mig]
    cards = whole if names.strip().casefold() == ALL else gpu_list(names)
    with Console(stderr=True).status("estimating ...") as status:
        answers = answer_over_gpus(request, cards, lambda name: status.update(f"running on a virtual {name} ..."))
    answers = [answer.for_training(plan) for answer in answers]
    if as_json:
        print(json.dumps([answer.to_dict(timeline=False, layers=False) for answer in answers]))
    else:
        print_gpu_table(answers, Console())
