"""Draws pairs of training runs of families that no fit knows, each to be read three times: a careful test of sharing.

    python benchmarks/later_pairs.py sets.jsonl
    ullage measure together sets.jsonl --out later_together.jsonl --seconds 0.45     # needs a GPU

The runs are those of `data/later_steps_h200.parquet`, which says how busy each keeps a GPU alone: half of them keep it
busy. A job that waits for its host repeats within a tenth only, so jobs alone are read before, between and after the
pairs: `ullage evaluate utilization` takes the middle of each. The seed is no setting: a list that was looked at is used
up.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from more_pairs import shuffled, write

from ullage.research.measure.job_sets import room
from ullage.units import GIB

DATA = Path(__file__).parent / "data" / "later_steps_h200.parquet"
SEED = "20261118 later pairs"
MEMORY, LONGEST = 7 * GIB, 0.08  # of a job, and seconds of a step alone
BUSY, JOBS, PAIRS, READINGS = 0.7, 16, 20, 3


def jobs(chance: random.Random) -> list[dict[str, Any]]:
    """Runs, one of a family, half of them busy."""
    found: dict[str, tuple[bool, dict[str, Any]]] = {}
    for row, job, family in shuffled(DATA, LONGEST, chance):
        busy = row["gract"] >= BUSY
        full = sum(known is busy for known, _ in found.values()) == JOBS // 2
        if row["id"].startswith("later-") and family not in found and room(job) <= MEMORY and not full:
            found[family] = busy, job
    return [job for _, job in found.values()]


def sets(names: list[str], chance: random.Random) -> list[tuple[str, tuple[str, ...]]]:
    """Different pairs in several passes, and each job alone after every pass."""
    every = [(one, other) for place, one in enumerate(names) for other in names[place + 1 :]]
    pairs = [(f"pair-{number:02d}", pair) for number, pair in enumerate(chance.sample(every, PAIRS))]
    alone = [(f"alone-{name}", (name,)) for name in names]
    found = []
    for number in range(READINGS):
        for several in (pairs, alone):
            found += [(f"{name}#{number}", jobs) for name, jobs in chance.sample(several, len(several))]
    return found


def drawn() -> list[dict[str, Any]]:
    """All lines: jobs, and sets of them."""
    source = random.Random(SEED)
    found = jobs(source)
    return [*found, *({"set": name, "jobs": jobs} for name, jobs in sets([job["id"] for job in found], source))]


if __name__ == "__main__":
    write(__doc__, drawn)
