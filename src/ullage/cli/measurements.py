"""`ullage measure`: runs on a real GPU; `ullage diff`: the first request in which an estimate differs from a run."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from rich.console import Console

from ullage.cli import completion
from ullage.cli.measured_files import appended, existing, measured_before, say_left
from ullage.cli.options import Json, MeasuredGpu, ScriptArguments, argument, option
from ullage.errors import InvalidValue, UllageError, UnknownName
from ullage.units import parse_duration

if TYPE_CHECKING:
    from ullage.measuring.runs import RunRequest
    from ullage.virtual.cudnn.formulas import ConvolutionProblem


def measure(
    what: Annotated[
        Path, argument("Runs (.jsonl), a script (.py), 'context' or 'cudnn'.", "WHAT", completion.measurable)
    ],
    args: ScriptArguments = None,
    out: Annotated[Path, option("Append a line per run. Runs already in the file are skipped.", "FILE")] = Path(
        "measured.jsonl"
    ),
    histories: Annotated[Path | None, option("Save the allocator's history of each run here.", "FOLDER")] = None,
    cap: Annotated[bool, option("Limit each run to its upper bound; record whether it survives.", "--cap")] = False,
    workers: Annotated[int, option("Maximum number of concurrent runs.", "N", min=1)] = 8,
    estimated: Annotated[
        bool, option("Estimate runs first, to run several at once.", "--estimate/--no-estimate")
    ] = True,
    steps: Annotated[int, option("Optimizer steps of each run.", "N", min=1)] = 5,
    timeout: Annotated[str, option("Give up on a run after this long, such as 90s or 10m.", "TIME")] = "5m",
    dry_run: Annotated[bool, option("Print the runs; measure nothing.", "--dry-run")] = False,
    description: Annotated[
        Path | None, option("With 'cudnn': cuDNN's JSON description of another GPU.", "FILE")
    ] = None,
    architecture: Annotated[
        str | None,
        option("With 'cudnn': sm_80,sm_89 or all; a file each.", "NAME", complete=completion.gpu_architectures),
    ] = None,
    as_json: Json = False,
) -> None:
    """Run training on this machine's GPU and record its memory.

    WHAT is a file with one run per line (.jsonl), or a training script (.py). 'context' measures a process's memory
    outside PyTorch's allocator and prints a file that describes your GPU. 'cudnn' asks cuDNN for the plans and
    workspaces of a script's convolutions, without running them.

    Examples:

      ullage measure runs.jsonl --out measured.jsonl --cap
      ullage measure train.py --out measured.jsonl -- --batch-size 64
      ullage measure cudnn train.py --out plans.jsonl -- --batch-size 64
    """
    from ullage.measuring import runs

    if what == Path("context"):
        _measure_context(as_json)
        return
    if what == Path("cudnn"):
        _ask_cudnn(list(args or []), out, workers, description, architecture, dry_run, as_json)
        return
    orders = _orders(what, list(args or []), histories, steps)
    if dry_run:
        for order in orders:
            print(json.dumps(order.row))
        return
    card = runs.local_gpu()
    done = measured_before(out)
    orders = [order for order in orders if order.row["id"] not in done]
    say_left(len(done), len(orders), "runs", out)
    results = runs.measure(
        orders,
        card.name,
        total=card.usable,
        at_once=workers,
        cap=cap,
        estimated=estimated,
        timeout=parse_duration(timeout),
    )
    _follow(results, len(orders), out, as_json)


def _measure_context(as_json: bool) -> None:
    from ullage.measuring.machine import as_own_card, measure_context
    from ullage.measuring.runs import local_gpu

    sizes = measure_context()
    if as_json:
        print(json.dumps(sizes))
        return
    for name, size in sizes.items():
        print(f"{name}: {size / 2**20:.0f} MiB", file=sys.stderr)
    print("to let estimates use it, write these lines to $ULLAGE_HOME/gpus/NAME.toml:", file=sys.stderr)
    print(as_own_card(sizes, local_gpu().name))


def _ask_cudnn(
    args: list[str],
    out: Path,
    workers: int,
    description: Path | None,
    architecture: str | None,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Query cuDNN about convolutions, and write each answer as it comes."""
    from ullage.measuring import cudnn as asking
    from ullage.virtual.cudnn.backend import Cudnn, CudnnError

    if not args:
        raise InvalidValue("'cudnn' needs a script or a file of problems; type: ullage measure cudnn train.py")
    existing(args[0])
    if description is not None and architecture is not None:
        raise InvalidValue("--description and --architecture exclude each other, got both; leave one out")
    names = asking.architectures(architecture) if architecture else []
    file = existing(description)
    questions = {out: file.read_text() if file else None}
    if not dry_run:
        cudnn = Cudnn(questions[out])
        if names:
            own = cudnn.description()
            questions = {out.with_name(f"{out.stem}-{name}{out.suffix}"): asking.described(own, name) for name in names}
    if Path(args[0]).suffix == ".py":
        problems = asking.problems_of_script(Path(args[0]), args[1:])
    else:
        problems = asking.listed_problems(Path(args[0]))
    if dry_run:
        for problem in problems:
            print(json.dumps({"problem": problem}))
        return
    rows = []
    for place, text in questions.items():
        try:
            rows.append(_ask_about(problems, place, workers, text))
        except CudnnError as error:  # cuDNN may support the other architectures
            if not names:
                raise
            rows.append({"file": str(place), "failed": str(error)})
    for row in rows:
        if as_json:
            print(json.dumps(row))
        elif "failed" in row:
            print(f"{row['failed']}: {row['file']} is not whole")
        else:
            print(f"cuDNN answered for {row['answered']} convolutions and declined {row['declined']}: {row['file']}")


def _ask_about(problems: "Sequence[ConvolutionProblem]", out: Path, workers: int, text: str | None) -> dict[str, Any]:
    """Query the convolutions that the file does not have yet, with one description of a GPU."""
    from ullage.measuring import cudnn as asking

    done = asking.asked_before(out)
    left = [problem for problem in problems if problem not in done]
    say_left(len(done), len(left), "convolutions", out)
    answers = asking.ask(left, workers, text)
    declined = sum("declined" in row for row in appended(answers, "asking cuDNN", len(left), out))
    return {"file": str(out), "answered": len(left) - declined, "declined": declined}


def _orders(what: Path, args: list[str], histories: Path | None, steps: int) -> "list[RunRequest]":
    from ullage.jobs import read_rows
    from ullage.measuring.runs import RunRequest, read_runs

    existing(what)
    if what.suffix == ".py":
        row: dict[str, Any] = {"id": what.stem, "script": str(what), "args": args}
        history = str(histories / f"{what.stem}.npz") if histories else None
        return [RunRequest(row=row, script=str(what), args=args, history=history)]
    return read_runs(list(read_rows(what)), steps, histories)


def _follow(results: Any, count: int, out: Path, as_json: bool) -> None:
    """Write each row as it comes, then print a summary of the runs."""
    console = Console(stderr=True)
    tally = {"measured": 0, "ran out of memory": 0, "failed": 0, "survived": 0, "capped": 0}
    for row in appended(results, "measuring", count, out):
        outcome = "failed" if "failed" in row else "ran out of memory" if "oom" in row else "measured"
        tally[outcome] += 1
        if "capped" in row:
            tally["capped"] += 1
            tally["survived"] += row["capped"]["survived"]
        if outcome != "measured":
            console.print(f"{row['id']} {row.get('model', '')}: {row.get('failed') or row.get('oom')}")
    if as_json:
        print(json.dumps({"file": str(out), **{name.replace(" ", "_"): number for name, number in tally.items()}}))
        return
    print(f"{tally['measured']} measured, {tally['ran out of memory']} out of memory, {tally['failed']} failed: {out}")
    if tally["capped"]:
        print(f"under the bound of the estimate {tally['survived']} of {tally['capped']} survived")


# `ullage diff`: the first request in which a virtual run differs from a recorded one.


def diff(
    row: Annotated[str, argument("Id of a measured run.", "RUN")],
    truth: Annotated[Path, option("Measured runs (JSONL), next to their histories.", "FILE")],
    gpu: MeasuredGpu = None,
    around: Annotated[int, option("Number of requests to show before and after.", "N", min=1)] = 6,
) -> None:
    """Show the first request in which the virtual run differs from the recorded one.

    Example:

      ullage diff d0149 --truth h200_train_steps.jsonl
    """
    from ullage.jobs import Model, read_rows, train
    from ullage.measuring.differences import first_difference, recorded_requests, virtual_requests

    rows = {str(line.get("id")): line for line in read_rows(truth)}
    if row not in rows:
        raise UnknownName("measured run", row, rows)
    history = rows[row].get("events")
    if not history:
        with_history = [name for name, line in rows.items() if line.get("events")]
        raise UllageError(
            f"run {row} has no recorded history; {len(with_history)} runs have: {', '.join(with_history[:8])} ..."
        )
    configuration = Model.from_row(rows[row])
    recorded = recorded_requests(truth.parent / history)
    with Console(stderr=True).status(f"running {configuration.short_name} on a virtual GPU ..."):
        virtual = virtual_requests(lambda: train(configuration), gpu or "H200")
    difference = first_difference(recorded, virtual, around)
    print(f"{rows[row]['model']}: {len(recorded):,} requests and frees recorded, {len(virtual):,} on the virtual GPU")
    print(difference if difference is not None else "no difference")
