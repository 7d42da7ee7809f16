"""The virtual GPU against measured training runs: how many are estimated, how fast, and how far off.

Runs every row of a file of measured runs through `ullage.estimate`. By default that is
`$ULLAGE_REFERENCE/groundtruth/h200_train_steps.jsonl`, with the training function of the `train_step.py` beside it;
where the variable is not set, the runs that this project measured itself (`benchmarks/data/h200_runs.jsonl.gz`).

    python benchmarks/virtual_gpu.py [--own] [--every N] [--workers N] [--json FILE]
"""

import argparse
import functools
import importlib.util
import json
import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

from ullage.research.measure import accuracy
from ullage.virtual.releases import as_measured
from ullage.workloads import Configuration, read_rows, train

REFERENCE = os.environ.get("ULLAGE_REFERENCE")
OWN = Path(__file__).parent / "data" / "h200_runs.jsonl.gz"


@functools.cache
def load(own: bool) -> tuple[list[dict[str, Any]], Any]:
    """The rows and the training function that was measured."""
    if own or not REFERENCE:
        return list(read_rows(OWN)), lambda row: train(Configuration.from_row(row))
    truth = Path(REFERENCE, "groundtruth")
    spec = importlib.util.spec_from_file_location("train_step", truth / "train_step.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return list(read_rows(truth / "h200_train_steps.jsonl")), module.train


def run(row: dict[str, Any], own: bool) -> accuracy.Comparison:
    """Estimate one row with the training function that was measured."""
    measured = load(own)[1]
    return accuracy.compare(row, run=lambda: measured(row))


def warm_up(own: bool) -> None:
    """Imports are no part of the time: estimate one run of each family first."""
    rows, _ = load(own)
    for row in {row["model"].split(":")[0]: row for row in reversed(rows)}.values():
        run(row, own)


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
    parser.add_argument("--own", action="store_true", help="the runs that this project measured itself")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="every Nth row only")
    parser.add_argument("--workers", type=int, default=1, metavar="N", help="so many processes at once")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results of all rows here")
    options = parser.parse_args()
    rows, spawn = load(options.own)[0][:: options.every], multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(options.workers, spawn, initializer=warm_up, initargs=(options.own,)) as pool:
        running = pool.map(functools.partial(run, own=options.own), rows)
        results = list(track(running, "estimating", total=len(rows), console=Console(stderr=True)))
    print_table(results)
    limits = accuracy.bound(results)
    print(f"upper holds for {limits['holds']:.1%} of the runs and lies {limits['above']:.2%} above (median)")
    for result in results:
        if result.failed:
            print(f"not estimated: {result.id} {result.model}: {result.failed}")
    if options.json:
        options.json.write_text(json.dumps(accuracy.as_dict(results), indent=1))


if __name__ == "__main__":
    as_measured()
    main()
