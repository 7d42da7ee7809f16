"""`ullage estimate`: how much memory a model, by its name, or a script will take."""

from __future__ import annotations

import json
import re
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from ullage.cli import completion
from ullage.cli.options import Gpu, Job, Json, Script, Source, Steps, Timeout, job_of, with_model_options
from ullage.errors import InvalidValue, UllageError
from ullage.units import format_bytes, parse_bytes

if TYPE_CHECKING:
    from ullage.estimation.advice import Option
    from ullage.estimation.result import Estimate
    from ullage.estimation.timeline.trace import Trace
    from ullage.hardware import GPU


# `ullage check`: does it fit? One line and an exit code, for pipelines and pre-commit.

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
    from ullage.hardware import gpu as find_gpu

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


# `ullage max-batch`: the largest batch that a GPU can train with.

USUAL_TRIALS = 12


@with_model_options
def max_batch(
    source: Source,
    args: Script = None,
    gpu: Gpu = "H200",
    what: Annotated[
        str, typer.Option(help="What to search: batch-size, sequence-length or image-size.",
                          autocompletion=lambda: ["batch-size", "sequence-length", "image-size"])
    ] = "batch-size",
    jobs: Annotated[bool, typer.Option("--jobs", help="How many such jobs fit on the GPU together, instead.")] = False,
    batch_arg: Annotated[
        str | None, typer.Option(help="For a script: its argument for what is searched.", metavar="--batch-size")
    ] = None,
    module: Annotated[bool, typer.Option("--module", "-m", help="SOURCE is a module, as in python -m.")] = False,
    steps: Steps = 3,
    timeout: Timeout = None,
    as_json: Json = False,
    **model: Any,
) -> None:  # fmt: skip
    """Find the largest batch that trains on a GPU: it fits and the next one does not.

    Examples:

      ullage max-batch timm:vit_small_patch16_224 --gpu RTX-4090

      ullage max-batch hf:BertForMaskedLM --what sequence-length -b 8 -p amp_bf16 --gpu A100-40GB

      ullage max-batch train.py --batch-arg=--batch-size --gpu L4 -- --epochs 1

      ullage max-batch torchvision:resnet18 --jobs -b 32 --gpu H200
    """
    job = job_of(source, args, module, steps, timeout, False, model)
    if jobs:
        _count_jobs(job, gpu, as_json)
    else:
        search(job, gpu, what, batch_arg, as_json)


def search(job: Job, gpu: str, what: str, batch_arg: str | None, as_json: bool) -> None:
    """Search with a progress bar and print the answer."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn

    from ullage.estimation.largest_batch import max_batch as largest

    columns = SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("first estimate", total=USUAL_TRIALS)

        def after_trial(trial: int, number: int, answer: Estimate) -> None:
            words = f"{number} {'fits' if answer.fits else 'does not fit'}"
            bar.update(task, completed=trial, total=max(USUAL_TRIALS, trial + 1), description=words)

        found = largest(job.source, gpu=gpu, what=what, batch_arg=batch_arg, progress=after_trial, **job.options)
    if as_json:
        print(json.dumps(found.to_dict()))
    else:
        print(found.report())
        print(f"{found.trials} estimates in {found.seconds:.1f} s, without a GPU")


def _count_jobs(job: Job, gpu: str, as_json: bool) -> None:
    from ullage.estimation.largest_batch import jobs_together
    from ullage.hardware import gpu as find_gpu

    with Console(stderr=True).status(f"estimating {job.source} ..."):
        answer = job.run(find_gpu(gpu))
    count = jobs_together(answer)
    if as_json:
        print(json.dumps({"jobs": count, "estimate": answer.to_dict(timeline=False)}))
        return
    each = f"each takes at most {format_bytes(answer.bound)} of {format_bytes(answer.gpu_memory)}"
    print(f"{count} such jobs fit on {answer.gpu} together: {each}")


OUTPUT = "Output"


@with_model_options
def estimate(
    source: Source,
    args: Script = None,
    gpu: Gpu = "H200",
    gpus: Annotated[
        str | None, typer.Option(help="One table over several GPUs: 'all', or names with commas.", metavar="all|A,B,C")
    ] = None,
    estimator: Annotated[
        str, typer.Option("--estimator", "-e", help="Who estimates: ullage, or one of the field's, such as horus, "
                          "faketensor, deepspeed, llmem, dnnmem, accelerate (docs/estimators.md). Its own options: "
                          "--set NAME.KEY=VALUE.", metavar="NAME", autocompletion=completion.estimators)
    ] = "ullage",
    module: Annotated[bool, typer.Option("--module", "-m", help="SOURCE is a module, as in python -m.")] = False,
    steps: Steps = 3,
    timeout: Timeout = None,
    max_batch: Annotated[bool, typer.Option("--max-batch", help="Search the largest batch instead.")] = False,
    batch_arg: Annotated[
        str | None, typer.Option(help="With --max-batch, a script's argument for its batch size.",
                                 metavar="--batch-size")
    ] = None,
    as_json: Json = False,
    timeline: Annotated[
        Path | None, typer.Option(help="Write memory over time as an HTML page.", metavar="FILE.html",
                                  rich_help_panel=OUTPUT)
    ] = None,
    snapshot: Annotated[
        Path | None, typer.Option(help="Write PyTorch's memory snapshot, for its viewer.", metavar="FILE.pickle",
                                  rich_help_panel=OUTPUT)
    ] = None,
    advice: Annotated[
        bool, typer.Option("--advice/--no-advice", help="Where it does not fit, estimate what would make it fit.",
                           rich_help_panel=OUTPUT)
    ] = True,
    show_output: Annotated[
        bool, typer.Option("--show-output", help="Show what the script prints.", rich_help_panel=OUTPUT)
    ] = False,
    **model: Any,
) -> None:  # fmt: skip
    """Estimate the GPU memory of a model by its name, or of an unmodified training script.

    SOURCE is torchvision:NAME, timm:NAME, hf:CLASS, hf:FOLDER (one with a config.json), package.module:factory,
    path/to/file.py:factory, or the path of a script, whose own arguments come after --. With --estimator horus also a
    text file that torchsummary or torchinfo printed.

    Examples:

      ullage estimate torchvision:resnet50 --batch-size 64 --gpu A100-40GB

      ullage estimate timm:vit_small_patch16_224 -b 128 -p amp_bf16 --gpus all

      ullage estimate hf:GPT2LMHeadModel --set n_layer=24 --sequence-length 1024 --checkpointing

      ullage estimate train.py --gpu RTX-4090 -- --epochs 90 --batch-size 256

      ullage estimate train.py --max-batch --batch-arg=--batch-size

      ullage estimate torchvision:resnet50 --estimator deepspeed --set deepspeed.stage=3 --set deepspeed.gpus=8

      ullage estimate summary.txt --estimator horus --batch-size 32
    """
    job = job_of(source, args, module, steps, timeout, show_output, model, estimator)
    if not job.is_ullage:
        _refuse({"--max-batch": max_batch, "--timeline": timeline, "--snapshot": snapshot}, estimator)
    if max_batch:
        search(job, gpu, "batch-size", batch_arg, as_json)
    elif gpus is not None:
        _over_gpus(job, gpus, as_json)
    else:
        _one(job, gpu, as_json, timeline, snapshot, advice)


def _refuse(options: dict[str, Any], estimator: str) -> None:
    """What only Ullage can do is not ignored."""
    for name, value in options.items():
        if value:
            raise InvalidValue(f"{name} is for Ullage's own estimate; the estimator {estimator} has none")


def _one(job: Job, gpu: str, as_json: bool, timeline: Path | None, snapshot: Path | None, wants_advice: bool) -> None:
    from ullage.hardware import gpu as find_gpu

    card = find_gpu(gpu)
    errors = Console(stderr=True)
    _check_writable(timeline, snapshot)
    doing = f"running {job.source} on a virtual {card.name}" if job.is_ullage else f"asking {job.estimator}"
    with errors.status(f"{doing} ..."):
        answer, trace = _traced(job, card) if timeline or snapshot else (job.run(card), None)
    if trace is not None:
        _write(trace, answer, timeline, snapshot)
    if as_json:
        print(answer.to_json(timeline=False))
        return
    options: Sequence[Option] = ()
    if wants_advice and not answer.fits and job.is_ullage:
        with errors.status("looking for what would make it fit ...") as status:
            options = _advice(job, card, answer, lambda text: status.update(f"estimating {text} ..."))
    from ullage.estimation.report import print_report

    print_report(answer, Console(), options)


def _traced(job: Job, card: GPU) -> tuple[Estimate, Trace]:
    from ullage.estimation.timeline.trace import Trace

    if not job.is_script:
        trace = Trace()
        return job.run(card, trace=trace), trace
    with tempfile.TemporaryDirectory() as folder:  # a script runs in a process of its own
        file = Path(folder) / "trace.npz"
        answer = job.run(card, trace_file=file)
        return answer, Trace.load(file)


def _write(trace: Trace, answer: Estimate, timeline: Path | None, snapshot: Path | None) -> None:
    from ullage.estimation.timeline import page
    from ullage.estimation.timeline import snapshot as snapshot_file

    if timeline is not None:
        page.write(trace, answer, timeline)
    if snapshot is not None:
        snapshot_file.write(trace, snapshot)


def _check_writable(*files: Path | None) -> None:
    """Before the work, not after it."""
    for file in files:
        if file is not None and (not file.parent.is_dir() or file.is_dir()):
            raise InvalidValue(f"cannot write {file}: needed a file in a folder that exists")


def _advice(job: Job, card: GPU, answer: Estimate, progress: Callable[[str], None]) -> Sequence[Option]:
    from ullage.estimation import advice

    configuration = job.configuration()
    if configuration is not None:
        return advice.options(configuration, card, progress=progress, answer=answer)
    larger = advice.larger_gpu(job.run, answer, progress)
    return [] if larger is None else [larger]


def _over_gpus(job: Job, names: str, as_json: bool) -> None:
    from ullage.estimation.over_gpus import estimate_over_gpus
    from ullage.estimation.report import print_gpu_table
    from ullage.hardware import gpu_list
    from ullage.hardware import gpus as all_gpus

    whole = [card for card in all_gpus() if not card.is_mig]
    cards = whole if names.strip().casefold() == "all" else gpu_list(names)
    with Console(stderr=True).status("estimating ...") as status:
        if job.is_ullage:
            answers = estimate_over_gpus(job.run, cards, lambda name: status.update(f"running on a virtual {name} ..."))
        else:
            answers = [job.run(card) for card in cards]
    if as_json:
        print(json.dumps([answer.to_dict(timeline=False) for answer in answers]))
    else:
        print_gpu_table(answers, Console())
