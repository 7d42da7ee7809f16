"""The accuracy of estimates of convolutional networks from families outside all fits.

    python benchmarks/accuracy/fresh_networks.py benchmarks/data/h200_fresh_second.jsonl.gz
    python benchmarks/accuracy/fresh_networks.py benchmarks/data/h200_fresh_second.jsonl.gz \
        --answers benchmarks/data/h200_fresh_answers.jsonl.xz                    # with those that an H200 gave
    python benchmarks/accuracy/fresh_networks.py fresh.jsonl --live              # with answers of its own cuDNN

The networks are those of `ullage_lab.networks.drawn`, with sizes drawn at random. Half of the runs have any
whole numbers as channels, the others multiples of 8. Each list was measured before anybody looked at its estimates.
Shipped are 296 runs (`h200_fresh`), 286 (`h200_fresh_second`), 312 (`h200_fresh_third`), 116 with four more families
(`h200_fresh_fourth`), 112 of six others (`h200_fresh_fifth`), 70 of six others again (`h200_fresh_sixth`), and 48 with
`cudnn.benchmark` (`h200_fresh_tried`). The estimates are those of today's rules.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from ullage.hardware import gpu
from ullage.measuring import accuracy
from ullage.virtual.cudnn import cudnn_query
from ullage.virtual.releases import MEASURED, as_measured
from ullage_lab.judge.truth import measured_rows

_inside = ExitStack()  # open for the life of an estimating process
_card = [gpu("H200")]


def _begin(answers: Path | None, live: bool) -> None:
    """Set up an estimating process: an H200 with these answers of cuDNN, or this machine's GPU."""
    torch.set_num_threads(1)
    if live:
        _card[0] = gpu("local")
        _inside.enter_context(cudnn_query.asking(_card[0]))
    if answers is not None:
        _card[0] = replace(gpu("H200"), uuid=answers.name)
        known = _inside.enter_context(cudnn_query.used(cudnn_query.Answers(_card[0], cudnn=MEASURED.cudnn)))
        for row in measured_rows(answers):
            known.learn(row)


def _compared(row: dict[str, Any]) -> accuracy.Comparison:
    return accuracy.compare(row, _card[0])


def table_lines(compared: list[accuracy.Comparison]) -> Iterator[tuple[str, ...]]:
    """Yield a line for each figure: count, figure, errors; for the process, also how often the bound holds and how far
    it lies above."""
    limits = accuracy.bound(compared)
    for line in accuracy.summarize(compared):
        if line.group == "all":
            errors = (f"{line.exact:.1%}", f"{line.median:.2%}", f"{line.p90:.2%}", f"{line.p99:.2%}")
            above = (f"{limits['holds']:.1%}", f"{limits['above']:.2%}") if line.figure == "process" else ("", "")
            yield str(line.given), line.figure, *errors, *above


def judge(path: Path, workers: int, answers: Path | None, live: bool, out: Path | None) -> None:
    """Print the errors of all runs, of those with odd channels and of the others, and by family."""
    rows = [row for row in measured_rows(path) if "peak_reserved" in row]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, context, initializer=_begin, initargs=(answers, live)) as pool:
        compared = pool.map(_compared, rows, chunksize=4)
        comparisons = list(track(compared, total=len(rows), console=Console(stderr=True)))
    if out is not None:
        out.write_text("".join(json.dumps(asdict(one)) + "\n" for one in comparisons))
    groups = {"all": rows, "odd channels": [row for row in rows if row["odd"]]}
    groups |= {"multiples of 8": [row for row in rows if not row["odd"]]}
    for row in rows:
        groups.setdefault(row["family"], []).append(row)
    shown = Table("runs", "count", "figure", "exact", "median", "90%", "99%", "upper holds", "above")
    for name, members in groups.items():
        wanted = {row["id"] for row in members}
        for line in table_lines([one for one in comparisons if one.id in wanted]) if members else ():
            shown.add_row(name, *line)
    Console(width=120).print(shown)
    for one in comparisons:
        if one.failed:
            print(f"not estimated: {one.id}: {one.failed}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="measured runs")
    parser.add_argument("--answers", type=Path, metavar="FILE", help="take what cuDNN answered from here")
    parser.add_argument("--live", action="store_true", help="on this machine's GPU, whose cuDNN is asked")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write a line for each run")
    parser.add_argument("--workers", type=int, default=2, metavar="N", help="so many processes at once")
    options = parser.parse_args()
    judge(options.file, options.workers, options.answers, options.live, options.out)


if __name__ == "__main__":
    as_measured()
    main()
