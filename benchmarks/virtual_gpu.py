"""The virtual GPU against measured training runs: how many are estimated, how fast, and how far off.

Runs every row of a ground-truth file (`h200_train_steps.jsonl` beside its `train_step.py`) through
`ullage.estimate(lambda: train(row), gpu="H200")`. The folder is `$ULLAGE_GROUNDTRUTH`, by default
`../shared/groundtruth`; without it there is nothing to compare with, and the script says so.

    python benchmarks/virtual_gpu.py [--every N] [--workers N] [--json FILE]
"""

import argparse
import functools
import importlib.util
import json
import multiprocessing
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

from ullage.measure import accuracy
from ullage.workload import read_rows

TRUTH = Path(os.environ.get("ULLAGE_GROUNDTRUTH", Path(__file__).parents[1] / ".." / "shared" / "groundtruth"))


@functools.cache
def load() -> tuple[list[dict[str, Any]], Any]:
    """The rows and the training function that was measured."""
    file = TRUTH / "h200_train_steps.jsonl"
    if not file.exists():
        print(f"no ground truth at {TRUTH.resolve()}: set ULLAGE_GROUNDTRUTH to its folder", file=sys.stderr)
        raise SystemExit(0)
    spec = importlib.util.spec_from_file_location("train_step", TRUTH / "train_step.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return list(read_rows(file)), module.train


def run(row: dict[str, Any]) -> accuracy.Comparison:
    """Estimate one row with the training function that was measured."""
    train = load()[1]
    return accuracy.compare(row, run=lambda: train(row))


def warm_up() -> None:
    """Imports are no part of the time: estimate one run of each family first."""
    rows, _ = load()
    for row in {row["model"].split(":")[0]: row for row in reversed(rows)}.values():
        run(row)


def print_table(results: list[accuracy.Comparison]) -> None:
    """In all, by family and by precision."""
    shown = Table(
        "rows", "count", "given", "time median", "95 %",
        "allocated exact", "median", "90 %", "reserved exact", "median", "90 %",
    )  # fmt: skip
    summaries = {(line.group, line.figure): line for line in accuracy.summarize(results)}
    for group, members in accuracy.groups(results).items():
        seconds = [member.seconds for member in members if member.failed is None]
        cells = [group, str(len(members)), str(len(seconds))]
        cells += [f"{accuracy.quantile(seconds, share):.2f} s" for share in (0.5, 0.95)] if seconds else ["", ""]
        for figure in ("allocated", "reserved"):
            line = summaries.get((group, figure))
            cells += [f"{line.exact:.0%}", f"{line.median:.2%}", f"{line.p90:.2%}"] if line else ["", "", ""]
        shown.add_row(*cells)
    Console(width=150).print(shown)


def main() -> None:
    """Run, print the table and what failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--every", type=int, default=1, metavar="N", help="every Nth row only")
    parser.add_argument("--workers", type=int, default=1, metavar="N", help="so many processes at once")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results of all rows here")
    options = parser.parse_args()
    rows = load()[0][:: options.every]
    with ProcessPoolExecutor(options.workers, multiprocessing.get_context("spawn"), initializer=warm_up) as pool:
        running = pool.map(run, rows)
        results = list(track(running, "estimating", total=len(rows), console=Console(stderr=True)))
    print_table(results)
    for result in results:
        if result.failed:
            print(f"not estimated: {result.id} {result.model}: {result.failed}")
    if options.json:
        options.json.write_text(json.dumps(accuracy.as_dict(results), indent=1))


if __name__ == "__main__":
    main()
