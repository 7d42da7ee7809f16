"""What people switch on to go faster: random training scripts with it, measured on a real GPU, against their estimates.

Each row of `ROWS` is one such thing. `draw` writes whole training scripts for it, with models, sizes, precisions,
optimizers and options drawn at random, and a list of them for `ullage measure`:

    python benchmarks/accuracy/real_kernels.py draw FOLDER --seed 1                    # FOLDER/*.py, runs.jsonl, alone.jsonl
    ullage measure FOLDER/runs.jsonl --no-estimate --out measured.jsonl       # on a GPU
    ullage measure FOLDER/alone.jsonl --no-estimate --workers 1 --out measured.jsonl
    python benchmarks/accuracy/real_kernels.py estimate FOLDER --out estimates.jsonl
    python benchmarks/accuracy/real_kernels.py compare measured.jsonl estimates.jsonl

With `cudnn.benchmark` the fastest convolution wins, so those scripts are in a list of their own: nothing else should
run on the GPU. `compare` prints tables in Markdown, by default of the files that are shipped.
"""

import argparse
import json
import random
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable
from importlib.metadata import version
from pathlib import Path
from typing import Any

from drawn_scripts.compiled import compiled
from drawn_scripts.complex_types import complex_types
from drawn_scripts.convolutions import benchmark
from drawn_scripts.one_process import replicated, sharded
from drawn_scripts.own_kernels import own_kernels
from drawn_scripts.sparse import sparse
from drawn_scripts.streams import streams
from drawn_scripts.types import types

from ullage.research.measure.accuracy import quantile
from ullage.units import GIB
from ullage.virtual.releases import as_measured
from ullage.workloads import read_rows

DATA = Path(__file__).parents[1] / "data"
MEASURED, ESTIMATES = DATA / "real_kernels_h200.jsonl", DATA / "real_kernels_estimates.jsonl"
ROWS: dict[str, Callable[[random.Random, int], str]] = {
    "benchmark": benchmark,
    "compile": compiled,
    "sparse": sparse,
    "kernels": own_kernels,
    "ddp": replicated,
    "fsdp": sharded,
    "complex": complex_types,
    "streams": streams,
    "types": types,
}
ALONE = ("benchmark",)  # timing chooses
MOST = 12 * GIB  # that a script takes; so many of them run side by side
LIMIT = 600.0  # seconds for an estimate


def draw(folder: Path, seed: int, count: int, rows: Iterable[str]) -> None:
    """Write the scripts and their lists. They are listed in turn, so that a part of a list has all kinds."""
    folder.mkdir(parents=True, exist_ok=True)
    lists: dict[str, list[dict[str, Any]]] = {"runs": [], "alone": []}
    for number in range(count):
        for row in rows:
            name = f"{row}-{seed}-{number:02d}"
            text = ROWS[row](random.Random(f"{row} {seed} {number}"), number)
            (folder / f"{name}.py").write_text(text)
            order = {"id": name, "row": row, "script": f"{name}.py", "cwd": str(folder), "estimate": {"upper": MOST}}
            lists["alone" if row in ALONE else "runs"].append(order)
    lists["runs"].sort(key=lambda order: order["row"] != "compile")  # the longest first
    for name, orders in lists.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(order) + "\n" for order in orders))


def estimate(script: Path, gpu: str) -> dict[str, Any]:
    """The estimate of one script by the command that a user would type."""
    command = [sys.executable, "-m", "ullage", "estimate", script.name, "--gpu", gpu, "--json"]
    row: dict[str, Any] = {"id": script.stem, "torch": version("torch")}
    begin = time.monotonic()
    try:
        done = subprocess.run(command, cwd=script.parent, capture_output=True, text=True, timeout=LIMIT)
    except subprocess.TimeoutExpired:
        return row | {"seconds": LIMIT, "failed": f"took longer than {LIMIT:.0f} s"}
    row["seconds"] = round(time.monotonic() - begin, 1)
    if done.returncode:
        return row | {"failed": done.stderr.strip()[:500]}
    found = json.loads(done.stdout)
    return row | {name: found[name] for name in ("peak_allocated", "peak_reserved", "process_memory", "upper", "notes")}


def process_memory(row: dict[str, Any]) -> int | None:
    """The most that the measured process took on the GPU, as far as NVML was asked."""
    if row.get("nvml_end") is None:
        return None
    at_peak: int = row["nvml_end"] - row["end_reserved"] + row["peak_reserved"]
    return max(at_peak, row.get("nvml_peak") or 0)


def share(errors: list[float]) -> str:
    """Exact ones, median, 90th percentile and worst of a list of errors."""
    sizes = [abs(error) for error in errors]
    worst = max(errors, key=abs)
    exact = sum(size == 0 for size in sizes)
    return f"{exact} | {statistics.median(sizes):.2%} | {quantile(sizes, 0.9):.2%} | {worst:+.2%}"


def compare(measured: Path, estimates: Path, *, each: bool) -> None:
    """Print the table by rows, and what failed; with `each` every script too."""
    known = {row["id"]: row for row in read_rows(estimates)}
    runs = [row for row in read_rows(measured) if "failed" not in row and "oom" not in row]
    failed = []
    print(
        "| row | runs | estimated | reserved: exact | median | 90 % | worst "
        "| allocated: exact | median | 90 % | worst | bound holds | bound holds, process |"
    )
    print("|" + " --- |" * 13)
    for row in ROWS:
        members = [(run, known[run["id"]]) for run in runs if run["id"].startswith(f"{row}-") and run["id"] in known]
        given = [(run, guess) for run, guess in members if "failed" not in guess]
        failed += [guess for _, guess in members if "failed" in guess]
        if not given:
            if members:
                print(f"| {row} | {len(members)} | 0 |" + " |" * 10)
            continue
        reserved = [guess["peak_reserved"] / run["peak_reserved"] - 1 for run, guess in given]
        allocated = [guess["peak_allocated"] / run["peak_alloc"] - 1 for run, guess in given]
        held = sum(guess["upper"] >= run["peak_reserved"] for run, guess in given)
        whole = [(guess["upper"], taken) for run, guess in given if (taken := process_memory(run)) is not None]
        figures = f"{share(reserved)} | {share(allocated)} | {held} of {len(given)}"
        print(
            f"| {row} | {len(members)} | {len(given)} | {figures} "
            f"| {sum(upper >= taken for upper, taken in whole)} of {len(whole)} |"
        )
    named = Counter(known[run["id"]].get("torch", "a version that was not noted") for run in runs if run["id"] in known)
    print("\nEstimated with PyTorch " + ", ".join(f"{name} ({count})" for name, count in sorted(named.items())))
    if each:
        _print_each(runs, known)
    for guess in failed:
        reason = guess["failed"].strip().splitlines() or ["?"]
        print(f"\n- `{guess['id']}` was not estimated: {reason[0][:200]}", end="")
    print()


def _print_each(runs: list[dict[str, Any]], known: dict[str, dict[str, Any]]) -> None:
    print("\n| script | reserved | error | allocated: error | process, MiB | bound less process, MiB |")
    print("| --- | --- | --- | --- | --- | --- |")
    for run in sorted(runs, key=lambda run: str(run["id"])):
        guess = known.get(run["id"], {"failed": "not tried"})
        line = [run["id"], f"{run['peak_reserved'] / 2**20:.0f} MiB"]
        if "failed" in guess:
            line += [guess["failed"].strip().splitlines()[0][:60], "", "", ""]
        else:
            taken = process_memory(run)
            line += [
                f"{guess['peak_reserved'] / run['peak_reserved'] - 1:+.2%}",
                f"{guess['peak_allocated'] / run['peak_alloc'] - 1:+.2%}",
                "?" if taken is None else f"{taken / 2**20:.0f}",
                "?" if taken is None else f"{(guess['upper'] - taken) / 2**20:.0f}",
            ]
        print("|", " | ".join(line), "|")


def main() -> None:
    """Do what the command says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = parser.add_subparsers(dest="what", required=True)
    part = parts.add_parser("draw", help="write scripts and the lists of them")
    part.add_argument("folder", type=Path)
    part.add_argument("--seed", type=int, default=1)
    part.add_argument("--count", type=int, default=24, help="scripts of each row")
    part.add_argument("--rows", nargs="+", choices=list(ROWS), default=list(ROWS))
    part = parts.add_parser("estimate", help="estimate the scripts of a folder, those that are in the file left out")
    part.add_argument("folder", type=Path)
    part.add_argument("names", nargs="*", help="only these scripts, or rows")
    part.add_argument("--out", type=Path, default=ESTIMATES)
    part.add_argument("--gpu", default="H200")
    part = parts.add_parser("compare", help="print the tables")
    part.add_argument("measured", type=Path, nargs="?", default=MEASURED)
    part.add_argument("estimates", type=Path, nargs="?", default=ESTIMATES)
    part.add_argument("--each", action="store_true", help="every script too")
    asked = parser.parse_args()
    if asked.what == "draw":
        draw(asked.folder.resolve(), asked.seed, asked.count, asked.rows)
    elif asked.what == "compare":
        compare(asked.measured, asked.estimates, each=asked.each)
    else:
        as_measured()
        done = {row["id"] for row in read_rows(asked.out)} if asked.out.exists() else set()
        for list_ in ("runs", "alone"):
            for order in read_rows(asked.folder / f"{list_}.jsonl"):
                wanted = not asked.names or order["id"] in asked.names or order["row"] in asked.names
                if wanted and order["id"] not in done:
                    row = estimate(asked.folder.resolve() / order["script"], asked.gpu)
                    print(row["id"], row["seconds"], "s", row.get("failed", "")[:200], flush=True)
                    with asked.out.open("a") as file:
                        file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
