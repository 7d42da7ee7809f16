"""What a manager ran becomes a trace that can be simulated again, and the row of what really happened."""

import dataclasses

import pytest
from tests.manager.simulation.made_runs import utilization

import ullage
import ullage.manager
import ullage.manager.simulation
from ullage.errors import InvalidValue
from ullage.manager.simulation.engine import simulate
from ullage.manager.simulation.history import as_it_is, as_it_was, scenario_of_history, trace_of_history
from ullage.manager.simulation.scenario import Scenario, World
from ullage.manager.simulation.trace import JobKind, JobTrace, TraceJob

GIB = 1 << 30

QUIET = World(startup_s=0.0, interference_error=0.0, monitor_delay_s=0.0)


def work(step_s, gpu_s, smact):
    """What a job does alone on an H200."""
    calls = {"flops": 1e12, "bytes": 1e9, "kernels": 400, "waits": 1}
    return utilization("H200", step_s, gpu_s, smact=smact, smocc=0.3, drama=0.3, **calls)


BUSY, LIGHT = work(0.1, 0.1, 0.8), work(0.05, 0.01, 0.1)


def attempt(begin, end, slots=("GPU-0",), cause="finished", **more):
    values = {"placed": begin, "started": begin, "ended": end, "elapsed": end - begin, "slots": list(slots)}
    rest = {"promise": 8 * GIB, "exclusive": False, "used": 6 * GIB, "energy": 1000.0, "cause": cause}
    return values | rest | more


def job(number, *attempts, submitted=100.0, **more):
    values = {"id": number, "user": "ann", "name": f"job{number}", "state": "done", "submitted": submitted}
    rest = {"queued": None, "gpus": 1, "priority": 0, "time_limit": None, "promise": 8 * GIB, "work": "busy"}
    return values | rest | {"attempts": list(attempts)} | more


def told(*jobs, gpus=1, sharing="mps"):
    cards = [
        {"id": f"GPU-{n}", "index": n, "name": "NVIDIA H200", "total": 140 * GIB, "mig": False} for n in range(gpus)
    ]
    manager = {
        "policy": "ullage",
        "sharing": sharing,
        "estimator": "ullage",
        "min_speed": 0.8,
        "rules": {"margin": GIB},
    }
    works = {"busy": {"NVIDIA H200": BUSY.to_dict()}, "light": {"NVIDIA H200": LIGHT.to_dict()}}
    span = {"since": 0.0, "until": 1e6, "reading_s": 1.0, "min_speed": 0.8, "all": True}
    return span | manager | {"gpus": cards, "jobs": list(jobs), "works": works}


def only(found):
    [job] = trace_of_history(found).jobs
    return job


def test_a_job_alone_did_what_it_ran():
    found = only(told(job(1, attempt(130.0, 190.0), submitted=120.0)))
    assert (found.arrival, found.work_s, found.gpus, found.user) == (0.0, 60.0, 1, "ann")
    assert (found.kind.memory, found.kind.estimates) == (6 * GIB, {"promised": 8 * GIB})
    assert found.kind.alone["H200"] == BUSY


def test_failures_did_no_work_and_the_first_promise_counts():
    found = only(
        told(
            job(
                1,
                attempt(110.0, 120.0, cause="out of GPU memory", promise=4 * GIB, used=5 * GIB),
                attempt(120.0, 150.0, cause="GPU lost"),
                attempt(150.0, 200.0, used=9 * GIB),
            )
        )
    )
    assert found.work_s == 50.0
    assert (found.kind.memory, found.kind.estimates["promised"]) == (9 * GIB, 4 * GIB)


def test_a_job_alone_on_its_gpu_was_promised_its_estimate():
    found = only(told(job(1, attempt(110.0, 120.0, promise=140 * GIB, exclusive=True), promise=7 * GIB)))
    assert found.kind.estimates["promised"] == 7 * GIB


def test_the_work_of_a_cancelled_job_lasts_until_its_end():
    found = trace_of_history(
        told(
            job(1, attempt(110.0, 140.0, cause="cancelled"), state="cancelled"),
            job(2, attempt(150.0, 160.0, cause="failed by itself"), state="failed"),
            job(3, attempt(170.0, 180.0, cause="time slot ended"), attempt(190.0, 195.0)),
        )
    )
    assert [each.work_s for each in found.jobs] == [30.0, 10.0, 15.0]


def test_jobs_without_a_record_are_left_out_and_counted():
    found = trace_of_history(
        told(
            job(1, attempt(110.0, 140.0)),
            job(2, attempt(110.0, 120.0, ended=None, elapsed=None, cause=None), state="running"),
            job(3, state="cancelled"),
            job(4, attempt(110.0, 120.0, slots=()), gpus=0),
            job(5, attempt(110.0, 120.0, slots=["GPU-gone"])),
        )
        | {"all": False}
    )
    assert [each.id for each in found.jobs] == [1]
    assert "1 job is left out: not over" in found.notes and "1 job is left out: without a GPU" in found.notes
    assert any("before they did anything" in note for note in found.notes)
    assert any("no longer there" in note for note in found.notes) and any(
        "only your own" in note for note in found.notes
    )


def test_a_job_comes_when_it_might_have_started():
    first, second = job(1, attempt(100.0, 101.0)), job(2, attempt(300.0, 310.0), queued=250.0)
    assert [each.arrival for each in trace_of_history(told(first, second)).jobs] == [0.0, 150.0]


def test_a_neighbour_slows_down_as_it_is_predicted():
    alone = only(told(job(1, attempt(100.0, 200.0)), sharing="time-slicing")).work_s
    beside = trace_of_history(
        told(job(1, attempt(100.0, 200.0)), job(2, attempt(100.0, 150.0)), sharing="time-slicing")
    ).jobs[0]
    assert alone == 100.0
    assert 60 < beside.work_s < 85, "for half of its time it had about half of the GPU"


@pytest.mark.timeout(60)
def test_thousands_of_jobs_at_once_share_a_gpu_as_a_few_do():
    def worked(count):
        jobs = (job(n, attempt(100.0, 200.0 + n / count, used=n << 20), work=None) for n in range(1, count + 1))
        found = as_it_was(told(*jobs, sharing="time-slicing"))
        assert found.busy_s == 101.0 and max(found.gpus[0].jobs) == count
        return sum(each.work_s for each in found.jobs)

    assert worked(4000) == pytest.approx(worked(4), rel=0.05)


def test_start_up_is_no_work_and_slows_no_job():
    found = told(job(1, attempt(100.0, 200.0)), job(2, attempt(110.0, 120.0)), sharing="time-slicing")
    first, second = trace_of_history(found, startup_s=10.0).jobs
    assert (first.work_s, second.work_s) == (90.0, 0.0)
    assert as_it_was(found, startup_s=10.0).smact == pytest.approx(0.9 * BUSY.smact)


def test_a_job_on_two_gpus_is_as_slow_as_on_the_slower_one():
    both = job(1, attempt(100.0, 200.0, slots=["GPU-0", "GPU-1"]), gpus=2)
    other = job(2, attempt(100.0, 200.0, slots=["GPU-1"]))
    found = {each.id: each for each in trace_of_history(told(both, other, gpus=2, sharing="time-slicing")).jobs}
    assert found[1].work_s == pytest.approx(found[2].work_s) and found[1].work_s < 70


def test_a_job_without_known_facts_is_reported():
    unknown = attempt(100.0, 110.0, used=None, energy=None)
    found = trace_of_history(
        told(job(1, unknown, work=None), job(2, unknown | {"exclusive": True}, work=None, promise=None))
    )
    assert [each.kind.memory for each in found.jobs] == [8 * GIB, 140 * GIB]
    for ending in ("busy all the time", "use their promise", "and is predicted"):
        assert any(note.endswith(ending) for note in found.notes)


def test_as_it_was_has_the_measured_times_and_energy():
    found = as_it_was(told(job(1, attempt(110.0, 150.0)), job(2, attempt(130.0, 200.0), state="failed"), gpus=2))
    assert found.name == "as it was"
    assert (found.figures.total_s, found.figures.done, found.figures.failed) == (100.0, 1, 1)
    assert found.figures.waiting_s == 10.0
    assert found.busy_s == 90.0
    assert found.energy_j == pytest.approx(2000.0 + 110.0 * 78.0), "measured for the jobs, predicted for idle GPUs"
    assert found.memory == pytest.approx((40 + 70) * 6 / 140 / 200)
    assert [series.jobs for series in found.gpus] == [(0, 1, 2, 1, 0, 0), (0, 0)]


def test_as_it_is_has_running_and_waiting_jobs_and_adds_up():
    running = attempt(150.0, 0.0, ended=None, elapsed=None, energy=None, cause=None)
    jobs = [
        job(1, attempt(110.0, 150.0)),
        job(2, running, state="running", submitted=140.0),
        job(3, state="queued", submitted=145.0),
        job(4, state="cancelled"),
        job(5, running, gpus=0, state="running"),
        job(6, attempt(190.0, 195.0, ("GPU-1",), "out of GPU memory"), state="failed", submitted=190.0),
    ]
    found, begin, notes = as_it_is(told(*jobs, gpus=2), now=200.0)
    assert begin == 100.0 and len(notes) == 3
    states = [(1, "done"), (2, "waiting"), (6, "failed"), (3, "waiting")]
    assert [(each.id, each.state) for each in found.jobs] == states
    assert found.jobs[1].attempts[0][:2] == (50.0, 100.0) and found.jobs[1].attempts[0].cause == "running"
    whole = found.figures_between(0.0, 100.0)
    assert (whole.total_s, whole.waiting_s, whole.running_s, whole.completion_s) == (100.0, 10.0, 40.0, 50.0)
    assert whole.busy_s == pytest.approx(95.0) and whole.ooms == 1 and whole.energy_j == pytest.approx(found.energy_j)
    assert (whole.smact, whole.memory) == pytest.approx((found.smact, found.memory))
    part = found.figures_between(20.0, 60.0)
    assert (part.jobs, part.done, part.total_s, part.busy_s) == (3, 1, 40.0, 40.0)
    assert part.energy_j == pytest.approx(1000.0 * 30 / 40 + 10 * BUSY.power_w + 40 * 78.0), "the other GPU is idle"
    before = found.figures_between(0.0, 10.0)
    assert (before.jobs, before.done, before.waiting_s, before.busy_s) == (1, 0, None, 0.0)
    assert before.energy_j == pytest.approx(2 * 10 * 78.0)


def retold(result):
    """A simulation's result as a manager would tell it."""
    jobs = [
        job(
            each.id,
            *(
                attempt(one.begin, one.end, [f"GPU-{number}" for number in one.gpus], one.cause, promise=one.promise)
                for one in each.attempts
            ),
            submitted=each.arrival,
            gpus=each.gpus,
            work=each.kind,
        )
        for each in result.jobs
    ]
    return told(*jobs, gpus=2, sharing="time-slicing")


def test_a_simulation_gives_its_trace_again():
    kinds = [
        JobKind(name, 6 * GIB, {"H200": alone}, {"ullage": 8 * GIB})
        for name, alone in (("busy", BUSY), ("light", LIGHT))
    ]
    jobs = [TraceJob(n, 5.0 * n, kinds[n % 2], work_s=40.0 + 7 * n, gpus=1 + (n % 3 == 0)) for n in range(12)]
    scenario = Scenario(gpus="2xH200", sharing="time-slicing", min_speed=0.3, world=QUIET)
    found = simulate(JobTrace("made", jobs), scenario)
    assert max(each.running_s / each.work_s for each in found.jobs) > 1.3, "some were slowed down"
    again = trace_of_history(retold(found))
    assert [each.work_s for each in again.jobs] == pytest.approx([each.work_s for each in jobs], rel=1e-6)
    assert scenario_of_history(retold(found)).gpus == "2xH200"
    repeated = simulate(again, dataclasses.replace(scenario, estimator="promised"))
    assert repeated.figures.total_s == pytest.approx(found.figures.total_s, rel=1e-6)


def test_without_predictions_placement_knows_only_its_monitor():
    kind = JobKind("busy", 6 * GIB, {"H200": BUSY}, {"ullage": 8 * GIB})
    jobs = JobTrace("made", [TraceJob(number, 0.0, kind, work_s=60.0) for number in (1, 2)])
    scenario = Scenario(gpus="H200", sharing="time-slicing", world=QUIET, min_speed=0.8).but(smact_limit=None)
    begins = {
        foresight: [job.attempts[0].begin for job in simulate(jobs, scenario.but(foresight=foresight)).jobs]
        for foresight in (True, False)
    }
    assert begins[True] == [0.0, 60.0], "each would have half of its speed"
    assert begins[False] == [0.0, 0.0], "nobody knows, and there is room"


def test_no_code_runs_because_a_history_names_it(tmp_path):
    file = tmp_path / "theirs.py"
    code = f"open({str(tmp_path / 'ran')!r}, 'w')\ndef choose(job, gpus, now):\n    return gpus\n"
    file.write_text(code)
    found = told(job(1, attempt(100, 200))) | {"policy": f"{file}:choose"}
    with pytest.raises(InvalidValue, match="policy is theirs.py:choose, from a custom file; name your copy: --policy"):
        ullage.manager.simulation.replay(found)
    assert as_it_was(found).scenario.policy == f"{file}:choose"
    assert ullage.manager.simulation.replay(found, policy="magm")[1].figures.done == 1
    assert not (tmp_path / "ran").exists()
    assert ullage.manager.simulation.replay(found, policy=f"{file}:choose")[1].figures.done == 1
    assert (tmp_path / "ran").exists(), "whoever names it wants it"
