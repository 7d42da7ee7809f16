"""Draws pairs of training runs of families that no fit knows, each to be read three times: a careful test of sharing.

    python benchmarks/later_pairs.py sets.jsonl
    ullage measure together sets.jsonl --out later_together.jsonl --seconds 0.45     # needs a GPU

The runs are those of `data/later_steps_h200.parquet`, which says how busy each keeps a GPU alone: half of them keep it
busy. A job that waits for its host repeats within a tenth only, so jobs alone are read before, between and after the
pairs: `ullage evaluate utilization` takes the middle of each. The seed is no setting: a list that was looked at is used
up.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from typing import Any

from ullage.research.datasets.model_families import family_of
from ullage.research.measure.job_sets import room
from ullage.research.training.protocol import read_rows
from ullage.units import GIB

DATA = Path(__file__).parent / "data" / "later_steps_h200.parquet"
SEED = "20261118 later pairs"
MEMORY, LONGEST = 7 * GIB, 0.08  # of a job, and seconds of a step alone
BUSY, JOBS, PAIRS, READINGS = 0.7, 16, 20, 3


def jobs(chance: random.Random) -> list[dict[str, Any]]:
    """Runs, one of a family, half of them busy."""
    found: dict[str, tuple[bool, dict[str, Any]]] = {}
    rows = [row for row in read_rows(DATA) if row.get("gract") and row["step_seconds"] <= LONGEST]
    chance.shuffle(rows)
    for row in rows:
        job = json.loads(row["configuration"]) | {"id": row["id"], "peak_reserved": row["peak_reserved"]}
        family, busy = family_of({**job, "arch": row["arch"]}).name, row["gract"] >= BUSY
        full = sum(known is busy for known, _ in found.values()) == JOBS // 2
        if row["id"].startswith("later-") and family not in found and room(job) <= MEMORY and not full:
            found[family] = busy, {**job, "arch": row["arch"]}
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


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sets", type=Path)
    options = parser.parse_args()
    source = random.Random(SEED)
    drawn = jobs(source)
    lines = [*drawn, *({"set": name, "jobs": jobs} for name, jobs in sets([job["id"] for job in drawn], source))]
    options.sets.write_text("".join(json.dumps(line) + "\n" for line in lines))
    print(len(drawn), "jobs,", len(lines) - len(drawn), "sets")
