"""The manager's recorded runs on a real GPU, simulated again from what was known before them."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks" / "gpu"))
import simulated_reality  # noqa: E402

# Seconds until all jobs of a trace were done on an H200, the winner first. The `ullage` of these runs decided by rules
# that are gone (`benchmarks/results/simulation.md`).
SECONDS = {
    "h200_trace": {"ullage+mps": 81, "magm+mps": 83, "magm": 84, "ullage": 86, "exclusive": 328},
    "h200_trace_long": {"ullage+mps": 106, "magm": 111, "ullage": 113, "exclusive": 359},
    "h200_trace_detail": {"magm": 60, "magm+mps": 61, "ullage+mps": 154, "ullage": 185},
}


@pytest.fixture(scope="module")
def replays():
    return simulated_reality.Replays(simulated_reality.recorded())


@pytest.fixture(scope="module")
def found(replays):
    """The traces of which no run is by the policy as it is now: what it does in reality is not for tests to fix."""
    return [each for each in replays.rows() if each.recorded.name in SECONDS]


def errors(rows, *names):
    return [abs(each.ours.makespan_s / each.real.makespan_s - 1) for each in rows if each.recorded.name in names]


def test_makespans_are_those_that_were_measured(found):
    first = errors(found, "h200_trace", "h200_trace_long")
    assert len(first) == 9 + 5 and max(first) < 0.10, (
        "nine with their placements, five by policies that are as they were"
    )
    later = errors(found, "h200_trace_detail")
    assert len(later) == 4 + 2 and max(later) < 0.06


def test_shared_traces_with_their_placements(reference):
    traces = simulated_reality.recorded(reference("groundtruth/traces"))
    shared = [each for each in traces if not each.named and not each.name.startswith("h200_trace")]
    found = simulated_reality.Replays(traces).rows()
    off = errors([each for each in found if not each.by_policy], *(each.name for each in shared))
    assert len(off) == 8 and max(off) < 0.10


def test_policies_have_the_order_that_was_measured(found):
    assert simulated_reality.disagreements(found) == []
    runs = {(each.recorded.name, each.run): each.ours.makespan_s for each in found}
    for name in ("h200_trace", "h200_trace_long"):
        assert runs[name, "exclusive"] > 2 * runs[name, "magm"], "sharing is what saves time"


def test_jobs_are_placed_in_the_order_in_which_they_were(replays):
    for recorded in (simulated_reality.named(replays.traces, name) for name in SECONDS):
        assert recorded.current
        for run in recorded.current:
            same, pairs = replays.same_order(recorded, run)
            assert pairs > 100 and same >= 0.97 * pairs, run


def test_a_trace_is_judged_by_what_others_tell(replays):
    """Without its own records, the phases and steps of its jobs are known from other traces."""
    for recorded in replays.traces:
        known = replays.known[id(recorded)]
        assert known.timed and not any(each in known.timed for each in recorded.timed)


def test_evaluating_and_saving_are_phases_of_their_own():
    told = {
        "imported": 3.0,
        "first_step": 10.0,
        "last_step": 40.0,
        "steps": 21,
        "evaluated": [[15.0, 18.0], [40.0, 44.0]],
        "saved": [[18.0, 20.0], [44.0, 45.0]],
        "waited_for_data": 2.5,
    }
    job = {"name": "toy", "told": told, "attempts": [{"placed": 0.0, "ended": 46.0}]}
    (phases,) = simulated_reality.job_phases([job])
    assert phases._asdict() == {
        "kind": "toy",
        "starting": 3.0,
        "warming_up": 7.0,
        "evaluating": 7.0,
        "saving": 3.0,
        "ending": 1.0,
        "step": 1.25,
        "beside": 0.0,
    }


def test_a_trace_of_jobs_that_wait_for_estimates(tmp_path):
    """As `manager_trace.py` writes it now: the simulator replays its placements, and does not decide in its place."""
    detail = json.loads(simulated_reality.DETAILED.read_text().splitlines()[0])
    for job in detail["each"]:
        job["queued"] = None
    row = {**detail, "trace": "small-light", "run": "magm/monitoring.window=20s", "estimated": False, "estimates": []}
    (tmp_path / "new.jsonl").write_text(json.dumps(row))
    found = simulated_reality.named(simulated_reality.recorded(tmp_path), "small-light")
    assert found.current == frozenset() and found.rules(row["run"]).window == 20
    replays = simulated_reality.Replays([*simulated_reality.recorded(), found])
    (replayed,) = [each for each in replays.rows() if each.recorded is found]
    assert not replayed.by_policy and errors([replayed], "small-light")[0] < 0.10


def test_a_history_shows_the_effect_of_another_sharing(replays):
    """Of the policy that is as it was then: the `ullage` of these histories decided by rules that are gone."""
    detailed = simulated_reality.named(replays.traces, "h200_trace_detail")
    found = list(simulated_reality.from_histories(detailed))
    published = [ours / real - 1 for known, wanted, real, ours in found if known[:4] == wanted[:4] == "magm"]
    assert len(found) == 16 and len(published) == 4 and max(map(abs, published)) < 0.10


@pytest.mark.parametrize("name", SECONDS)
def test_the_winner_in_reality(replays, name):
    recorded, seconds = simulated_reality.named(replays.traces, name), SECONDS[name]
    assert {run: round(row["makespan_s"]) for run, row in recorded.runs.items()} == seconds
    assert min(seconds, key=seconds.__getitem__) == next(iter(seconds)), "the first in the list won"


def test_the_winner_on_the_named_traces(replays):
    """The policy as it is now: what it did in reality stays recorded, whatever the simulator makes of it."""
    ten = "magm/monitoring.window=10s"
    seconds = {
        "small-heavy": {"ullage": 45, ten: 55, "magm": 77},
        "small-known": {"ullage": 39, ten: 40},
        "long-known": {"ullage": 72, ten: 72},
        "large-known": {"ullage": 62, ten: 72},
    }
    runs = {name: simulated_reality.named(replays.traces, name).runs for name in seconds}
    assert {
        name: {run: round(row["makespan_s"]) for run, row in recorded.items()} for name, recorded in runs.items()
    } == seconds


def test_the_winner_on_the_later_traces():
    ten = "magm/monitoring.window=10s"
    seconds = {}
    for row in simulated_reality.rows(simulated_reality.DATA / "later" / "h200_traces.jsonl"):
        seconds.setdefault((row["trace"], row["seed"]), {}).setdefault(row["run"], []).append(round(row["makespan_s"]))
    assert seconds == {
        ("small-known", 4946): {"ullage": [38, 36], ten: [37, 37], "magm": [64]},
        ("small-known", 6758): {"ullage+mps": [37], f"{ten}+mps": [49], "magm+mps": [103]},
        ("small-light", 9378): {"ullage": [77], ten: [82], "magm": [83], "exclusive": [102]},
        ("small-known", 1233): {"ullage": [35], ten: [35], "exclusive": [207], "ullage/placing.min_speed=0.7": [77]},
        ("small-heavy", 2983): {
            "ullage+mps": [31, 30],
            f"{ten}+mps": [48, 47],
            "magm+mps": [66],
            "exclusive": [138],
        },
        ("large-heavy", 1224): {"ullage": [74], ten: [84], "magm": [129]},
        ("large-heavy", 3509): {"ullage+mps": [58], f"{ten}+mps": [68]},
        ("long-heavy", 4558): {"ullage": [67], ten: [69], "magm": [73]},
        ("long-heavy", 3551): {"ullage+mps": [43], f"{ten}+mps": [62]},
        ("long-known", 1948): {"ullage+mps": [57], f"{ten}+mps": [57]},
        ("overbooked", 9796): {"ullage": [51], ten: [56], "magm": [59]},
        ("overbooked", 9639): {"ullage+mps": [45], f"{ten}+mps": [55]},
        ("small-heavy", 4879): {"ullage": [43], ten: [59]},
        ("large-heavy", 6035): {"ullage": [62], ten: [75]},
        ("long-heavy", 8567): {"ullage": [68], ten: [69]},
    }


def test_the_slowdown_of_neighbours_is_a_part_of_the_truth(replays, found):
    """Without it, the runs in which the GPU is full come out far too short."""
    deaf = list(replays.rows(replace(simulated_reality.WORLD, interference=False)))
    assert max(errors(deaf, "h200_trace_long")) > 0.10 > max(errors(found, "h200_trace_long"))
