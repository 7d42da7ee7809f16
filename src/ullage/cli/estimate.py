"""`ullage estimate`: how much memory a model, by its name, or a script will take."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from ullage.cli import completion
from ullage.cli.job import Job, Script, Source, Steps, Timeout, job_of
from ullage.cli.max_batch import search
from ullage.cli.model_options import with_model_options
from ullage.cli.options import Gpu, Json
from ullage.errors import InvalidValue

if TYPE_CHECKING:
    from ullage.estimate import Estimate
    from ullage.estimate.advice import Option
    from ullage.estimate.trace import Trace
    from ullage.gpus import GPU

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
    from ullage.gpus import gpu as find_gpu

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
    from ullage.estimate.report import print_report

    print_report(answer, Console(), options)


def _traced(job: Job, card: GPU) -> tuple[Estimate, Trace]:
    from ullage.estimate.trace import Trace

    if not job.is_script:
        trace = Trace()
        return job.run(card, trace=trace), trace
    with tempfile.TemporaryDirectory() as folder:  # a script runs in a process of its own
        file = Path(folder) / "trace.npz"
        answer = job.run(card, trace_file=file)
        return answer, Trace.load(file)


def _write(trace: Trace, answer: Estimate, timeline: Path | None, snapshot: Path | None) -> None:
    from ullage.estimate import snapshot as snapshot_file
    from ullage.estimate import timeline_page

    if timeline is not None:
        timeline_page.write(trace, answer, timeline)
    if snapshot is not None:
        snapshot_file.write(trace, snapshot)


def _check_writable(*files: Path | None) -> None:
    """Before the work, not after it."""
    for file in files:
        if file is not None and (not file.parent.is_dir() or file.is_dir()):
            raise InvalidValue(f"cannot write {file}: needed a file in a folder that exists")


def _advice(job: Job, card: GPU, answer: Estimate, progress: Callable[[str], None]) -> Sequence[Option]:
    from ullage.estimate import advice

    configuration = job.configuration()
    if configuration is not None:
        return advice.options(configuration, card, progress=progress, answer=answer)
    larger = advice.larger_gpu(job.run, answer, progress)
    return [] if larger is None else [larger]


def _over_gpus(job: Job, names: str, as_json: bool) -> None:
    from ullage.estimate.over_gpus import estimate_over_gpus
    from ullage.estimate.report import print_gpu_table
    from ullage.gpus import gpu_list
    from ullage.gpus import gpus as all_gpus

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
