"""A simulation under a policy of one's own, from a Python file."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import ullage
import ullage.manager
import ullage.manager.simulation
from ullage.errors import PolicyFailed
from ullage.manager.placement import Job
from ullage.manager.placement.custom_policies import GpuView
from ullage.manager.simulation.engine import simulate
from ullage.manager.simulation.generator import generate_trace
from ullage.manager.simulation.result import SimulatedJob
from ullage.manager.simulation.scenario import Scenario
from ullage.manager.simulation.trace import JobKind, JobTrace, TraceJob
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


def test_a_failing_policy_ends_the_simulation_with_its_message(tmp_path: Path) -> None:
    with pytest.raises(PolicyFailed, match="the policy mine.py:choose failed for job 0: NameError: name 'gpu' is not"):
        simulated(written(tmp_path, "def choose(job, gpus, now):\n    return gpu\n"))


def test_a_job_that_is_never_wanted_waits_and_the_others_end(tmp_path: Path) -> None:
    text = "def choose(job, gpus, now):\n    return [] if job.promise > 30 << 30 else gpus\n"
    found = simulated(written(tmp_path, text))
    assert {(job.kind, job.state) for job in found if job.state != "done"} == {("38 GiB", "waiting")}


def test_a_function_will_do_in_python() -> None:
    def fullest(job: Job, gpus: Sequence[GpuView], now: float) -> list[GpuView]:
        return sorted(gpus, key=lambda gpu: gpu.free)

    found = ullage.manager.simulation.simulate(trace(), gpus="4xA100-40GB", policy=fullest, estimator="oracle")
    assert (found.scenario.policy, found.figures.done) == ("fullest", 60)
    assert list(found.jobs) != simulated("magm")


# The policies of the tutorial.

ROOT = Path(__file__).parents[3]
EXAMPLE = ROOT / "examples" / "my_policy.py"


def completion(policy: str, seed: int, **rules: Any) -> float:
    """The mean time from arrival to the end, in a simulation in which nothing runs out of memory."""
    found = simulate(generate_trace(200, seed, load=2.0), Scenario(gpus="4xA100-40GB", policy=policy).but(**rules))
    assert found.figures.ooms == 0 and {job.state for job in found.jobs} == {"done"}
    return found.figures.completion_s


@pytest.mark.slow
def test_the_tutorials_policy_beats_magm_on_several_traces() -> None:
    for seed in range(2):
        magm = completion("magm", seed)
        assert completion(f"{EXAMPLE}:choose", seed) < magm
        assert completion(f"{EXAMPLE}:choose", seed, smact_limit=None) < magm


def test_the_tutorial_shows_the_example() -> None:
    page, code = (ROOT / "docs" / "how-to" / "write-a-policy.md").read_text(), EXAMPLE.read_text()
    shown = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    assert len(shown) == 4
    assert all(block in code for block in shown)
