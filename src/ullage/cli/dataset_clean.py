"""`ullage dataset clean`: measured files to one Parquet file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from ullage.cli.options import Json
from ullage.errors import InvalidValue

_EXAMPLES = """Clean measured runs and write them as one Parquet file.

FILES are what 'ullage dataset measure' wrote (also .gz), in any order: memory and utilisation of the same run are
joined. Tables of GPUMemNet's authors (.csv) are read too. What was dropped and why is told; docs/dataset.md has the
columns.

Examples:

  ullage dataset clean cnn_measured.jsonl cnn_busy.jsonl --out cnn.parquet

  ullage dataset clean *.jsonl.gz --out h200.parquet --report dropped.json

  ullage dataset clean gpumemnet_mlp_a100.csv --out a100.parquet --json
"""


def clean(
    files: Annotated[list[Path], typer.Argument(help="Measured files: .jsonl, .jsonl.gz, or the authors' .csv.")],
    out: Annotated[Path, typer.Option(help="The Parquet file to write.")],
    report: Annotated[
        Path | None, typer.Option(help="Write the report with every dropped line to this JSON file.")
    ] = None,
    processes: Annotated[
        int | None, typer.Option(help="Processes that look at models (default: one a core).", min=1)
    ] = None,
    as_json: Json = False,
) -> None:
    """Clean measured runs and write them as one Parquet file."""
    from rich.progress import track

    from ullage.learn.cleaning import clean as clean_files
    from ullage.learn.schema import frame, write_dataset
    from ullage.measure.parquet import load_polars

    load_polars()
    console = Console(stderr=True)
    rows, found = clean_files(
        files, processes, lambda runs, total: track(runs, "looking at models", total, console=console, transient=True)
    )
    table = frame(rows)
    if not len(table):
        raise InvalidValue(f"nothing is left to write: {found.read} lines read, {_counts(found.counts)}")
    write_dataset(table, out)
    told = {"file": str(out), **found.to_dict()}
    if report is not None:
        try:
            report.write_text(json.dumps(told, indent=1) + "\n")
        except OSError as error:
            raise InvalidValue(f"cannot write {report}: {error.strerror}") from None
    if as_json:
        print(json.dumps(told))
        return
    Console().print(_table(told))


clean.__doc__ = _EXAMPLES


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counts.items()) or "none"


def _table(told: dict[str, Any]) -> Table:
    from ullage.learn.drop_reasons import REASONS

    table = Table(title=f"{told['kept']} runs: {told['file']}")
    table.add_column("")
    table.add_column("lines", justify="right")
    table.add_column("")
    table.add_row("read", str(told["read"]), f"from {len(told['files'])} files")
    table.add_row("kept", str(told["kept"]), "")
    table.add_row("joined", str(told["joined"]), "utilisation of a run whose memory was measured too")
    for reason, count in told["dropped"].items():
        table.add_row(f"dropped: {reason}", str(count), REASONS[reason])
    if told["lent"]:
        table.add_row("lent", str(told["lent"]), "shared a process: context of most runs of their family and precision")
    if told["renamed"]:
        table.add_row("renamed", str(told["renamed"]), "runs of different sets with the same id")
    for name, count in told["blanked"].items():
        table.add_row(f"unknown: {name}", str(count), "not measured, or a figure that cannot be")
    return table
