"""Whether cuDNN, asked through the card's own handle, names the workspaces that were measured on it.

    ullage lab draw problems --models 5m --random 60000 > problems.jsonl                   # needs no GPU
    ullage measure cudnn problems.jsonl --out plans.jsonl                              # on a machine with an H200
    python benchmarks/training/cudnn_answers.py plans.jsonl

Of the answers, those count whose problem is in the shipped table. Beside them is how often the guess of
trees and network says what was measured, and for all answers how often it says what cuDNN does.
"""

from __future__ import annotations

import argparse
from collections import Counter
from pathlib import Path

from rich.console import Console
from rich.table import Table

from ullage.jobs.model import read_rows
from ullage.virtual.cudnn.cudnn_query import first
from ullage.virtual.cudnn.formulas import (
    DATA,
    FILTER,
    FORWARD,
    CandidatePlan,
    ConvolutionProblem,
)
from ullage.virtual.cudnn.workspaces import (
    MEASURED_CAPABILITY,
    MULTIPROCESSORS,
    guess,
    measured,
)

DIRECTIONS = {FORWARD: "forward", DATA: "data gradient", FILTER: "filter gradient"}


def main() -> None:
    """Print the shares by direction."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="answers of 'ullage measure cudnn'")
    counted: Counter[tuple[str, str]] = Counter()
    for row in read_rows(parser.parse_args().file):
        if "candidates" not in row:
            continue
        problem = ConvolutionProblem.of(row["problem"])
        chosen = first(tuple(CandidatePlan(*each) for each in row["candidates"]), problem, True, False)
        if chosen is None:
            continue
        known = measured(problem, MEASURED_CAPABILITY, MULTIPROCESSORS)
        guessed = guess(problem, MEASURED_CAPABILITY).size
        facts = {"answers": True, "guess as cuDNN": guessed == chosen.size, "in the table": known is not None}
        facts |= {"as measured": known == chosen.size, "guess as measured": known == guessed}
        counted.update((problem.direction, name) for name, is_so in facts.items() if is_so)
    shown = Table("", "answers", "guess as cuDNN says", "in the table", "cuDNN as measured", "guess as measured")
    for direction, name in DIRECTIONS.items():
        answered, known = counted[direction, "answers"], counted[direction, "in the table"]
        shares = [
            f"{counted[direction, kind] / max(1, of):.2%}"
            for kind, of in (("guess as cuDNN", answered), ("as measured", known), ("guess as measured", known))
        ]
        shown.add_row(name, f"{answered:,}", shares[0], f"{known:,}", *shares[1:])
    Console(width=120).print(shown)


if __name__ == "__main__":
    main()
