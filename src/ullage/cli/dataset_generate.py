"""`ullage dataset generate`: draws configurations of generated models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from ullage.cli.options import Json
from ullage.errors import InvalidValue
from ullage.units import format_bytes, parse_bytes

_EXAMPLES = """Draw training runs of generated models: mlp, cnn or transformer.

The same seed gives the same runs, and a larger count begins with the same ones. Each line is a configuration that
'ullage dataset measure', 'ullage measure', 'ullage estimate' and 'ullage evaluate' take.

Examples:

  ullage dataset generate cnn --count 3000 --seed 1 --out cnn.jsonl

  ullage dataset generate mlp --count 100 --seed 2 --config ranges.toml --max-memory 8GiB --out small.jsonl
"""


def generate(
    family: Annotated[str, typer.Argument(help="mlp, cnn or transformer.")],
    count: Annotated[int, typer.Option(help="How many runs.", min=1)] = 1000,
    seed: Annotated[int, typer.Option(help="Of the drawing.")] = 0,
    out: Annotated[Path | None, typer.Option(help="The file to write (default: FAMILY.jsonl).")] = None,
    config: Annotated[Path | None, typer.Option(help="TOML file with ranges of one's own, by family.")] = None,
    max_memory: Annotated[str, typer.Option(help="Most memory of a run, as far as counting tells.")] = "40GiB",
    max_step: Annotated[
        float, typer.Option(help="Most seconds of a step, as far as counting tells.", min=0.001)
    ] = 0.12,
    as_json: Json = False,
) -> None:
    """Draw training runs of generated models."""
    from rich.progress import track

    from ullage.learn.generate import Limits, draw, summary
    from ullage.learn.ranges import ranges

    known = ranges(family, config)
    file = out or Path(f"{family}.jsonl")
    if file.is_dir() or not file.parent.is_dir():  # before the drawing, which takes a minute for thousands
        raise InvalidValue(f"cannot write {file}: needed a file in a folder that exists")
    limits = Limits(parse_bytes(max_memory), max_step)
    numbers = track(range(count), "drawing", console=Console(stderr=True), transient=True)
    rows = [draw(family, number, seed, known, limits) for number in numbers]
    try:
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    except OSError as error:
        raise InvalidValue(f"cannot write {file}: {error.strerror}") from None
    found = {"family": family, "seed": seed, "file": str(file), **summary(rows)}
    if as_json:
        print(json.dumps(found))
        return
    Console().print(_table(found))


generate.__doc__ = _EXAMPLES


def _table(found: dict[str, Any]) -> Table:
    table = Table(title=f"{found['rows']} runs of generated {found['family']}s, seed {found['seed']}: {found['file']}")
    table.add_column("")
    table.add_column("")
    sizes = (format_bytes(found[name]) for name in ("smallest", "median", "largest"))
    table.add_row("memory, by counting", "{} to {} (half of them) to {}".format(*sizes))
    unit = found["class_bytes"]
    classes = (f"{format_bytes(unit * number)} up: {count}" for number, count in found["classes"].items())
    table.add_row("classes of " + format_bytes(unit), ", ".join(classes))
    for name, title in (("arch", "forms"), ("opt", "optimizers"), ("precision", "precisions")):
        table.add_row(title, ", ".join(f"{word} {count}" for word, count in found[name].items()))
    return table
