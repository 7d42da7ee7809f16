"""`ullage evaluate walknet`: the paper's Table 2 again, on one's own data."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from ullage.errors import InvalidValue
from ullage.units import format_bytes, format_duration

if TYPE_CHECKING:
    from ullage.learn.examples import Examples
    from ullage.learn.table2 import Line

# The project's data lie in its source, not in the package that is installed.
SHIPPED_DATA = Path(__file__).parents[3] / "benchmarks" / "data" / "generated_h200.parquet"
NAMES = {"mlp": "MLP", "cnn": "CNN", "transformer": "Transformer"}


@dataclass(frozen=True)
class Plan:
    """What the command line asked for."""

    data: list[Path] = field(default_factory=list)
    weights: Path | None = None
    retrain: bool = False
    seed: int = 1
    as_json: bool = False


def evaluate_gpumemnet(plan: Plan) -> None:
    """Judge both estimators on every family in the data, and print the lines beside the paper's."""
    files = plan.data or [SHIPPED_DATA]
    if not plan.data and not SHIPPED_DATA.is_file():
        raise InvalidValue(
            "needed --data: a Parquet file of 'ullage dataset clean', or the authors' table "
            "(ullage evaluate walknet --data FILE); the project's own is in its source, benchmarks/data"
        )
    if plan.weights is not None and not plan.weights.is_dir():
        raise InvalidValue(
            f"--weights: needed a folder with files as walknet_cnn_mlp.safetensors; found {plan.weights}"
        )
    lines = [line for file in files for line in _lines(file, plan)]
    if plan.as_json:
        print(json.dumps([line.to_dict() for line in lines]))
        return
    print_lines(lines)


def _lines(file: Path, plan: Plan) -> list[Line]:
    from ullage.learn.examples import examples_of, read_rows

    rows = read_rows(file)
    found: list[Line] = []
    for family in dict.fromkeys(str(row["family"]) for row in rows):
        examples = examples_of([row for row in rows if row["family"] == family])
        for estimator in ("mlp", "transformer"):
            found += _judged(examples, family, estimator, plan)
    return found


def _judged(examples: Examples, family: str, estimator: str, plan: Plan) -> list[Line]:
    from ullage.cli.train import bars
    from ullage.learn.table2 import retrained_lines, shipped_lines

    if not plan.retrain:
        return shipped_lines(examples, family, estimator, plan.weights)
    with bars() as (begin, notify):

        def named(name: str, steps: int) -> None:
            begin(f"{family} {estimator}, {name}", steps)

        return retrained_lines(examples, family, estimator, seed=plan.seed, begin=named, notify=notify)


def print_lines(lines: list[Line]) -> None:
    """The table."""
    table = Table("data", "GPU", "estimator", "bin", "rows", "paper", "goal", "ours", "folds", "F1 paper", "F1 ours",
                  "too low", "too high", "one job")  # fmt: skip
    for line in lines:
        table.add_row(
            NAMES.get(line.family, line.family), line.gpu, NAMES[line.estimator], format_bytes(line.bin),
            str(line.rows), _share(line.paper), _share(line.goal), _told(line), _share(line.validation),
            _share(line.paper_f1), _share(line.f1), f"{line.under:.1%}", f"{line.over:.1%}",
            format_duration(line.seconds),
        )  # fmt: skip
    console = Console(width=150)
    console.print(table)
    console.print(
        "ours: accuracy on the held-out 30 %; folds: mean of 3-fold cross-validation on the rest, a new network in "
        "each; one job: the processor's time for the longest one, on one core (paper: at most 32 ms)",
        highlight=False,
    )


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _told(line: Any) -> str:
    return f"[{'green' if line.reached else 'red'}]{line.accuracy:.3f}[/]"
