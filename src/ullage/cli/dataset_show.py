"""`ullage dataset show`: what a data set holds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from ullage.cli.options import Json
from ullage.units import format_bytes

_EXAMPLES = """Show what a data set holds: runs, memory by classes, optimizers, precisions.

Examples:

  ullage dataset show h200.parquet

  ullage dataset show h200.parquet --family cnn

  ullage dataset show h200.parquet --json
"""
_BAR = 30  # characters of the longest bar
_MOST_CLASSES = 48


def show(
    file: Annotated[Path, typer.Argument(help="A Parquet file of 'ullage dataset clean'.")],
    family: Annotated[str | None, typer.Option(help="Only this family.")] = None,
    as_json: Json = False,
) -> None:
    """Show what a data set holds."""
    from ullage.errors import UnknownName
    from ullage.learn.dataset_summary import summarize
    from ullage.learn.schema import read_dataset

    table = read_dataset(file)
    if family is not None:
        families = table["family"].drop_nulls().unique().to_list()
        if family not in families:
            raise UnknownName(f"family in {file}", family, families)
        table = table.filter(table["family"] == family)
    found = {"file": str(file), **summarize(table)}
    if as_json:
        print(json.dumps(found))
        return
    console = Console()
    console.print(_overview(found))
    for name, part in found["families"].items():
        console.print(_classes(name, part))


show.__doc__ = _EXAMPLES


def _overview(found: dict[str, Any]) -> Table:
    table = Table(title=f"{found['rows']} runs: {found['file']}")
    table.add_column("")
    for name in found["families"]:
        table.add_column(name, justify="right")
    parts = list(found["families"].values())
    for key, title in (("rows", "runs"), ("with_memory", "memory measured"), ("with_utilization", "utilisation read")):
        table.add_row(title, *(str(part[key]) for part in parts))
    for key, title in (
        ("memory", "memory of the process"), ("parameters", "parameters"), ("batch_size", "batch size"),
        ("layers", "layers"),
    ):  # fmt: skip
        table.add_row(title, *(_spread(part[key], key == "memory") for part in parts), end_section=key == "layers")
    for key, title in (("arch", "forms"), ("optimizer", "optimizers"), ("precision", "precisions")):
        table.add_row(title, *("\n".join(_shares(part[key], part["rows"])) for part in parts), end_section=True)
    environment = [f"{name}: {', '.join(found[name])}" for name in ("gpu", "torch", "cuda", "cudnn", "driver")]
    table.caption = "; ".join(environment)
    return table


def _spread(spread: dict[str, int] | None, is_memory: bool) -> str:
    if spread is None:
        return "unknown"
    texts = [format_bytes(spread[name]) if is_memory else f"{spread[name]:,}" for name in ("smallest", "largest")]
    middle = format_bytes(spread["median"]) if is_memory else f"{spread['median']:,}"
    return f"{texts[0]} to {texts[1]}\nmedian {middle}"


def _shares(counts: dict[str, int], rows: int) -> list[str]:
    return [f"{name} {100 * count / rows:.1f} %" for name, count in counts.items()]


def _classes(name: str, part: dict[str, Any]) -> Table:
    """Bars for classes of 1 GiB, and the share of each class of 8 GiB beside its first."""
    table = Table(title=f"{name}: memory of the process, by classes of 1 and 8 GiB")
    table.add_column("GiB", justify="right")
    table.add_column("runs", justify="right")
    table.add_column("")
    table.add_column("8 GiB", justify="right")
    small, large = part["classes_1gib"], part["classes_8gib"]
    shown = dict(list(small.items())[:_MOST_CLASSES])
    most, before = max(shown.values(), default=1), None
    for place, count in shown.items():
        beside = ""
        if place // 8 != before:
            before = place // 8
            share = 100 * large[before] / part["with_memory"]
            beside = f"{8 * before} to {8 * before + 8}: {large[before]} ({share:.1f} %)"
        table.add_row(f"{place} to {place + 1}", str(count), "█" * max(1, round(_BAR * count / most)), beside)
    if len(small) > len(shown):
        table.caption = f"{len(small) - len(shown)} larger classes are left out: --json has them"
    return table
