"""The virtual GPU against measured training runs: how many are estimated, how fast, and how far off.

Runs every row of a ground-truth file (`h200_train_steps.jsonl` beside its `train_step.py`) through
`ullage.estimate(lambda: train(row), gpu="H200")`. The folder is `$ULLAGE_GROUNDTRUTH`, by default
`../shared/groundtruth`; without it there is nothing to compare with, and the script says so.

    python benchmarks/virtual_gpu.py [--every N] [--json FILE]
"""

import argparse
import importlib.util
import json
import os
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

import ullage

TRUTH = Path(os.environ.get("ULLAGE_GROUNDTRUTH", Path(__file__).parents[1] / ".." / "shared" / "groundtruth"))


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
    return [json.loads(line) for line in file.read_text().splitlines()], module.train


def run(rows: list[dict[str, Any]], train: Any) -> list[dict[str, Any]]:
    """Estimate every row; each result has the errors, or what went wrong."""
    results = []
    for row in track(rows, description="estimating", console=Console(stderr=True)):
        begin = time.perf_counter()
        result: dict[str, Any] = {"id": row["id"], "model": row["model"], "precision": row["precision"]}
        try:
            answer = ullage.estimate(lambda row=row: train(row), gpu="H200")
        except Exception as error:  # a row that fails is a result too
            result["failed"] = f"{type(error).__name__}: {error}"[:300]
        else:
            result["seconds"] = time.perf_counter() - begin
            for name, truth in (("allocated", row["peak_alloc"]), ("reserved", row["peak_reserved"])):
                result[name] = (getattr(answer, f"peak_{name}") - truth) / truth
        results.append(result)
    return results


def quantile(values: list[float], share: float) -> float:
    """The value below which this share of the values lies."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def table(results: list[dict[str, Any]]) -> Table:
    """In all and by family."""
    groups: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for result in results:
        groups["all"].append(result)
        groups[result["model"].split(":")[0]].append(result)
        groups[result["precision"]].append(result)
    shown = Table("rows", "count", "given", "time median", "95 %", "allocated exact", "median", "90 %",
                  "reserved exact", "median", "90 %")  # fmt: skip
    for name, group in groups.items():
        given = [result for result in group if "failed" not in result]
        if not given:
            continue
        cells = [name, str(len(group)), str(len(given))]
        seconds = [result["seconds"] for result in given]
        cells += [f"{quantile(seconds, 0.5):.2f} s", f"{quantile(seconds, 0.95):.2f} s"]
        for kind in ("allocated", "reserved"):
            errors = [abs(result[kind]) for result in given]
            exact = sum(error == 0 for error in errors) / len(errors)
            cells += [f"{exact:.0%}", f"{quantile(errors, 0.5):.2%}", f"{quantile(errors, 0.9):.2%}"]
        shown.add_row(*cells)
    return shown


def main() -> None:
    """Run, print the table and what failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--every", type=int, default=1, metavar="N", help="every Nth row only")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results of all rows here")
    options = parser.parse_args()
    rows, train = load()
    rows = rows[:: options.every]
    train_one = rows[len(rows) // 2]
    ullage.estimate(lambda: train(train_one), gpu="H200")  # a warm process: imports are not part of the time
    results = run(rows, train)
    Console(width=150).print(table(results))
    for result in results:
        if "failed" in result:
            print(f"not estimated: {result['id']} {result['model']}: {result['failed']}")
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
