"""Options that several commands share, so that a word means the same everywhere."""

from __future__ import annotations

from typing import Annotated

import typer

from ullage.cli import completion

Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
Gpu = Annotated[
    str, typer.Option("--gpu", "-g", help="The GPU: a name of 'ullage gpus', a TOML file of one's own, or local.",
                      autocompletion=completion.gpus)
]  # fmt: skip
