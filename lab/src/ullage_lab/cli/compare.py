"""`ullage lab compare`: the estimates of all estimators for one job side by side, and measured runs, if any."""

from __future__ import annotations

import json
import shutil
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from ullage.cli import completion
from ullage.cli.exit_codes import FAILED
from ullage.cli.options import (
    ALL,
    MODEL_OPTIONS,
    SCRIPT_OPTIONS,
    Gpu,
    Json,
    ScriptArguments,
    Source,
    default_gpu_hint,
    option,
    request_from,
    with_options,
)
from ullage.cli.progress import Following, following
from ullage.cli.tables import aligned
from ullage.errors import InvalidValue, UllageError, UnknownName
from ullage.text import plain
from ullage.units import format_bytes, format_duration, parse_duration
from ullage_lab.cli.ranking import estimator_list

if TYPE_CHECKING:
    from ullage.hardware import GPU
    from ullage.jobs.job import JobRequest
    from ullage_lab.judge.truth import MeasuredRun
    from ullage_lab.judge.worker import Record

# Estimators that run the job's training on the CPU, which takes minutes and the machine's memory.
TRAIN_ON_THE_CPU = ("xmem", "veritasest")
_LEAST_ROOM = 30  # columns for the reason of a missing estimate


@with_options(SCRIPT_OPTIONS, MODEL_OPTIONS)
def compare(
    source: Source,
    args: ScriptArguments = None,
    gpu: Gpu = None,
    estimators: Annotated[
        str | None,
        option(
            "Estimators to run: 'all', or names separated by commas.",
            "all|A,B,C",
            default="all but those that train on the CPU",
            complete=completion.several_estimators,
        ),
    ] = None,
    truth: Annotated[
        Path | None,
        option("A file of measured runs (JSONL, or a table for the A100): show those of the same job.", "FILE"),
    ] = None,
    measure: Annotated[
        bool, option("Also run the job, if this machine has that GPU.", "--measure/--no-measure")
    ] = True,
    timeout: Annotated[str, option("Give up on an estimator after this long, such as 90s or 10m.", "TIME")] = "5m",
    as_json: Json = False,
    **options: Any,
) -> None:
    """Estimate one job with every estimator and print the answers side by side, as they come.

    Each estimator runs in a process of its own; its time includes starting that process and building the model.
    Two of them, xmem and veritasest, train the job on the CPU, which takes minutes: they run only with
    --estimators all, or by name. After Ctrl-C, it prints the answers so far.

    Examples:

      ullage lab compare torchvision:resnet50 --batch-size 64 --gpu A100-40GB
      ullage lab compare torchvision:resnet50 --batch-size 64 --estimators all
      ullage lab compare hf:GPT2LMHeadModel --sequence-length 512 -b 4 --estimators ullage,xmem,llmem
      ullage lab compare timm:resnet50 -b 32 -O adam --truth faketensor_timm_a100.csv --gpu A100-40GB
    """
    from ullage.hardware import default_gpu
    from ullage.hardware import gpu as find_gpu

    names = estimator_list(estimators or ALL)
    if estimators is None:
        names = [name for name in names if name not in TRAIN_ON_THE_CPU]
    card = find_gpu(gpu or default_gpu())
    request = request_from(source, args, **options)
    _check(request)
    row = request.to_row()
    runs = _truth(request, row, card, truth, measure)
    table = None if as_json else _Table(card, runs, names)
    records: list[Record] = []
    if table is not None:
        _print_head(source, card, runs)
        print(table.head(), flush=True)
    with following("asking estimators", len(names), stoppable=True) as going:
        for record in _answers(names, row, gpu or default_gpu(), parse_duration(timeout), going):
            records.append(record)
            if table is not None:
                print(table.line(record), flush=True)
    if as_json:
        print(json.dumps(_plain(source, card, records, runs)))
    elif hint := default_gpu_hint(gpu, card.name):
        print(hint)
    if estimators is None:
        print(
            f"not asked: {', '.join(TRAIN_ON_THE_CPU)}, which train on the CPU for minutes (--estimators all)",
            file=sys.stderr,
        )
    going.end()
    if not any(record.given for record in records):
        raise typer.Exit(FAILED)


def _check(request: JobRequest) -> None:
    """Raise errors that would be the same for all estimators, once, before any of them runs."""
    from ullage.jobs.sources.names import model_names

    configuration = request.model
    if configuration is None:
        script = request.script
        if script is not None and not script.module and not Path(script.path).is_file():
            raise InvalidValue(f"cannot read {script.path}: there is no such script")
        return
    known = model_names(configuration.source) if configuration.source in ("torchvision", "timm") else ()
    if known and configuration.short_name.partition(".")[0] not in known:
        raise UnknownName(f"{configuration.source} model", configuration.short_name, known)


def _truth(
    request: JobRequest, row: dict[str, Any], card: GPU, file: Path | None, measure: bool
) -> list[tuple[str, MeasuredRun]]:
    """Return measured runs of this job: those in the file, and one on this machine's GPU."""
    from ullage.hardware import local_gpus

    runs: list[tuple[str, MeasuredRun]] = []
    configuration = request.model
    if file is not None:
        if configuration is None:
            raise InvalidValue("--truth: files of measured runs hold models by name, not scripts")
        from ullage_lab.judge.truth import matching, read_truth

        sets = [one for one in read_truth(file) if one.gpu == card.name]
        if not sets:
            raise InvalidValue(f"--truth: {file} has no runs on {card.name}; choose the GPU with --gpu")
        runs = [(f"{one.name}, {run.id}", run) for one in sets for run in matching(configuration, one.runs)]
    here = local_gpus()
    if measure and here and here[0].name == card.name:
        runs.append(("measured here, now", _measured(row)))
    return runs


def _measured(row: dict[str, Any]) -> MeasuredRun:
    from ullage.measuring.runs import RunRequest, measure_apart
    from ullage_lab.judge.truth import run_of

    module = bool(row.get("run", {}).get("module"))
    request = RunRequest(row=row, script=row.get("script"), args=list(row.get("args", [])), module=module)
    with Console(stderr=True).status("running it on this machine's GPU ..."):
        reading = measure_apart(request)
    if "failed" in reading:
        raise UllageError(f"the run on this machine's GPU failed: {reading['failed']} (--no-measure leaves it out)")
    return run_of({**row, **reading, "id": "local"}, 0, Path())


def _answers(names: list[str], row: dict[str, Any], gpu: str, limit: float, going: Following) -> Iterator[Record]:
    from ullage.estimation.asking import ask
    from ullage_lab.judge.worker import ask_apart

    for name in names:
        going.doing(name)
        yield ask_apart(ask, name, "this", row, gpu, limit)
        going.step()


def _plain(source: str, card: GPU, records: list[Record], runs: list[tuple[str, MeasuredRun]]) -> dict[str, Any]:
    from ullage_lab.judge.standings import OWN, error

    truths = [
        {"name": name, "allocated": run.allocated, "reserved": run.reserved, "process": run.process, "oom": run.oom}
        for name, run in runs
    ]
    answers = [
        {**record.to_dict(), "errors": {name: error(record, run, OWN) for name, run in runs}} for record in records
    ]
    return {"source": source, "gpu": card.name, "gpu_memory": card.usable, "truth": truths, "estimates": answers}


def _print_head(source: str, card: GPU, runs: list[tuple[str, MeasuredRun]]) -> None:
    print(f"{source} on {card.name} ({format_bytes(card.usable)})")
    for name, run in runs:
        known = [(run.allocated, "allocated"), (run.reserved, "reserved"), (run.process, "of the process")]
        sizes = ", ".join(f"{format_bytes(size)} {word}" for size, word in known if size is not None)
        print(f"truth ({name}): {'ran out of memory; ' if run.oom else ''}{sizes}")
    if not runs:
        print("truth: not known (--truth FILE, or a machine with this GPU)")


class _Table:
    """The estimates, one per line; the widths of columns are fixed before the first one."""

    def __init__(self, card: GPU, runs: list[tuple[str, MeasuredRun]], names: list[str]) -> None:
        self._card, self._runs = card, runs
        self._widths = [max(map(len, (*names, "estimator"))), 8, 16, *([7] * len(runs)), 12, 4]
        self._right = [False, True, False, *([True] * len(runs)), True, False]

    def head(self) -> str:
        return self._line("estimator", "figure", "what it is", *(["error"] * len(self._runs)), "time", "fits")

    def line(self, record: Record) -> str:
        from ullage_lab.judge.standings import OWN, error

        if record.figure is None:
            why = f"not supported: {record.unsupported}" if record.unsupported else f"failed: {record.failed}"
            begin = aligned([record.estimator, "-"], self._widths[:2], self._right[:2]) + "  "
            room = max(_LEAST_ROOM, shutil.get_terminal_size().columns - len(begin))
            return begin + f"\n{' ' * len(begin)}".join(textwrap.wrap(plain(why), room))
        errors = [error(record, run, OWN) for _, run in self._runs]
        whole = record.process if record.process is not None else record.figure + (self._card.context or 0)
        return self._line(
            record.estimator,
            format_bytes(record.figure),
            f"{record.kind} memory",
            *("" if value is None else f"{value:+.1%}" for value in errors),
            format_duration(record.seconds),
            "yes" if whole <= self._card.usable else "no",
        )

    def _line(self, *cells: str) -> str:
        return aligned(cells, self._widths, self._right).rstrip()
