"""`ullage estimate`, `ullage check` and `ullage max-batch`: how much memory a job takes, and what fits."""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ullage.cli import completion
from ullage.cli.exit_codes import DONE, FAILED, WRONG
from ullage.cli.options import (
    ALL,
    RANKS,
    EstimateTarget,
    FollowOptions,
    Gpu,
    Gpus,
    InterconnectNames,
    Json,
    ModelOptions,
    RankOptions,
    ScriptArguments,
    Source,
    default_gpu_hint,
    target_of,
    with_options,
)
from ullage.errors import InvalidValue, UllageError
from ullage.units import format_bytes, parse_bytes

if TYPE_CHECKING:
    from ullage.estimation.advice import Option
    from ullage.estimation.result import Estimate
    from ullage.estimation.timeline.trace import Trace
    from ullage.hardware import GPU
    from ullage.jobs import Configuration
    from ullage.performance.cost import TrainingPlan

FITS, DOES_NOT_FIT, CANNOT_TELL = DONE, FAILED, WRONG  # exit codes of `ullage check`
USUAL_TRIALS = 12  # of `ullage max-batch`, for its progress bar
OUTPUT, LENGTH = "Output", "How long a training takes, and what it costs"


@with_options(FollowOptions, RankOptions, ModelOptions)
def check(
    source: Source,
    args: ScriptArguments = None,
    gpu: Gpu = None,
    margin: Annotated[
        str, typer.Option(help="Memory that must stay free: a size (2GiB) or a share of the GPU (5%).", metavar="SIZE")
    ] = "0",
    upper: Annotated[bool, typer.Option("--upper", help="Judge by the upper bound, not by the likely figure.")] = False,
    as_json: Json = False,
    **options: Any,
) -> None:
    """Check whether a job fits on a GPU, for scripts and CI.

    Prints one line. Exits with 0 if the job fits, 1 if it does not, and 2 if there is no answer, for example because
    a name is wrong or the script fails.

    Examples:

      ullage check torchvision:resnet50 --batch-size 64 --gpu RTX-4090 --margin 10%
      ullage check train.py --gpu A100-40GB --upper -- --batch-size 256
    """
    from rich.console import Console

    from ullage.hardware import default_gpu
    from ullage.hardware import gpu as find_gpu

    try:
        card = find_gpu(gpu or default_gpu())
        needed = parse_margin(margin, card.usable)
        target = target_of(source, args, **options)
        from rich.console import Console

        with Console(stderr=True).status(f"running {source} on a virtual {card.name} ..."):
            answer = target.run(card)
    except Exception as error:  # whatever it is, it must not look like "does not fit" to a pipeline
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
    """Whether an estimate leaves `margin` bytes free, and the line that says so."""
    taken = answer.bound if upper else answer.needed
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


@with_options(FollowOptions, RankOptions, ModelOptions)
def max_batch(
    source: Source,
    args: ScriptArguments = None,
    gpu: Gpu = None,
    what: Annotated[
        str, typer.Option(help="What to make larger: batch-size, sequence-length or image-size.", metavar="NAME",
                          autocompletion=lambda: ["batch-size", "sequence-length", "image-size"])
    ] = "batch-size",
    jobs: Annotated[bool, typer.Option("--jobs", help="Count how many such jobs fit on the GPU at once.")] = False,
    batch_arg: Annotated[
        str | None, typer.Option(help="For a script: its argument that sets the size.", metavar="--batch-size")
    ] = None,
    as_json: Json = False,
    **options: Any,
) -> None:  # fmt: skip
    """Find the largest batch that trains on a GPU.

    The batch size that is printed fits and the next larger one does not.

    Examples:

      ullage max-batch timm:vit_small_patch16_224 --gpu RTX-4090
      ullage max-batch hf:BertForMaskedLM --what sequence-length -b 8 -p amp_bf16 --gpu A100-40GB
      ullage max-batch train.py --batch-arg=--batch-size --gpu L4 -- --epochs 1
      ullage max-batch torchvision:resnet18 --jobs -b 32 --gpu H200
    """
    target = target_of(source, args, **options)
    if jobs:
        _count_jobs(target, gpu, as_json)
    else:
        _search(target, gpu, what, batch_arg, as_json)


def _search(target: EstimateTarget, gpu: str | None, what: str, batch_arg: str | None, as_json: bool) -> None:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn

    from ullage.estimation.largest_batch import max_batch as largest
    from ullage.hardware import default_gpu

    columns = SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("first estimate", total=USUAL_TRIALS)

        def after_trial(trial: int, number: int, answer: Estimate) -> None:
            words = f"{number} {'fits' if answer.fits else 'does not fit'}"
            bar.update(task, completed=trial, total=max(USUAL_TRIALS, trial + 1), description=words)

        found = largest(
            target.source, gpu=gpu or default_gpu(), what=what, batch_arg=batch_arg, progress=after_trial,
            **target.options,
        )  # fmt: skip
    if as_json:
        print(json.dumps(found.to_dict()))
    else:
        print(found.report())
        print(f"{found.trials} estimates in {found.seconds:.1f} s, without a GPU")
        _print_default_gpu(gpu, found.gpu)


def _count_jobs(target: EstimateTarget, gpu: str | None, as_json: bool) -> None:
    from rich.console import Console

    from ullage.estimation.largest_batch import jobs_together
    from ullage.hardware import default_gpu
    from ullage.hardware import gpu as find_gpu

    with Console(stderr=True).status(f"estimating {target.source} ..."):
        answer = target.run(find_gpu(gpu or default_gpu()))
    count = jobs_together(answer)
    if as_json:
        print(json.dumps({"jobs": count, "estimate": answer.to_dict(timeline=False, layers=False)}))
        return
    each = f"each takes at most {format_bytes(answer.bound)} of {format_bytes(answer.gpu_memory)}"
    print(f"{count} such jobs fit on {answer.gpu} together: {each}")
    _print_default_gpu(gpu, answer.gpu)


def _print_default_gpu(gpu: str | None, taken: str) -> None:
    if hint := default_gpu_hint(gpu, taken):
        print(hint)


@with_options(FollowOptions, RankOptions, ModelOptions)
def estimate(
    source: Source,
    args: ScriptArguments = None,
    gpu: Gpus = None,
    estimator: Annotated[
        str, typer.Option("--estimator", "-e", help="Which estimator to use: ullage, or a published one such as "
                          "horus, faketensor, deepspeed, llmem, dnnmem or accelerate. Set its own options with "
                          "--set NAME.KEY=VALUE.", metavar="NAME", autocompletion=completion.estimators)
    ] = "ullage",
    interconnect: InterconnectNames = None,
    parallel: Annotated[
        str | None, typer.Option("--parallel", help="How a model by name is spread over ranks: ddp, fsdp2, tp or pp.",
                                 metavar="NAME", show_default="ddp", rich_help_panel=RANKS,
                                 autocompletion=completion.parallel)
    ] = None,
    max_batch: Annotated[bool, typer.Option("--max-batch", help="Find the largest batch that fits.")] = False,
    batch_arg: Annotated[
        str | None, typer.Option(help="With --max-batch: the script's argument that sets the size.",
                                 metavar="--batch-size")
    ] = None,
    as_json: Json = False,
    timeline: Annotated[
        Path | None, typer.Option(help="Write the memory over time as an HTML page.", metavar="FILE.html",
                                  rich_help_panel=OUTPUT)
    ] = None,
    snapshot: Annotated[
        Path | None, typer.Option(help="Write a memory snapshot for PyTorch's viewer, pytorch.org/memory_viz.",
                                  metavar="FILE.pickle",
                                  rich_help_panel=OUTPUT)
    ] = None,
    advice: Annotated[
        bool, typer.Option("--advice/--no-advice", help="If the job does not fit, estimate changes that make it fit.",
                           rich_help_panel=OUTPUT)
    ] = True,
    layers: Annotated[
        bool, typer.Option("--layers", help="Show the layers of the model: class, output, parameters, activations.",
                           rich_help_panel=OUTPUT)
    ] = False,
    depth: Annotated[
        int, typer.Option(help="With --layers: how many levels of modules to show.", metavar="N",
                          rich_help_panel=OUTPUT)
    ] = 3,
    show_output: Annotated[
        bool, typer.Option("--show-output", help="Show what the script prints.", rich_help_panel=OUTPUT)
    ] = False,
    serve: Annotated[
        bool, typer.Option("--serve", help="Serve a web page with the answer, and print its link.",
                           rich_help_panel=OUTPUT)
    ] = False,
    open_page: Annotated[
        bool, typer.Option("--open", help="The same, and open it in a browser.", rich_help_panel=OUTPUT)
    ] = False,
    epochs: Annotated[
        float | None, typer.Option(help="How often the data is gone through.", metavar="N", rich_help_panel=LENGTH,
                                   show_default="1 with --samples")
    ] = None,
    samples: Annotated[
        int | None, typer.Option(help="Samples in an epoch.", metavar="N", rich_help_panel=LENGTH,
                                 show_default="what a script's DataLoader says")
    ] = None,
    samples_per_step: Annotated[
        int | None, typer.Option(help="Samples that a step takes.", metavar="N", rich_help_panel=LENGTH,
                                 show_default="the batch of a model, or of a script's DataLoader")
    ] = None,
    total_steps: Annotated[
        int | None, typer.Option(help="The length in steps, instead of --epochs and --samples.", metavar="N",
                                 rich_help_panel=LENGTH)
    ] = None,
    input_rate: Annotated[
        float | None, typer.Option(help="Samples that the data loader delivers in a second, as you measured it: a step "
                                   "is not quicker than its input.", metavar="N", rich_help_panel=LENGTH)
    ] = None,
    prices: Annotated[
        Path | None, typer.Option(help="A TOML file with prices of GPUs by the hour and of a kilowatt hour.",
                                  metavar="FILE.toml", rich_help_panel=LENGTH,
                                  show_default="prices.toml in Ullage's folder, if it is there")
    ] = None,
    **options: Any,
) -> None:  # fmt: skip
    """Estimate how much GPU memory a model or a training script takes, how long a step takes, and what training costs.

    SOURCE is one of:

      torchvision:NAME         a model of torchvision
      timm:NAME                a model of timm
      hf:ORG/NAME, hf:FOLDER   a model of the Hugging Face hub, or a folder with a config.json
      hf:CLASS                 a class of transformers
      package.module:factory   your own function that returns a model
      path/file.py:factory     the same, in a file
      path/script.py           a training script as it is; its arguments come after --
      summary.txt              output of torchsummary or torchinfo, for --estimator horus

    Examples:

      ullage estimate torchvision:resnet50 --batch-size 64 --gpu A100-40GB
      ullage estimate timm:vit_small_patch16_224 -b 128 -p amp_bf16 --gpu all
      ullage estimate hf:Qwen/Qwen3-8B --lora 16 --quantize nf4 --gpu RTX-4090
      ullage estimate hf:GPT2LMHeadModel --set n_layer=24 --sequence-length 1024 --checkpointing
      ullage estimate train.py --gpu RTX-4090 -- --epochs 90 --batch-size 256
      ullage estimate train.py --python ~/project/.venv -- --epochs 90
      ullage estimate train.py --max-batch --batch-arg=--batch-size
      ullage estimate train.py --world-size 8 --gpu H100 -- --epochs 90
      ullage estimate hf:Qwen/Qwen3-8B --world-size 8 --parallel fsdp2 --gpu H100 -b 4
      ullage estimate train.py --world-size 16 --nodes 2 --gpu A100-80GB --interconnect nvlink3,eth-100
      ullage estimate --gpu H100 torchrun --nnodes 2 --nproc-per-node 8 train.py --epochs 90
      ullage estimate --gpu H100 accelerate launch --config_file fsdp.yaml train.py
      ullage estimate torchvision:resnet50 -b 64 --layers --depth 2
      ullage estimate train.py --serve
      ullage estimate torchvision:resnet50 -b 256 --epochs 90 --samples 1281167 --gpu all --prices prices.toml
      ullage estimate train.py --epochs 90 --input-rate 2400 --gpu H200
      ullage estimate torchvision:resnet50 --estimator deepspeed --set deepspeed.stage=3
      ullage estimate summary.txt --estimator horus --batch-size 32
    """
    options |= {"show_output": show_output, "interconnect": interconnect, "parallel": parallel}
    target = target_of(source, args, estimator=estimator, **options)
    asked = {
        "epochs": epochs, "samples": samples, "samples_per_step": samples_per_step, "total_steps": total_steps,
        "input_rate": input_rate, "prices": prices,
    }  # fmt: skip
    length = {f"--{name.replace('_', '-')}": value for name, value in asked.items()}
    if not target.is_ullage:
        own = {"--max-batch": max_batch, "--timeline": timeline, "--snapshot": snapshot, "--layers": layers}
        _refuse(own | length, f"is for Ullage's own estimate; the estimator {estimator} has none")
    if max_batch:
        _refuse(length, "is for one estimate: leave out --max-batch")
        _search(target, gpu, "batch-size", batch_arg, as_json)
        return
    plan = _plan(target, asked)
    helps: Sequence[Option] = ()
    if serve or open_page:
        from ullage.cli.page import check_page

        check_page()
    if gpu is not None and ("," in gpu or gpu.strip().casefold() == ALL):
        answers = _over_gpus(target, plan, gpu, as_json)
    else:
        answer, helps = _one(target, plan, gpu, as_json, timeline, snapshot, advice, depth if layers else None)
        answers = [answer]
    if serve or open_page:
        _serve(target, answers, helps, open_page)


def _serve(target: EstimateTarget, answers: list[Estimate], options: Sequence[Option], opens: bool) -> None:
    """Show the answers as a page, with the question as its form has it."""
    from ullage.cli.page import serve_answer
    from ullage.jobs.kinds import SCRIPT

    question: dict[str, Any] = {"gpu": [answer.gpu for answer in answers]}
    if target.workload.kind != SCRIPT:
        question |= {"model": target.source, "options": {**target.options}}
    elif not target.workload.run.module:
        text = Path(target.source).read_text(errors="replace")
        question |= {"script": text, "args": list(target.workload.args), "cwd": os.getcwd()}
    advice = {"options": [each.to_dict() for each in options], "largest": None} if options else None
    serve_answer(question, [answer.to_dict(layers=False) for answer in answers], advice, opens)


def _refuse(options: dict[str, Any], why: str) -> None:
    """Options that have no meaning here are refused, not ignored."""
    for name, value in options.items():
        if value:
            raise InvalidValue(f"{name} {why}")


def _plan(target: EstimateTarget, asked: dict[str, Any]) -> TrainingPlan:
    from ullage.estimation.asking import check_plan
    from ullage.performance.cost import TrainingPlan

    plan = TrainingPlan.of(**asked)
    check_plan(plan, target.workload)
    return plan


def _one(
    target: EstimateTarget,
    plan: TrainingPlan,
    gpu: str | None,
    as_json: bool,
    timeline: Path | None,
    snapshot: Path | None,
    wants_advice: bool,
    depth: int | None,
) -> tuple[Estimate, Sequence[Option]]:
    from ullage.hardware import default_gpu
    from ullage.hardware import gpu as find_gpu

    card = find_gpu(gpu or default_gpu())
    _check_writable(timeline, snapshot)
    from rich.console import Console

    errors = Console(stderr=True)
    doing = f"running {target.source} on a virtual {card.name}" if target.is_ullage else f"asking {target.estimator}"
    with errors.status(f"{doing} ...") as status:
        if target.workload.kind == "script":
            target = target.telling(lambda text: status.update(f"{doing} ... {text}"))
        answer, trace = _traced(target, card) if timeline or snapshot else (target.run(card), None)
    answer = (answer if gpu is not None else answer.on_assumed_gpu()).for_training(plan)
    if trace is not None:
        _write(trace, answer, timeline, snapshot)
    if as_json:
        print(answer.to_json(timeline=False, layers=depth is not None))
        return answer, ()
    options: Sequence[Option] = ()
    if wants_advice and not answer.fits and target.is_ullage:
        with errors.status("looking for what would make it fit ...") as status:
            options = _advice(target, card, answer, lambda text: status.update(f"estimating {text} ..."))
    from ullage.estimation.report import print_layers, print_report

    print_report(answer, Console(), options)
    if depth is not None:
        print()
        print_layers(answer, Console(), depth)
    return answer, options


def _traced(target: EstimateTarget, card: GPU) -> tuple[Estimate, Trace]:
    from ullage.estimation.timeline.trace import Trace

    if target.workload.kind != "script":
        trace = Trace()
        return target.run(card, trace=trace), trace
    with tempfile.TemporaryDirectory() as folder:  # a script runs in a process of its own
        file = Path(folder) / "trace.npz"
        answer = target.run(card, trace_file=file)
        return answer, Trace.load(file)


def _write(trace: Trace, answer: Estimate, timeline: Path | None, snapshot: Path | None) -> None:
    from ullage.estimation.timeline import page
    from ullage.estimation.timeline import snapshot as snapshot_file

    if timeline is not None:
        page.write(trace, answer, timeline)
    if snapshot is not None:
        snapshot_file.write(trace, snapshot)


def _check_writable(*files: Path | None) -> None:
    """Say that a file cannot be written before the work, not after it."""
    for file in files:
        if file is not None and (not file.parent.is_dir() or file.is_dir()):
            raise InvalidValue(f"cannot write {file}: needed a file in a folder that exists")


def _advice(target: EstimateTarget, card: GPU, answer: Estimate, progress: Callable[[str], None]) -> Sequence[Option]:
    from ullage.estimation import advice

    def run(configuration: Configuration, gpu: GPU) -> Estimate:
        return replace(target, workload=replace(target.workload, configuration=configuration)).run(gpu)

    if target.workload.configuration is not None:
        return advice.options(target.workload.configuration, card, run, progress=progress, answer=answer)
    larger = advice.larger_gpu(target.run, answer, progress)
    return [] if larger is None else [larger]


def _over_gpus(target: EstimateTarget, plan: TrainingPlan, names: str, as_json: bool) -> list[Estimate]:
    from rich.console import Console

    from ullage.estimation.over_gpus import estimate_over_gpus
    from ullage.estimation.report import print_gpu_table
    from ullage.hardware import gpu_list
    from ullage.hardware import gpus as all_gpus

    whole = [card for card in all_gpus() if not card.is_mig]
    cards = whole if names.strip().casefold() == ALL else gpu_list(names)
    with Console(stderr=True).status("estimating ...") as status:
        if target.is_ullage:
            answers = estimate_over_gpus(
                target.run, cards, lambda name: status.update(f"running on a virtual {name} ...")
            )
        else:
            answers = [target.run(card) for card in cards]
    answers = [answer.for_training(plan) for answer in answers]
    if as_json:
        print(json.dumps([answer.to_dict(timeline=False, layers=False) for answer in answers]))
    else:
        print_gpu_table(answers, Console())
    return answers
