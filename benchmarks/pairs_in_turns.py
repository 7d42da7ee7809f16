"""Draws pairs of training runs to be read in turns with their jobs alone: a test of sharing with little noise.

    python benchmarks/pairs_in_turns.py test.jsonl
    python benchmarks/pairs_in_turns.py fit.jsonl --fit
    ullage measure together test.jsonl --out turns_together.jsonl --rounds 2 --seconds 0.5     # needs a GPU

The test has jobs of families that are in no fit and in no pairs before, one of each, as many busy ones as others. With
`--fit` they are of families for the fit, most of which wait for their host. Both kinds are busy as `data/` says of them
alone. The seed is no setting: a list that was looked at is used up.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from more_pairs import shuffled, written

from ullage.research.datasets.model_families import family_of, is_for_testing
from ullage.research.measure.job_sets import room
from ullage.units import GIB
from ullage.workloads.configuration import read_rows

DATA = Path(__file__).parent / "data"
SEED = "20261118 pairs in turns"
KNOWN = ("together", "more_together", "fresh_together", "later_together")  # files of pairs
MEMORY, LONGEST, BUSY = 10 * GIB, 0.09, 0.7  # of a job, seconds of a step alone, and its GRACT


def known_families() -> set[str]:
    """Those that are in pairs already."""
    files = [DATA / f"{name}_h200.jsonl.gz" for name in KNOWN]
    return {family_of(row["job"]).name for file in files for row in read_rows(file) if "alone" in row}


def jobs(
    sources: list[str], belongs: Callable[[str], bool], most: dict[bool, int], chance: random.Random
) -> list[dict[str, Any]]:
    """Runs of these data sets, one of a family, so many that are busy and so many that are not."""
    found: dict[str, tuple[bool, dict[str, Any]]] = {}
    rows = [each for source in sources for each in shuffled(DATA / f"{source}_h200.parquet", LONGEST, chance)]
    for row, job, family in rows:
        busy = row["gract"] >= BUSY
        full = sum(known is busy for known, _ in found.values()) == most[busy]
        fits = room(job) <= MEMORY and not job.get("compiled") and not full
        if family not in found and belongs(family) and fits:
            found[family] = busy, job
    return [job for _, job in found.values()]


def pairs(names: list[str], count: int, chance: random.Random) -> list[dict[str, Any]]:
    """Different pairs, in a drawn order."""
    every = [(one, other) for place, one in enumerate(names) for other in names[place + 1 :]]
    return [{"set": f"pair-{number:02d}", "jobs": pair} for number, pair in enumerate(chance.sample(every, count))]


def drawn(for_fit: bool) -> list[dict[str, Any]]:
    """All lines: jobs, and pairs of them."""
    source = random.Random(f"{SEED}, {'fit' if for_fit else 'test'}")
    if for_fit:
        found = jobs(["utilization", "host"], lambda name: not is_for_testing(name), {True: 7, False: 11}, source)
        return [*found, *pairs([job["id"] for job in found], 20, source)]
    known = known_families()
    found = jobs(["fresh_steps", "later_steps"], lambda name: name not in known, {True: 8, False: 8}, source)
    return [*found, *pairs([job["id"] for job in found], 24, source)]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sets", type=Path)
    parser.add_argument("--fit", action="store_true", help="of families for the fit")
    options = parser.parse_args()
    written(options.sets, drawn(options.fit))
