"""Training scripts as people write them: what they take on a real GPU from start to end, against their estimates.

`public` are scripts of public repositories, unmodified. `benchmarks/data/public_scripts.json` names them: repository,
commit, folder and command. They are no part of this project and nothing is fetched: clone each repository, at its
commit, to `ROOT/src/OWNER+NAME`. One with `stop_after` has no early end of its own, and is ended after so many seconds.

    python benchmarks/accuracy/scripts.py data ROOT                   # makes small random data for them
    python benchmarks/accuracy/scripts.py list ROOT > runs.jsonl      # a list for `ullage measure`

`drawn` are scripts that were drawn at random, with what people switch on to go faster, and trainings with complex
numbers, Fourier transforms and matrix decompositions. They are in `benchmarks/data/drawn_scripts.jsonl.xz`.

    python benchmarks/accuracy/scripts.py unpack FOLDER               # FOLDER/*.py, runs.jsonl, alone.jsonl

Scripts with `cudnn.benchmark` are in a list of their own, because the fastest convolution wins there: nothing else
should run on the GPU. Both kinds are measured, estimated and compared alike:

    ullage measure runs.jsonl --no-estimate --out measured.jsonl      # on a GPU
    python benchmarks/accuracy/scripts.py estimate runs.jsonl [NAME ...] --out estimates.jsonl
    python benchmarks/accuracy/scripts.py compare public measured.jsonl estimates.jsonl

The last one prints a table in Markdown, by default of the files that are shipped. `--faster` takes only the public
scripts that use compilation, DDP and the like; `--each` prints every drawn script, too.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

from public_script_data import make_data
from ullage.jobs import read_rows
from ullage.measuring.accuracy import quantile
from ullage.units import GIB, format_bytes
from ullage.virtual.releases import as_measured

DATA = Path(__file__).parents[1] / "data"
PUBLIC, DRAWN = DATA / "public_scripts.json", DATA / "drawn_scripts.jsonl.xz"
FILES = {"public": "public_scripts", "drawn": "real_kernels"}  # measured and estimated
# The kinds of drawn scripts, in the order of the table; the first has to be alone on the GPU.
KINDS = ("benchmark", "compile", "sparse", "kernels", "ddp", "fsdp", "complex", "streams", "types", "trainings")
MOST = 12 * GIB  # that a drawn script takes; so many of them run side by side
LIMIT = 600.0  # seconds for an estimate
Row = dict[str, Any]


def kind_of(name: str) -> str:
    """Return the kind of a drawn script.

    >>> kind_of("compile-2-07")
    'compile'
    """
    return name.partition("-")[0]


def public_runs(root: Path) -> Iterator[Row]:
    """Yield the public scripts with a cloned repository, as rows for `ullage measure`."""
    for row in json.loads(PUBLIC.read_text().replace("{root}", str(root))):
        folder = root / row["cwd"]
        if folder.is_dir():
            script, *args = row["command"][1:]
            run = {"id": row["name"], "script": script, "args": args, "cwd": str(folder), "env": row.get("env", {})}
            yield run | {key: row[key] for key in ("stop_after",) if key in row}
        else:
            print(f"{row['name']} is left out: no folder {folder}", file=sys.stderr)


def unpack(folder: Path) -> None:
    """Write the drawn scripts and their lists, slowest first."""
    folder.mkdir(parents=True, exist_ok=True)
    lists: dict[str, list[Row]] = {"runs": [], "alone": []}
    for row in read_rows(DRAWN):
        name = row["id"]
        (folder / f"{name}.py").write_text(row["script"])
        run = {"id": name, "row": kind_of(name), "script": f"{name}.py", "cwd": str(folder)}
        run["estimate"] = {"upper": MOST}
        lists["alone" if kind_of(name) == KINDS[0] else "runs"].append(run)
    lists["runs"].sort(key=lambda run: run["row"] != "compile")
    for name, runs in lists.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(run) + "\n" for run in runs))


def estimate(run: Row) -> Row:
    """Return the estimate of a script, from the command that a user would type."""
    command = [sys.executable, "-m", "ullage", "estimate", run["script"], "--gpu", "H200", "--json", "--"]
    command += run.get("args", [])
    own = run.get("env", {})
    places = [os.environ.get("PYTHONPATH"), own.get("PYTHONPATH")]
    env = {**os.environ, **own, "PYTHONPATH": os.pathsep.join(filter(None, places))}
    row: Row = {"id": run["id"], "torch": version("torch")}
    begin = time.monotonic()
    try:
        done = subprocess.run(command, cwd=run["cwd"], env=env, capture_output=True, text=True, timeout=LIMIT)
    except subprocess.TimeoutExpired:
        return row | {"seconds": LIMIT, "failed": f"took longer than {LIMIT:.0f} s"}
    row["seconds"] = round(time.monotonic() - begin, 1)
    if done.returncode:
        return row | {"failed": done.stderr.strip()[-500:]}
    guess = json.loads(done.stdout)
    return row | {name: guess[name] for name in ("peak_allocated", "peak_reserved", "process_memory", "upper", "notes")}


def estimate_all(runs: Path, names: list[str], out: Path) -> None:
    """Add a line for each script of a list that is not in the file yet."""
    as_measured()
    done = {row["id"] for row in read_rows(out)} if out.exists() else set()
    for run in read_rows(runs):
        wanted = not names or run["id"] in names or kind_of(run["id"]) in names
        if wanted and run["id"] not in done:
            row = estimate(run)
            print(row["id"], row["seconds"], "s", row.get("failed", "")[:200], flush=True)
            with out.open("a") as file:
                file.write(json.dumps(row) + "\n")


def pairs(measured: Path, estimates: Path) -> Iterator[tuple[Row, Row]]:
    """Yield the scripts that finished and have an estimate or a failure."""
    known = {row["id"]: row for row in read_rows(estimates)}
    for run in sorted(read_rows(measured), key=lambda row: str(row["id"])):
        if "failed" not in run and "oom" not in run and run["id"] in known:
            yield run, known[run["id"]]


def errors(run: Row, guess: Row) -> tuple[float, float]:
    """Return the errors of reserved and allocated memory as shares, negative if the estimate is too low."""
    return (guess["peak_reserved"] / run["peak_reserved"] - 1, guess["peak_allocated"] / run["peak_alloc"] - 1)


def table(*head: str) -> None:
    print("|", " | ".join(head), "|")
    print("|" + " --- |" * len(head))


def compare_public(measured: Path, estimates: Path, *, faster: bool) -> None:
    uses = {row["name"]: row["uses"] for row in json.loads(PUBLIC.read_text()) if "uses" in row}
    errors_by_run, held, whole = [], 0, set()
    table("script", "on the GPU", "reserved", "estimated", "error", "allocated: error", "bound", *["uses"] * faster)
    for run, guess in pairs(measured, estimates):
        if faster and run["id"] not in uses:
            continue
        last = [uses[run["id"]]] if faster else []
        took = f"{run['wall_s']:.0f} s" + ", ended" * run.get("stopped", False) + ", broke off" * ("broke_off" in run)
        line = [run["id"], took, format_bytes(run["peak_reserved"])]
        if "failed" in guess:
            print("|", " | ".join([*line, "failed", "", "", "", *last]), "|")
            continue
        reserved, allocated = errors(run, guess)
        errors_by_run.append((abs(reserved), run["id"]))
        if not run.get("stopped"):
            whole.add(run["id"])
        held += guess["upper"] >= run["peak_reserved"]
        line += [format_bytes(guess["peak_reserved"]), f"{reserved:+.2%}", f"{allocated:+.2%}"]
        print("|", " | ".join([*line, format_bytes(guess["upper"]), *last]), "|")
    print(f"\n{_summary(errors_by_run)}; the bound holds in {held}")
    print(f"Those that were not ended: {_summary([one for one in errors_by_run if one[1] in whole])}")


def _summary(by_error: list[tuple[float, str]]) -> str:
    """Return the number of scripts, the number of exact ones, the median and the worst error."""
    if not by_error:
        return "0 scripts"
    worst, name = max(by_error)
    exact, median = sum(share == 0 for share, _ in by_error), statistics.median(share for share, _ in by_error)
    return f"{len(by_error)} scripts: {exact} exact, median error {median:.2%}, worst {worst:.2%} ({name})"


def process_memory(run: Row) -> int | None:
    """Return the most memory of the measured process on the GPU, in NVML's readings."""
    if run.get("nvml_end") is None:
        return None
    at_peak: int = run["nvml_end"] - run["end_reserved"] + run["peak_reserved"]
    return max(at_peak, run.get("nvml_peak") or 0)


def _share(shares: list[float]) -> str:
    """Return the number of exact ones, the median, the 90th percentile and the worst of a list of errors."""
    sizes = [abs(share) for share in shares]
    exact, worst = sum(size == 0 for size in sizes), max(shares, key=abs)
    return f"{exact} | {statistics.median(sizes):.2%} | {quantile(sizes, 0.9):.2%} | {worst:+.2%}"


def compare_drawn(measured: Path, estimates: Path, *, each: bool) -> None:
    """Print the table by kind, and the failures; with `each`, also every script."""
    both = list(pairs(measured, estimates))
    shares = ("exact", "median", "90%", "worst")
    reserved_of, allocated_of = ([f"{what}: {shares[0]}", *shares[1:]] for what in ("reserved", "allocated"))
    table("row", "runs", "estimated", *reserved_of, *allocated_of, "bound holds", "bound holds, process")
    for kind in KINDS:
        members = [(run, guess) for run, guess in both if kind_of(run["id"]) == kind]
        given = [(run, guess) for run, guess in members if "failed" not in guess]
        if not given:
            if members:
                print(f"| {kind} | {len(members)} | 0 |" + " |" * 10)
            continue
        reserved, allocated = (list(column) for column in zip(*(errors(*pair) for pair in given), strict=True))
        held = sum(guess["upper"] >= run["peak_reserved"] for run, guess in given)
        whole = [(guess["upper"], taken) for run, guess in given if (taken := process_memory(run)) is not None]
        print(
            f"| {kind} | {len(members)} | {len(given)} | {_share(reserved)} | {_share(allocated)} "
            f"| {held} of {len(given)} | {sum(upper >= taken for upper, taken in whole)} of {len(whole)} |"
        )
    named = Counter(guess.get("torch", "a version that was not noted") for _, guess in both)
    print("\nEstimated with PyTorch " + ", ".join(f"{name} ({count})" for name, count in sorted(named.items())))
    if each:
        _print_each(both)
    for _, guess in both:
        if "failed" in guess:
            reason = guess["failed"].strip().splitlines() or ["?"]
            print(f"\n- `{guess['id']}` was not estimated: {reason[-1][:200]}", end="")
    print()


def _print_each(both: list[tuple[Row, Row]]) -> None:
    print()
    table("script", "reserved", "error", "allocated: error", "process, MiB", "bound less process, MiB")
    for run, guess in both:
        line = [run["id"], f"{run['peak_reserved'] / 2**20:.0f} MiB"]
        if "failed" in guess:
            line += ["failed", "", "", ""]
        else:
            taken = process_memory(run)
            line += [f"{share:+.2%}" for share in errors(run, guess)]
            line += ["?", "?"] if taken is None else [f"{taken / 2**20:.0f}", f"{(guess['upper'] - taken) / 2**20:.0f}"]
        print("|", " | ".join(line), "|")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = parser.add_subparsers(dest="what", required=True)
    for what, help_ in (("data", "make data for the public scripts"), ("list", "print the list of the public scripts")):
        part = parts.add_parser(what, help=help_)
        part.add_argument("root", type=Path)
    part = parts.add_parser("unpack", help="write the drawn scripts and the lists of them")
    part.add_argument("folder", type=Path)
    part = parts.add_parser("estimate", help="estimate the scripts of a list, those that are in the file left out")
    part.add_argument("runs", type=Path)
    part.add_argument("names", nargs="*", help="only these scripts, or kinds of drawn ones")
    part.add_argument("--out", type=Path, required=True)
    part = parts.add_parser("compare", help="print the tables")
    part.add_argument("kind", choices=list(FILES))
    part.add_argument("measured", type=Path, nargs="?")
    part.add_argument("estimates", type=Path, nargs="?")
    part.add_argument("--faster", action="store_true", help="of the public scripts those with compilation and the like")
    part.add_argument("--each", action="store_true", help="every drawn script too")
    options = parser.parse_args()
    if options.what == "data":
        make_data(options.root.resolve())
    elif options.what == "list":
        for run in public_runs(options.root.resolve()):
            print(json.dumps(run))
    elif options.what == "unpack":
        unpack(options.folder.resolve())
    elif options.what == "estimate":
        estimate_all(options.runs, options.names, options.out)
    else:
        measured, estimates = (
            given or DATA / f"{FILES[options.kind]}_{end}.jsonl"
            for given, end in ((options.measured, "h200"), (options.estimates, "estimates"))
        )
        if options.kind == "public":
            compare_public(measured, estimates, faster=options.faster)
        else:
            compare_drawn(measured, estimates, each=options.each)


if __name__ == "__main__":
    main()
