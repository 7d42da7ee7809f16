"""Public training scripts, unmodified: what they take on a real GPU from start to end, against their estimates.

`benchmarks/data/public_scripts.json` names the scripts: repository, commit, folder and command. The scripts are no
part of this project and nothing is fetched: clone each repository, at its commit, to `ROOT/src/OWNER+NAME`. One with
`stop_after` has no early end of its own, and is ended after so many seconds. Then

    python benchmarks/accuracy/public_scripts.py data ROOT                      # makes small random data for them
    python benchmarks/accuracy/public_scripts.py runs ROOT > runs.jsonl         # a list for `ullage measure`
    ullage measure runs.jsonl --no-estimate --out measured.jsonl       # on a GPU
    python benchmarks/accuracy/public_scripts.py estimate ROOT [NAME ...] --out estimates.jsonl
    python benchmarks/accuracy/public_scripts.py compare measured.jsonl estimates.jsonl

The last one prints a table in Markdown. By default it compares the files that are shipped; with `--faster` only the
scripts that use what `real_kernels.py` draws, and says what they use.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from public_script_data import make_data
from ullage.units import format_bytes
from ullage.virtual.releases import as_measured
from ullage.workloads import read_rows

DATA = Path(__file__).parents[1] / "data"
SCRIPTS, MEASURED, ESTIMATES = (DATA / f"public_scripts{end}" for end in (".json", "_h200.jsonl", "_estimates.jsonl"))


def runs(root: Path) -> Iterator[dict[str, Any]]:
    """The scripts of the list whose repository is there, as rows for `ullage measure`."""
    for row in json.loads(SCRIPTS.read_text().replace("{root}", str(root))):
        folder = root / row["cwd"]
        if folder.is_dir():
            script, *args = row["command"][1:]
            run = {"id": row["name"], "script": script, "args": args, "cwd": str(folder), "env": row.get("env", {})}
            yield run | {key: row[key] for key in ("stop_after",) if key in row}
        else:
            print(f"{row['name']} is left out: no folder {folder}", file=sys.stderr)


def estimate(run: dict[str, Any], gpu: str) -> dict[str, Any]:
    """The estimate of one script by the command that a user would type."""
    command = [sys.executable, "-m", "ullage", "estimate", run["script"], "--gpu", gpu, "--json", "--", *run["args"]]
    places = [os.environ.get("PYTHONPATH"), run["env"].get("PYTHONPATH")]
    env = {**os.environ, **run["env"], "PYTHONPATH": os.pathsep.join(filter(None, places))}
    begin = time.monotonic()
    done = subprocess.run(command, cwd=run["cwd"], env=env, capture_output=True, text=True)
    row: dict[str, Any] = {"id": run["id"], "seconds": round(time.monotonic() - begin, 1)}
    if done.returncode:
        return row | {"failed": done.stderr.strip()[-500:]}
    found = json.loads(done.stdout)
    return row | {name: found[name] for name in ("peak_allocated", "peak_reserved", "upper", "notes")}


def error(estimated: int, measured: int) -> float:
    """By how much an estimate is off, as a share of what was measured; below zero where it is too low."""
    return (estimated - measured) / measured


def compare(measured: Path, estimates: Path, *, faster: bool) -> None:
    """Print the table, the median and the worst."""
    known = {row["id"]: row for row in read_rows(estimates)}
    uses = {row["name"]: row["uses"] for row in json.loads(SCRIPTS.read_text()) if "uses" in row}
    errors, held, whole = [], 0, set()
    print("| script | on the GPU | reserved | estimated | error | allocated: error | bound |" + " uses |" * faster)
    print("| --- | --- | --- | --- | --- | --- | --- |" + " --- |" * faster)
    for row in sorted(read_rows(measured), key=lambda row: str(row["id"])):
        guess = known.get(row["id"])
        if "failed" in row or "oom" in row or guess is None or (faster and row["id"] not in uses):
            continue
        last = [uses[row["id"]]] if faster else []
        took = f"{row['wall_s']:.0f} s" + ", ended" * row.get("stopped", False) + ", broke off" * ("broke_off" in row)
        line = [row["id"], took, format_bytes(row["peak_reserved"])]
        if "failed" in guess:
            print("|", " | ".join([*line, "failed", "", "", "", *last]), "|")
            continue
        reserved = error(guess["peak_reserved"], row["peak_reserved"])
        allocated = error(guess["peak_allocated"], row["peak_alloc"])
        errors.append((abs(reserved), row["id"]))
        if not row.get("stopped"):
            whole.add(row["id"])
        held += guess["upper"] >= row["peak_reserved"]
        line += [format_bytes(guess["peak_reserved"]), f"{reserved:+.2%}", f"{allocated:+.2%}"]
        line.append(format_bytes(guess["upper"]))
        print("|", " | ".join([*line, *last]), "|")
    print(f"\n{_summary(errors)}; the bound holds in {held}")
    print(f"Those that were not ended: {_summary([error for error in errors if error[1] in whole])}")


def _summary(errors: list[tuple[float, str]]) -> str:
    """How many scripts, how many of them exact, the median and the worst error."""
    if not errors:
        return "0 scripts"
    worst, name = max(errors)
    exact, median = sum(share == 0 for share, _ in errors), statistics.median(share for share, _ in errors)
    return f"{len(errors)} scripts: {exact} exact, median error {median:.2%}, worst {worst:.2%} ({name})"


def main() -> None:
    """Do what the command says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = parser.add_subparsers(dest="what", required=True)
    for what in ("data", "runs", "estimate"):
        part = parts.add_parser(what)
        part.add_argument("root", type=Path)
    part.add_argument("names", nargs="*", help="only these scripts")
    part.add_argument("--out", type=Path, default=ESTIMATES)
    part.add_argument("--gpu", default="H200")
    part = parts.add_parser("compare")
    part.add_argument("measured", type=Path, nargs="?", default=MEASURED)
    part.add_argument("estimates", type=Path, nargs="?", default=ESTIMATES)
    part.add_argument("--faster", action="store_true", help="only scripts that use compilation, DDP and the like")
    asked = parser.parse_args()
    if asked.what == "data":
        make_data(asked.root.resolve())
    elif asked.what == "runs":
        for run in runs(asked.root.resolve()):
            print(json.dumps(run))
    elif asked.what == "estimate":
        as_measured()
        for run in runs(asked.root.resolve()):
            if not asked.names or run["id"] in asked.names:
                row = estimate(run, asked.gpu)
                print(row["id"], row["seconds"], "s", row.get("failed", ""), flush=True)
                with asked.out.open("a") as file:
                    file.write(json.dumps(row) + "\n")
    else:
        compare(asked.measured, asked.estimates, faster=asked.faster)


if __name__ == "__main__":
    main()
