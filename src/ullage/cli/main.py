"""`ullage`: one command a verb; each prints what a function of the library returns."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Column, Table

from ullage.errors import UllageError, UnknownName
from ullage.units import format_bytes

if TYPE_CHECKING:
    from ullage.measure.accuracy import Comparison

app = typer.Typer(
    name="ullage",
    help="How much GPU memory a training job will take, before it runs and without a GPU.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


@app.callback()
def _version(
    version: Annotated[bool, typer.Option("--version", help="Print the version and stop.", is_eager=True)] = False,
) -> None:
    if version:
        import ullage

        print(ullage.__version__)
        raise typer.Exit


@app.command()
def gpus(
    word: Annotated[str, typer.Argument(help="Only GPUs whose name contains this.")] = "", as_json: Json = False
) -> None:
    """List the GPUs that Ullage knows.

    Example: ullage gpus A100
    """
    from ullage.gpus import gpus as all_gpus

    found = [card for card in all_gpus() if word.casefold() in card.name.casefold()]
    if not found:
        raise UllageError(f"no GPU has {word!r} in its name; 'ullage gpus' lists them all")
    if as_json:
        print(json.dumps([vars(card) for card in found], default=str))
        return
    name = Column("GPU", no_wrap=True)
    table = Table(name, "memory", "usable", "SMs", "compute capability", "context", "measured here")
    for card in found:
        capability = ".".join(str(part) for part in card.compute_capability or ("?", "?"))
        table.add_row(
            card.name, format_bytes(card.memory), format_bytes(card.usable), str(card.sms or "unknown"), capability,
            format_bytes(card.context), "yes" if card.context_measured else "no",
        )  # fmt: skip
    Console().print(table)


@app.command()
def evaluate(
    truth: Annotated[Path, typer.Option(help="Measured runs: a JSONL file, one run a line.")],
    gpu: Annotated[str, typer.Option(help="The GPU they were measured on.")] = "H200",
    every: Annotated[int, typer.Option(help="Only every Nth run.", min=1)] = 1,
    worst: Annotated[int, typer.Option(help="List so many of the worst runs.", min=0)] = 5,
    as_json: Json = False,
) -> None:
    """Compare estimates with measured runs.

    Example: ullage evaluate --truth h200_train_steps.jsonl --every 10
    """
    from rich.progress import track

    from ullage.measure import accuracy
    from ullage.workload import read_rows

    rows = list(read_rows(truth))[::every]
    if not rows:
        raise UllageError(f"{truth} holds no runs")
    results = [accuracy.compare(row, gpu) for row in track(rows, "estimating", console=Console(stderr=True))]
    if as_json:
        print(json.dumps(accuracy.as_dict(results)))
        return
    _print_accuracy(results, worst)


def _print_accuracy(results: list[Comparison], worst: int) -> None:
    from ullage.measure import accuracy

    console = Console(width=130)
    table = Table("rows", "figure", "count", "given", "exact", "median", "mean", "90 %", "99 %", "too low")
    for line in accuracy.summarize(results):
        shares = [f"{value:.2%}" for value in (line.median, line.mean, line.p90, line.p99)]
        cells = [line.group, line.figure, str(line.rows), str(line.given), f"{line.exact:.0%}", *shares]
        table.add_row(*cells, f"{line.under:.0%}")
    console.print(table)
    limits = accuracy.bound(results)
    if limits:
        print(f"upper holds for {limits['holds']:.1%} of the runs and lies {limits['above']:.2%} above (median)")
    times = [result.seconds for result in results]
    print(
        f"one estimate: {accuracy.quantile(times, 0.5):.2f} s (median), {accuracy.quantile(times, 0.95):.2f} s (95 %)"
    )
    known = [result for result in results if result.error("reserved") is not None]
    for result in sorted(known, key=lambda result: -abs(result.error("reserved") or 0))[:worst]:
        print(f"worst: {result.id} {result.model} {result.precision}: reserved {result.error('reserved'):+.2%}")
    for result in results:
        if result.failed:
            print(f"not estimated: {result.id} {result.model}: {result.failed}")


@app.command()
def diff(
    row: Annotated[str, typer.Argument(help="The id of a measured run.")],
    truth: Annotated[Path, typer.Option(help="Measured runs: a JSONL file; histories lie beside it.")],
    gpu: Annotated[str, typer.Option(help="The GPU it was measured on.")] = "H200",
    around: Annotated[int, typer.Option(help="How many requests to show before and after.", min=1)] = 6,
) -> None:
    """Show the first request in which the virtual run differs from the recorded one, and who asked.

    Example: ullage diff d0149 --truth h200_train_steps.jsonl
    """
    from ullage.measure.differences import first_difference, recorded_requests, virtual_requests
    from ullage.workload import Configuration, read_rows, train

    rows = {str(line.get("id")): line for line in read_rows(truth)}
    if row not in rows:
        raise UnknownName("measured run", row, rows)
    history = rows[row].get("events")
    if not history:
        with_history = [name for name, line in rows.items() if line.get("events")]
        raise UllageError(
            f"run {row} has no recorded history; {len(with_history)} runs have: {', '.join(with_history[:8])} ..."
        )
    configuration = Configuration.from_row(rows[row])
    recorded = recorded_requests(truth.parent / history)
    virtual = virtual_requests(lambda: train(configuration), gpu)
    found = first_difference(recorded, virtual, around)
    print(f"{rows[row]['model']}: {len(recorded):,} requests and frees recorded, {len(virtual):,} on the virtual GPU")
    print(found if found is not None else "no difference")


def main() -> None:
    """Run the command line; an error that we know is one line on standard error and exit code 1."""
    try:
        app()
    except UllageError as error:
        print(f"ullage: {error}", file=sys.stderr)
        raise SystemExit(1) from None
    except BrokenPipeError:
        raise SystemExit(1) from None
