"""`ullage contribute`: measure small training runs into one file without private data."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ullage.cli.options import Json, option
from ullage.cli.progress import following
from ullage.cli.tables import fitted
from ullage.errors import InvalidValue
from ullage.units import format_bytes, format_duration, parse_duration

if TYPE_CHECKING:
    from ullage.measuring.contribution import Contribution

_LONGEST = 180.0  # longest training run, in seconds


def contribute(
    out: Annotated[Path, option("Output file. Runs already in it are skipped.", "FILE")] = Path("contribution.jsonl"),
    time: Annotated[str, option("Start no run after this long, such as 10m.", "TIME")] = "20m",
    yes: Annotated[bool, option("Do not ask for confirmation.", "--yes -y")] = False,
    dry_run: Annotated[bool, option("Print the runs; measure nothing.", "--dry-run")] = False,
    show: Annotated[Path | None, option("Show everything in a file; measure nothing.", "FILE")] = None,
    as_json: Json = False,
) -> None:
    """Measure small training runs on this machine's GPU, and write one file to share.

    Runs 25 small training jobs one after the other, each in its own process, and records the memory of each. First it
    prints the plan and asks. The file contains the GPU's name, versions and numbers: no user, host, path or serial
    number. After Ctrl-C or a crash, run the same command again to continue.

    Examples:

      ullage contribute --time 10m --out my-card.jsonl
      ullage contribute --show my-card.jsonl
    """
    from ullage.measuring import contribution

    if show is not None:
        _show(contribution.read(show), as_json)
        return
    seconds = parse_duration(time)
    if dry_run:
        for name, row in contribution.TRAININGS.items():
            print(json.dumps({"id": name, **row}))
        return
    from ullage.measuring.machine import describe, measure_one

    header = describe()
    card, trainings = header["gpu"], contribution.TRAININGS
    print(
        f"This will train {len(trainings)} small models on {card['name']} ({format_bytes(card['memory'])}), for about "
        f"{format_duration(seconds)}, with up to 8 GB of its memory.\nNothing is downloaded or sent. "
        f"The result is one file: {out}. It will say:",
        file=sys.stderr,
    )
    print(f"  {json.dumps(header)}\nand for each training its peak memory and the time of a step.", file=sys.stderr)
    if not yes and not (sys.stdin.isatty() and typer.confirm("Go on?", err=True)):
        raise InvalidValue("nothing was run; answer y, or type: ullage contribute --yes")
    tally = {"measured": 0, "failed": 0}
    begun = contribution.contribute(out, header, lambda row, left: measure_one(row, min(left, _LONGEST)), seconds)
    with following("measuring", len(contribution.TRAININGS), stoppable=True, forks=True) as going:
        for name, line in begun:
            tally["failed" if "failed" in line else "measured"] += 1
            going.step(f"{name}: {line['failed']}" if "failed" in line else name)
    contents = contribution.read(out)
    missing = len(contribution.TRAININGS) - len(contents.runs)
    if as_json:
        print(json.dumps({"file": str(out), **tally, "in_file": len(contents.runs), "left": missing}))
        return
    print(f"{len(contents.runs)} of {len(contribution.TRAININGS)} trainings are in {out}")
    if missing:
        print(f"{missing} are left: type the same line again to go on")
    print(f"Look at it: ullage contribute --show {out}")
    print("How to send it: https://github.com/ullage/ullage/blob/main/docs/how-to/measure.md")


def _show(contents: "Contribution", as_json: bool) -> None:
    if as_json:
        print(json.dumps({**contents.header, "runs": contents.runs}))
        return
    card = contents.header["gpu"]
    size = format_bytes(card["memory"])
    print(f"GPU: {card['name']}, {size}, {card['sms']} SMs, compute capability {card['capability']}")
    versions = {name: contents.header[name] for name in ("driver", "cuda", "cudnn") if name in contents.header}
    versions |= contents.header["versions"]
    print("Versions: " + ", ".join(f"{name} {value}" for name, value in versions.items()))
    rows = []
    for name, run in contents.runs.items():
        if "failed" in run:
            rows.append([name, run["failed"], "", "", ""])
            continue
        outside = run["nvml_end"] - run["end_reserved"] if "nvml_end" in run else None
        sizes = [format_bytes(run["peak_alloc"]), format_bytes(run["peak_reserved"])]
        rows.append([name, *sizes, format_bytes(outside) if outside is not None else "", f"{run['step_s']:.4f} s"])
    print(fitted(("training", "allocated", "reserved", "outside PyTorch", "step"), rows, give_way=("step",)))
    print("There is nothing else in the file.")
