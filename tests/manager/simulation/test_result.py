"""What a simulation comes to, by hand-made runs whose figures are known."""

import gzip
import json

import pytest
from tests.manager.simulation.made_runs import GIB, JOBS, attempt, job, run

from ullage.errors import InvalidValue, UnknownName
from ullage.manager.placement import Rules
from ullage.manager.simulation.result import Figures, SimulationResult, jain, read_results, write_results
from ullage.manager.simulation.scenario import Scenario, World


def test_times_are_those_of_the_jobs_that_are_done():
    found = run().figures
    assert (found.jobs, found.done, found.failed, found.unplaced, found.ooms, found.lost) == (5, 3, 1, 1, 1, 1)
    assert found.total_s == 300.0  # from the first arrival, at 10 s
    assert found.running_s == pytest.approx((100 + 210 + 200) / 3)
    assert found.completion_s == pytest.approx((100 + 240 + 290) / 3)
    assert found.waiting_s == pytest.approx(found.completion_s - found.running_s)
    assert (found.slowdown_median, found.slowdown) == (2.4, pytest.approx(2.1))


def test_users_are_compared_by_their_slowdowns():
    result = run()
    assert [(row.user, row.jobs, row.done, row.slowdown) for row in result.users] == [
        ("ann", 4, 2, 1.95),
        ("bob", 1, 1, 2.4),
    ]
    assert result.figures.fairness == pytest.approx(jain([1.95, 2.4]))
    assert jain([]) is None


def test_each_gpu_is_summed_over_time():
    first, second = run().per_gpu
    assert (first.jobs_peak, first.memory_peak) == (2, 20 * GIB)
    assert first.energy_j == 10 * 50 + 100 * 200 + 200 * 400
    assert first.busy == pytest.approx(300 / 310) and second.smact == pytest.approx(0.25 * 200 / 310)
    assert second.memory == pytest.approx(0.1 * 200 / 310)


def test_where_no_job_is_done_means_are_unknown():
    found = run(jobs=[job(1, 5.0, state="waiting")]).figures
    assert (found.waiting_s, found.slowdown, found.fairness, found.total_s) == (None, None, None, 0.0)
    assert run(jobs=[]).figures.jobs == 0
    at_once = run(jobs=[job(1, 0.0, attempt(0.0, 1.0), work_s=0.0)]).figures
    assert at_once.slowdown is None and at_once.completion_s == 1.0


def test_a_result_is_the_same_after_a_trip_through_json(tmp_path):
    result = run(rules=Rules(smact_limit=None, predict=lambda works, slot: None), world=World(startup_s=3.0), seed=7)
    again = SimulationResult.from_dict(json.loads(json.dumps(result.to_dict())))
    assert again.to_dict() == result.to_dict() and again.figures == result.figures
    assert again.jobs == list(JOBS) and again.scenario.world.startup_s == 3.0
    later = SimulationResult.from_dict(result.to_dict() | {"of_a_later_version": 1})
    assert later.scenario.rules.smact_limit is None
    assert Figures.from_dict(result.summary()["figures"]) == result.figures
    with pytest.raises(InvalidValue, match="the result of a simulation must have scenario"):
        SimulationResult.from_dict({"trace": "x"})


@pytest.mark.parametrize("name", ["runs.json", "runs.json.gz"])
def test_runs_are_kept_in_a_file_and_other_files_left_alone(tmp_path, name):
    file = tmp_path / name
    write_results(file, [run("a"), run("b")])
    assert [result.name for result in read_results(file)] == ["a", "b"]
    write_results(file, [run("c")])
    assert [result.name for result in read_results(file)] == ["c"]
    other = b'{"mine": 1}' if name.endswith("json") else gzip.compress(b"[]")
    file.write_bytes(other)
    with pytest.raises(InvalidValue, match="is not a file of runs"):
        write_results(file, [run()])
    assert file.read_bytes() == other


def test_a_setting_is_found_by_its_name():
    found = Scenario(gpus="H200").but(free_floor=None, startup_s=9.0, policy="lug")
    assert (found.rules.free_floor, found.world.startup_s, found.policy, found.gpus) == (None, 9.0, "lug", "H200")
    with pytest.raises(UnknownName, match="did you mean 'smact_limit'"):
        Scenario(gpus="H200").but(smact_limits=0.5)


def test_a_run_says_itself_in_a_line():
    assert str(run()) == (
        "magm, none, mps: 3 of 5 jobs done in 5 min; on average waiting 40 s, running 2 min 50 s, "
        "completion 3 min 30 s; 1 out of memory; 131 kJ"
    )
