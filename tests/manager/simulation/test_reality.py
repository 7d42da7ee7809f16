"""The manager's recorded runs on a real GPU, simulated again from what was known before them."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks" / "gpu"))
import simulated_reality  # noqa: E402


@pytest.fixture(scope="module")
def found():
    return list(simulated_reality.compared())


def off(rows, names):
    return [abs(ours.makespan_s / real.makespan_s - 1) for recorded, _, real, ours in rows if recorded.name in names]


def test_makespans_are_those_that_were_measured(found):
    errors = off(found, ("h200_trace", "h200_trace_long"))
    assert len(errors) == 9 and max(errors) < 0.10
    later = off(found, ("h200_trace_detail",))
    earlier = "in two of them, starts took longer than alone, and ullage+mps decided by earlier figures of sharing"
    assert len(later) == 4 and max(later) < 0.21 and sorted(later)[-2] < 0.16, earlier


def test_policies_have_the_order_that_was_measured(found):
    assert simulated_reality.disagreements(found) == []
    runs = {(recorded.name, run): ours.makespan_s for recorded, run, _, ours in found}
    for name in ("h200_trace", "h200_trace_long"):
        assert runs[name, "exclusive"] > 2 * runs[name, "magm"], "sharing is what saves time"


def test_jobs_are_placed_in_the_order_in_which_they_were():
    recorded = next(each for each in simulated_reality.RECORDED if each.name == "h200_trace_detail")
    assert recorded.runs
    for run in recorded.runs:
        same, pairs = simulated_reality.same_order(recorded, run)
        least = 0.92 if run["run"] == "ullage+mps" else 0.97  # its manager decided by earlier figures of sharing
        assert pairs > 100 and same >= least * pairs, run["run"]


def test_a_history_shows_the_effect_of_another_sharing():
    """Of the policy that is as it was then: the `ullage` of these histories decided by rules that are gone."""
    found = list(simulated_reality.replays())
    published = [ours / real - 1 for known, wanted, real, ours in found if known[:4] == wanted[:4] == "magm"]
    assert len(found) == 16 and len(published) == 4 and max(map(abs, published)) < 0.10


# Seconds until all jobs of a trace were done on an H200, and the version of `ullage` that was played. No recorded run
# is of the policy as it is now (`benchmarks/results/simulation.md`).
MEASURED = [
    ("h200_trace", "of 2026-11-15", {"ullage+mps": 81, "magm+mps": 83, "magm": 84, "ullage": 86, "exclusive": 328}),
    ("h200_trace_long", "of 2026-11-15", {"ullage+mps": 106, "magm": 111, "ullage": 113, "exclusive": 359}),
    ("h200_trace_detail", "of 2026-11-16", {"magm": 60, "magm+mps": 61, "ullage+mps": 154, "ullage": 185}),
]


@pytest.mark.parametrize(("name", "version", "seconds"), MEASURED)
def test_who_won_in_reality_and_with_which_version(name, version, seconds):
    recorded = next(each for each in simulated_reality.RECORDED if each.name == name)
    assert {run["run"]: round(run["makespan_s"]) for run in recorded.runs} == seconds, version
    assert min(seconds, key=seconds.__getitem__) == next(iter(seconds)), "the first in the list won"


def test_the_slowdown_of_neighbours_is_a_part_of_the_truth(found):
    """Without it, the runs in which the GPU is full come out far too short."""
    deaf = list(simulated_reality.compared(replace(simulated_reality.WORLD, interference=False)))
    assert max(off(deaf, ("h200_trace_long",))) > 0.10 > max(off(found, ("h200_trace_long",)))
