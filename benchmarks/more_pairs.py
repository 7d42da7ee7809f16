"""Draws pairs of training runs of families for the fit: to measure how they slow each other down under MPS.

    python benchmarks/more_pairs.py sets.jsonl
    ullage measure together sets.jsonl --out more_together.jsonl --how mps --seconds 0.45     # needs a GPU

The runs are those of `data/utilization_h200.parquet`, which says how busy each keeps a GPU alone: a third waits for its
host, the others keep the GPU busy, half of them with many warps and half with few. Each pair has one that is busy.
"""

from __future__ import annotations

import argparse
import json
import random
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ullage.research.datasets.model_families import family_of, is_for_testing
from ullage.research.measure.job_sets import room
from ullage.research.training.protocol import read_rows
from ullage.units import GIB

DATA = Path(__file__).parent / "data" / "utilization_h200.parquet"
SEED = "20261118 pairs"
MEMORY, LONGEST = 5 * GIB, 0.09  # of a job, and seconds of a step alone
BUSY, WAITING, MANY_WARPS = 0.75, 0.45, 0.28
GROUPS = {"warps": 13, "busy": 13, "waiting": 13}
PAIRS = 130


def group_of(row: dict[str, Any]) -> str | None:
    """Which kind of run it is, alone."""
    if row["gract"] >= BUSY:
        return "warps" if row["smocc"] >= MANY_WARPS else "busy"
    return "waiting" if row["gract"] < WAITING else None


def shuffled(file: Path, longest: float, chance: random.Random) -> Iterator[tuple[dict[str, Any], dict[str, Any], str]]:
    """Rows of a data set whose steps take at most so long, each as a job and with its family, in a drawn order."""
    rows = [row for row in read_rows(file) if row.get("gract") and row["step_seconds"] <= longest]
    chance.shuffle(rows)
    for row in rows:
        job = json.loads(row["configuration"]) | {name: row[name] for name in ("id", "peak_reserved", "arch")}
        yield row, job, family_of(job).name


def write(description: str | None, lines: Callable[[], list[dict[str, Any]]]) -> None:
    """The command: a list of jobs and sets goes to the file that is named."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sets", type=Path)
    written(parser.parse_args().sets, lines())


def written(file: Path, lines: list[dict[str, Any]]) -> None:
    """Jobs and sets go to a file."""
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    count = sum("set" in line for line in lines)
    print(len(lines) - count, "jobs,", count, "sets")


def jobs(chance: random.Random) -> dict[str, list[dict[str, Any]]]:
    """Runs of each group, no more than two of a family."""
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in GROUPS}
    seen: Counter[tuple[str, str]] = Counter()
    for row, job, family in shuffled(DATA, LONGEST, chance):
        group = group_of(row)
        fits = room(job) <= MEMORY and job["opt"] != "adafactor" and not job.get("compiled")
        if group is None or is_for_testing(family) or not fits or len(found[group]) == GROUPS[group]:
            continue
        seen[group, family] += 1
        if seen[group, family] <= 2:
            found[group].append(job)
    return found


def pairs(groups: dict[str, list[dict[str, Any]]], chance: random.Random) -> list[tuple[str, str]]:
    """Different pairs, the first of each busy."""
    busy = [job["id"] for name in ("warps", "busy") for job in groups[name]]
    every = busy + [job["id"] for job in groups["waiting"]]
    found: list[tuple[str, str]] = []
    while len(found) < PAIRS:
        pair = chance.choice(busy), chance.choice(every)
        if pair[0] != pair[1] and pair not in found and pair[::-1] not in found:
            found.append(pair)
    return found


def drawn() -> list[dict[str, Any]]:
    """All lines: jobs, and pairs of them."""
    source = random.Random(SEED)
    groups = jobs(source)
    sets = [{"set": f"pair-{number:03d}", "jobs": pair} for number, pair in enumerate(pairs(groups, source))]
    return [*(job for several in groups.values() for job in several), *sets]


if __name__ == "__main__":
    write(__doc__, drawn)
