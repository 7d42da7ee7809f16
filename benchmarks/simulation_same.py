"""Whether the simulator still gives the same results, byte for byte, after a change that is to make it faster only.

    python benchmarks/simulation_same.py before.json        # before the change: writes what the runs give
    python benchmarks/simulation_same.py before.json        # after it: compares, and names the runs that differ

Every policy, every way of sharing, failures, time limits, late readings and drawn traces of several users: about ten
seconds in all.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from ullage.placement import policies
from ullage.simulation.engine import simulate
from ullage.simulation.generator import generate_trace
from ullage.simulation.scenario import Scenario
from ullage.simulation.trace import JobTrace

WIDE = {1: 0.80, 2: 0.08, 4: 0.07, 8: 0.05}
SMALL = "8xA100-40GB"


def runs() -> Iterator[tuple[str, JobTrace, Scenario]]:
    """What is run, each with a name."""
    many = generate_trace(3000, seed=1, gpus=200, daily=0.5, users=200, gpu_counts=WIDE)
    cluster = Scenario(gpus="200xA100-40GB")
    yield "cluster", many, cluster
    yield "failures", many, cluster.but(seed=2, node_mtbf_s=2e5, fragmentation=1 << 30, retry_s=5.0)
    busy = generate_trace(3000, seed=5, gpus=100, load=0.9, users=20, gpu_counts=WIDE)
    yield "cluster, magm", busy, Scenario(gpus="100xA100-40GB", policy="magm", estimator="gpumemnet", seed=3)
    over = generate_trace(600, seed=2, gpus=24, load=1.5, users=20, gpu_counts={1: 0.9, 2: 0.1})
    yield "too many jobs", over, Scenario(gpus="24xA100-40GB")
    yield "in the order of arrival", over, Scenario(gpus="24xA100-40GB").but(pairing=0.0)
    few, base = generate_trace(300, seed=3, gpus=8, load=1.2, users=5, burst=3.0), Scenario(gpus=SMALL)
    for policy in policies():
        yield policy, few, base.but(policy=policy, estimator="gpumemnet")
    for sharing in ("timeslice", "mig", "mig:2g.10gb", "off"):
        yield sharing, few, base.but(sharing=sharing)
    limited = replace(few, jobs=[
        replace(job, time_limit=job.work_s * (0.8 if job.id % 7 == 0 else 3.0), priority=job.id % 3) for job in few.jobs
    ])  # fmt: skip
    yield "time limits", limited, base.but(min_speed=0.8)
    yield "two kinds of GPUs", limited, base.but(gpus="4xA100-40GB, 4xH200", min_speed=0.3, reservations=3, patience=50)
    yield (
        "no books",
        few,
        base.but(policy="magm", estimator="none", unknown="floor", foresight=False, bookkeeping=False, at_a_time=1),
    )
    yield "late readings", few, base.but(policy="lug", reading_s=7.0, monitor_delay_s=3.0, stale_after=6.0)
    yield "no delay", few, base.but(monitor_delay_s=0.0, startup_s=0.0, fair=False, max_jobs_per_gpu=2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="what the runs gave before; it is written if it is not there")
    file = parser.parse_args().file
    found = {name: hashlib.sha256(simulate(*run).to_json().encode()).hexdigest() for name, *run in runs()}
    if not file.exists():
        file.write_text(json.dumps(found, indent=1) + "\n")
        print(f"{len(found)} runs are in {file}")
        return
    before = json.loads(file.read_text())
    differ = [name for name in found if found[name] != before.get(name)]
    print(f"{len(found) - len(differ)} of {len(found)} runs are the same" + "".join(f"\n  {name}" for name in differ))
    raise SystemExit(bool(differ))


if __name__ == "__main__":
    main()
