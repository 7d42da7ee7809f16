"""`ullage dataset measure`: generated runs on a real GPU, thousands in minutes."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from ullage.cli.options import Json
from ullage.errors import InvalidValue

_EXAMPLES = """Measure configurations on this machine's GPU, each in a fresh process.

Memory is measured with many runs at once; --utilization reads each run alone, for --seconds. Rows are appended as they
come: after an interruption type the same line again. A run that runs out of memory is a row too.

Examples:

  ullage dataset measure cnn.jsonl --out cnn_measured.jsonl

  ullage dataset measure cnn.jsonl --out cnn_busy.jsonl --utilization --every 20 --seconds 1

  ullage dataset measure mlp.jsonl --out minute.jsonl --utilization --seconds 60 --raw logs/
"""


def measure(
    file: Annotated[Path, typer.Argument(help="Configurations, as 'ullage dataset generate' writes them.")],
    out: Annotated[Path, typer.Option(help="Append a line a run to this file; runs that it has are skipped.")],
    at_once: Annotated[int, typer.Option(help="At most so many processes at once.", min=1)] = 14,
    iterations: Annotated[int, typer.Option(help="Training steps of each run.", min=2)] = 3,
    utilization: Annotated[bool, typer.Option("--utilization", help="Read utilisation, each run alone.")] = False,
    seconds: Annotated[float, typer.Option(help="How long to read utilisation, after warming up.", min=0.2)] = 1.0,
    every: Annotated[int, typer.Option(help="Only every so-many-th configuration.", min=1)] = 1,
    timeout: Annotated[float, typer.Option(help="Seconds for one run.", min=1)] = 60.0,
    stop_after: Annotated[
        float | None, typer.Option(help="Stop after so many seconds; the rest is for another time.", min=1)
    ] = None,
    together: Annotated[
        int, typer.Option(help="Memory runs that share a process, one after the other: many times quicker, the same "
                          "figures of PyTorch, none of NVML.", min=1)
    ] = 1,
    raw: Annotated[Path | None, typer.Option(help="Keep logs here, a folder a configuration.")] = None,
    as_json: Json = False,
) -> None:  # fmt: skip
    """Measure configurations on this machine's GPU, each in a fresh process."""
    if together > 1 and (utilization or raw):
        raise InvalidValue("--together is for memory alone: leave --utilization and --raw away")
    from ullage.learn.measuring import Plan, measure_rows
    from ullage.workload.configuration import read_rows

    rows = list(read_rows(file))[::every]
    if not rows:
        raise InvalidValue(f"{file} has no configurations")
    plan = Plan(
        out=out, at_once=at_once, iterations=iterations, utilization=utilization, seconds=seconds, timeout=timeout,
        raw=raw, together=together,
    )  # fmt: skip
    left, measured = measure_rows(rows, plan)
    console = Console(stderr=True)
    if left < len(rows):
        console.print(f"{len(rows) - left} runs are in {out} already; {left} are left")
    tally = _follow(measured, left, console, stop_after)
    if as_json:
        print(json.dumps({"file": str(out), **tally}))
        return
    print(
        f"{tally['measured']} measured, {tally['out_of_memory']} out of memory, {tally['failed']} failed "
        f"in {tally['seconds']} s: {out}"
    )


measure.__doc__ = _EXAMPLES


def _follow(
    measured: Iterator[dict[str, Any]], left: int, console: Console, stop_after: float | None
) -> dict[str, Any]:
    """Count the rows as they come. No thread draws the bar: the process that measures forks."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    tally: dict[str, Any] = {"measured": 0, "out_of_memory": 0, "failed": 0}
    begin = said = time.monotonic()
    columns = (TextColumn("measuring"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[rate]}"))
    with Progress(*columns, TimeRemainingColumn(), console=console, auto_refresh=False) as progress:
        task = progress.add_task("measuring", total=left, rate="")
        for row in measured:
            outcome = "failed" if "failed" in row else "out_of_memory" if "oom" in row else "measured"
            tally[outcome] += 1
            if outcome != "measured":
                progress.console.print(f"{row['id']}: {row.get('failed') or row.get('oom')}", markup=False)
            now, done = time.monotonic(), sum(tally.values())
            rate = f"{done / max(now - begin, 1e-3):.1f} a second"
            progress.update(task, advance=1, rate=rate, refresh=console.is_terminal)
            if not console.is_terminal and now - said > 10:
                said = now
                print(f"{done} of {left} done, {rate}", flush=True, file=console.file)
            if stop_after is not None and now - begin > stop_after:
                progress.console.print(f"stopped after {stop_after:g} s; type the same line again for the rest")
                break
    getattr(measured, "close", lambda: None)()
    return {**tally, "seconds": round(time.monotonic() - begin, 1)}
