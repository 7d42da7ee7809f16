"""`ullage max-batch`: the largest batch that a GPU can train with."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from ullage.cli.job import Job, Script, Source, Steps, Timeout, job_of
from ullage.cli.model_options import with_model_options
from ullage.cli.options import Gpu, Json
from ullage.units import format_bytes

if TYPE_CHECKING:
    from ullage.estimate import Estimate

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

    from ullage.estimate.max_batch import max_batch as largest

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
    from ullage.estimate.max_batch import jobs_together
    from ullage.gpus import gpu as find_gpu

    with Console(stderr=True).status(f"estimating {job.source} ..."):
        answer = job.run(find_gpu(gpu))
    count = jobs_together(answer)
    if as_json:
        print(json.dumps({"jobs": count, "estimate": answer.to_dict(timeline=False)}))
        return
    each = f"each takes at most {format_bytes(answer.bound)} of {format_bytes(answer.gpu_memory)}"
    print(f"{count} such jobs fit on {answer.gpu} together: {each}")
