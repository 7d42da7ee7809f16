"""`ullage compare`: the answers of all estimators for one job side by side, and measured runs if there are any."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from ullage.cli import completion
from ullage.cli.options import (
    EstimateTarget,
    Gpu,
    Json,
    Module,
    Network,
    Python,
    ScriptArguments,
    Source,
    default_gpu_hint,
    target_of,
    with_model_options,
)
from ullage.errors import InvalidValue, UnknownName
from ullage.units import format_bytes, format_duration, parse_duration

if TYPE_CHECKING:
    from ullage.hardware import GPU
    from ullage.research.ranking.truth import MeasuredRun
    from ullage.research.ranking.worker import Record


@with_model_options
def compare(
    source: Source,
    args: ScriptArguments = None,
    gpu: Gpu = None,
    estimators: Annotated[
        str, typer.Option(help="Which estimators to ask: 'all', or names separated by commas.", metavar="all|A,B,C",
                          autocompletion=completion.several_estimators)
    ] = "all",
    truth: Annotated[
        Path | None, typer.Option(help="A file of measured runs (JSONL, or a table for the A100): show those of the "
                                  "same job.",
                                  metavar="FILE")
    ] = None,
    measure: Annotated[
        bool, typer.Option("--measure/--no-measure", help="Also run the job, if this machine has that GPU.")
    ] = True,
    module: Module = False,
    network: Network = False,
    python: Python = None,
    timeout: Annotated[
        str, typer.Option(help="Give up on an estimator after this long, such as 90s or 10m.", metavar="TIME")
    ] = "5m",
    as_json: Json = False,
    **model: Any,
) -> None:  # fmt: skip
    """Estimate one job with every estimator and print the answers side by side.

    Each estimator runs in a process of its own; its time includes starting that process and building the model.
    Two of them, xmem and veritasest, run the job on the CPU and can take minutes; --estimators leaves them out.

    Examples:

      ullage compare torchvision:resnet50 --batch-size 64 --gpu A100-40GB
      ullage compare hf:GPT2LMHeadModel --sequence-length 512 -b 4 --estimators ullage,xmem,llmem
      ullage compare timm:resnet50 -b 32 -O adam --truth faketensor_timm_a100.csv --gpu A100-40GB
    """
    from ullage.estimation.asking import estimator_list
    from ullage.hardware import default_gpu
    from ullage.hardware import gpu as find_gpu

    names = estimator_list(estimators)
    card = find_gpu(gpu or default_gpu())
    target = target_of(source, args, module, 3, None, False, model, network=network, python=python)
    _check(target)
    row = _row(target)
    runs = _truth(target, row, card, truth, measure)
    records = _ask(names, row, gpu or default_gpu(), parse_duration(timeout))
    if as_json:
        print(json.dumps(_plain(source, card, records, runs)))
    else:
        _print(source, card, records, runs)
        if hint := default_gpu_hint(gpu, card.name):
            print(hint)
    if not any(record.given for record in records):
        raise typer.Exit(1)


def _check(target: EstimateTarget) -> None:
    """A mistake that no estimator could do anything about is said once, before all of them are asked."""
    from ullage.workloads.sources.names import model_names

    configuration = target.workload.configuration
    if configuration is None:
        if not target.workload.run.module and not Path(target.source).is_file():
            raise InvalidValue(f"cannot read {target.source}: there is no such script")
        return
    known = model_names(configuration.source) if configuration.source in ("torchvision", "timm") else ()
    if known and configuration.name.partition(".")[0] not in known:
        raise UnknownName(f"{configuration.source} model", configuration.name, known)


def _row(target: EstimateTarget) -> dict[str, Any]:
    """The job as plain values, for the process of an estimator."""
    configuration = target.workload.configuration
    if configuration is not None:
        return configuration.to_row()
    run = {name: value for name, value in target.options.items() if name not in ("args", "show_output")}
    return {"script": str(Path(target.source).resolve()), "args": target.options.get("args", []), "run": run}


def _truth(
    target: EstimateTarget, row: dict[str, Any], card: GPU, file: Path | None, measure: bool
) -> list[tuple[str, MeasuredRun]]:
    """Measured runs of this job: those in the file, and one on this machine's GPU."""
    from ullage.hardware import local_gpus

    found: list[tuple[str, MeasuredRun]] = []
    configuration = target.workload.configuration
    if file is not None:
        if configuration is None:
            raise InvalidValue("--truth: files of measured runs hold models by name, not scripts")
        from ullage.research.ranking.truth import matching, read_truth

        sets = [one for one in read_truth(file) if one.gpu == card.name]
        if not sets:
            raise InvalidValue(f"--truth: {file} has no runs on {card.name}; choose the GPU with --gpu")
        found = [(f"{one.name}, {run.id}", run) for one in sets for run in matching(configuration, one.runs)]
    here = local_gpus()
    if measure and here and here[0].name == card.name:
        found.append(("measured here, now", _measured(row)))
    return found


def _measured(row: dict[str, Any]) -> MeasuredRun:
    from ullage.research.measure.runs import RunRequest, measure_apart
    from ullage.research.ranking.truth import run_of

    module = bool(row.get("run", {}).get("module"))
    request = RunRequest(row=row, script=row.get("script"), args=list(row.get("args", [])), module=module)
    with Console(stderr=True).status("running it on this machine's GPU ..."):
        found = measure_apart(request)
    if "failed" in found:
        raise InvalidValue(f"the run on this machine's GPU failed: {found['failed']} (--no-measure leaves it out)")
    return run_of({**row, **found, "id": "local"}, 0, Path())


def _ask(names: list[str], row: dict[str, Any], gpu: str, limit: float) -> list[Record]:
    from ullage.estimation.asking import ask
    from ullage.research.ranking.worker import ask_apart

    records = []
    with Console(stderr=True).status("...") as status:
        for name in names:
            status.update(f"asking {name} ...")
            records.append(ask_apart(ask, name, "this", row, gpu, limit))
    return records


def _plain(source: str, card: GPU, records: list[Record], runs: list[tuple[str, MeasuredRun]]) -> dict[str, Any]:
    from ullage.research.ranking.standings import OWN, error

    truths = [
        {"name": name, "allocated": run.allocated, "reserved": run.reserved, "process": run.process, "oom": run.oom}
        for name, run in runs
    ]
    answers = [
        {**record.to_dict(), "errors": {name: error(record, run, OWN) for name, run in runs}} for record in records
    ]
    return {"source": source, "gpu": card.name, "gpu_memory": card.usable, "truth": truths, "estimates": answers}


def _print(source: str, card: GPU, records: list[Record], runs: list[tuple[str, MeasuredRun]]) -> None:
    from ullage.research.ranking.standings import OWN, error

    console = Console()
    console.print(f"[bold]{source}[/] on {card.name} ({format_bytes(card.usable)})")
    for name, run in runs:
        known = [(run.allocated, "allocated"), (run.reserved, "reserved"), (run.process, "of the process")]
        told = ", ".join(f"{format_bytes(size)} {word}" for size, word in known if size is not None)
        console.print(f"truth ({name}): {'ran out of memory; ' if run.oom else ''}{told}")
    if not runs:
        console.print("truth: not known (--truth FILE, or a machine with this GPU)")
    table = Table(
        "estimator", "figure", "what it is", *(["error"] * len(runs)), "time", "fits", box=None, padding=(0, 2)
    )
    for record in records:
        if record.figure is None:
            why = f"not supported: {record.unsupported}" if record.unsupported else f"failed: {record.failed}"
            table.add_row(record.estimator, "-", why, *([""] * len(runs)), format_duration(record.seconds), "")
            continue
        errors = [error(record, run, OWN) for _, run in runs]
        whole = record.process if record.process is not None else record.figure + (card.context or 0)
        table.add_row(
            record.estimator, format_bytes(record.figure), f"{record.kind} memory",
            *("" if value is None else f"{value:+.1%}" for value in errors),
            format_duration(record.seconds), "yes" if whole <= card.usable else "no",
        )  # fmt: skip
    console.print(table)
