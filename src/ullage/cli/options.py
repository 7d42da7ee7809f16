"""Options that several commands share, so that a word means the same everywhere."""

from __future__ import annotations

from typing import Annotated

import typer

Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
Gpu = Annotated[str, typer.Option(help="A GPU's name ('ullage gpus' lists them), a TOML file of one's own, or local.")]
