"""`ullage gpus`: the catalogue."""

from __future__ import annotations

import json
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Column, Table

from ullage.cli.options import Json
from ullage.errors import UllageError
from ullage.units import format_bytes


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
