"""A simulation under a policy of one's own, from a Python file."""

from __future__ import annotations

from pathlib import Path

import pytest

from ullage.errors import PolicyFailed
from ullage.simulation.engine import simulate
from ullage.simulation.result import SimulatedJob
from ullage.simulation.scenario import Scenario
from ullage.simulation.trace import JobKind, JobTrace, TraceJob
from ullage.units import GIB

MAGM = """
def choose(job, gpus, now):
    return sorted(gpus, key=lambda gpu: gpu.free, reverse=True)

choose.backfills = choose.predicts = False
"""
KINDS = [JobKind(f"{size} GiB", memory=size * GIB) for size in (3, 7, 12, 22, 38)]


def trace() -> JobTrace:
    """Sixty jobs, more than the GPUs can take at once, some of them on two GPUs."""
    jobs = [
        TraceJob(n, 20.0 * (n // 3), KINDS[n * n % 5], work_s=60.0 + 37 * (n * 7 % 11), gpus=1 + (n % 9 == 0))
        for n in range(60)
    ]
    return JobTrace("made", jobs)


def simulated(policy: str) -> list[SimulatedJob]:
    return list(simulate(trace(), Scenario(gpus="4xA100-40GB", policy=policy, estimator="oracle")).jobs)


def written(folder: Path, text: str) -> str:
    (folder / "mine.py").write_text(text)
    return f"{folder / 'mine.py'}:choose"


def test_magm_written_as_a_policy_of_ones_own_is_magm(tmp_path: Path) -> None:
    found = simulated(written(tmp_path, MAGM))
    assert found == simulated("magm") != simulated("best-fit")
    assert {job.state for job in found} == {"done"}


def test_a_policy_that_fails_ends_the_simulation_with_its_message(tmp_path: Path) -> None:
    with pytest.raises(PolicyFailed, match="the policy mine.py:choose failed for job 0: NameError: name 'gpu' is not"):
        simulated(written(tmp_path, "def choose(job, gpus, now):\n    return gpu\n"))


def test_a_job_that_is_never_wanted_waits_and_the_others_end(tmp_path: Path) -> None:
    text = "def choose(job, gpus, now):\n    return [] if job.promise > 30 << 30 else gpus\n"
    found = simulated(written(tmp_path, text))
    assert {(job.kind, job.state) for job in found if job.state != "done"} == {("38 GiB", "waiting")}
