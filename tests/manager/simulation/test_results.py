"""Whether a change that is to make the simulator faster only leaves its results as they were.

Every policy, every way of sharing, failures, time limits, late readings and drawn traces of several users. Where a
change alters results on purpose, `python -m tests.manager.simulation.test_results` writes the new ones.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from ullage.manager.placement import policies
from ullage.manager.simulation.engine import simulate
from ullage.manager.simulation.generator import generate_trace
from ullage.manager.simulation.scenario import Scenario
from ullage.manager.simulation.trace import JobTrace

KEPT = Path(__file__).parent / "data" / "results.json"
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
    few, base = generate_trace(300, seed=3, gpus=8, load=1.2, users=5, burst=3.0), Scenario(gpus=SMALL)
    for policy in policies():
        yield policy, few, base.but(policy=policy, estimator="gpumemnet")
    for sharing in ("time-slicing", "mig", "mig:2g.10gb", "off"):
        yield sharing, few, base.but(sharing=sharing)
    jobs = [
        replace(job, time_limit=job.work_s * (0.8 if job.id % 7 == 0 else 3.0), priority=job.id % 3) for job in few.jobs
    ]
    limited = replace(few, jobs=jobs)
    yield "time limits", limited, base.but(min_speed=0.8)
    yield "two kinds of GPUs", limited, base.but(gpus="4xA100-40GB, 4xH200", min_speed=0.3, patience=50)
    blind = base.but(policy="magm", estimator="none", unknown="floor", foresight=False, bookkeeping=False, at_a_time=1)
    yield "no books", few, blind
    yield "late readings", few, base.but(policy="lug", reading_s=7.0, monitor_delay_s=3.0, stale_after=6.0)
    yield "no delay", few, base.but(monitor_delay_s=0.0, startup_s=0.0, fair=False, max_jobs_per_gpu=2)


def figures(trace: JobTrace, scenario: Scenario) -> dict[str, Any]:
    """What a run gives, in numbers that change with every decision."""
    result = simulate(trace, scenario)
    found = {name: value for name, value in asdict(result.figures).items() if isinstance(value, int | float)}
    begins = [attempt.begin for job in result.jobs for attempt in job.attempts]
    return {**found, "passes": result.passes, "attempts": len(begins), "begins": sum(begins)}


@pytest.mark.slow
def test_results_are_those_that_were_kept() -> None:
    kept = json.loads(KEPT.read_text())
    found = {name: figures(trace, scenario) for name, trace, scenario in runs()}
    assert len(found) > 20 and set(found) == set(kept)
    differ = [name for name in found if found[name] != pytest.approx(kept[name], rel=1e-6)]
    assert not differ, f"these runs changed: {differ}; if they should, write them anew as this file's docstring says"


if __name__ == "__main__":
    made = {name: figures(trace, scenario) for name, trace, scenario in runs()}
    KEPT.parent.mkdir(exist_ok=True)
    KEPT.write_text(json.dumps(made, indent=1) + "\n")
