"""`ullage evaluate`: estimates beside measured runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from ullage.cli.options import Json
from ullage.errors import UllageError

if TYPE_CHECKING:
    from ullage.measure.accuracy import Comparison


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
