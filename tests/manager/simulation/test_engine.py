"""What happens under the virtual clock: memory, speeds, crashes and recovery, readings, power, nodes, MIG."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.manager.simulation.made_runs import utilization

from ullage.errors import InvalidValue, UnknownName
from ullage.manager.placement import RecoveryRules, Rules
from ullage.manager.simulation.engine import simulate
from ullage.manager.simulation.result import (
    DONE,
    FAILED,
    FINISHED,
    GPU_LOST,
    OUT_OF_MEMORY,
    TIME_LIMIT,
    SimulationResult,
)
from ullage.manager.simulation.scenario import Scenario, World
from ullage.manager.simulation.trace import WORKING, JobKind, JobTrace, Phase, TraceJob
from ullage.performance.result import Utilization, resting_w, waiting_w
from ullage.units import GIB

QUIET = World(startup_s=0.0, interference_error=0.0, fragmentation=0, monitor_delay_s=0.0, retry_s=0.0)


def busy(smact: float, gpu: str = "A100-40GB", step_s: float = 0.2) -> Utilization:
    shares = {"smact": smact, "smocc": smact / 2, "drama": smact / 4, "tensor": 0.0}
    return utilization(gpu, step_s, step_s * smact, 100 + 250 * smact, host_s=step_s, kernels=300, **shares)


def kind(name: str, gib: float, smact: float = 0.5, **more: Any) -> JobKind:
    return JobKind(name, int(gib * GIB), {"A100-40GB": busy(smact)}, **more)


def play(jobs: list[TraceJob], gpus: str = "A100-40GB", **settings: Any) -> SimulationResult:
    world = settings.pop("world", QUIET)
    base = Scenario(gpus=gpus, estimator="oracle", world=world, rules=Rules(fair=False))
    return simulate(JobTrace("made here", jobs), base.but(**settings))


def spans(result: SimulationResult) -> list[tuple[float, float]]:
    return [(job.attempts[-1].begin, job.attempts[-1].end) for job in result.jobs]


def test_a_job_alone_takes_its_work_and_its_start() -> None:
    jobs = [TraceJob(1, 5.0, kind("a", 4), work_s=100.0)]
    assert spans(play(jobs)) == [(5.0, 105.0)]
    assert spans(play(jobs, startup_s=12.0)) == [(5.0, 117.0)]


def in_phases(name: str, smact: float, starting_s: float = 10.0, saving_s: float = 5.0) -> JobKind:
    phases = (Phase("starting", starting_s), WORKING, Phase("saving", saving_s, holds_memory=True))
    return kind(name, 4, smact, phases=phases)


def test_a_kind_may_take_longer_to_start_than_others() -> None:
    quick, slow = kind("quick", 1), kind("slow", 1, phases=(Phase("starting", 11.0), WORKING))
    jobs = [TraceJob(1, 0.0, quick, work_s=60.0), TraceJob(2, 0.0, slow, work_s=60.0)]
    ends = [[end for _, end in spans(play(jobs, gpus="2xA100-40GB", startup_s=usual))] for usual in (5.0, 0.0)]
    assert ends == [[65.0, 71.0], [60.0, 60.0]]


def test_phases_without_the_gpu_slow_no_job() -> None:
    """One job works while the other one starts, and is done when that begins to work."""
    jobs = [
        TraceJob(1, 0.0, in_phases("a", 0.9, 0.0), work_s=30.0),
        TraceJob(2, 0.0, in_phases("b", 0.9, 30.0), work_s=40.0),
    ]
    found = play(jobs, policy="magm", smact_limit=None, startup_s=1.0)
    assert spans(found) == [(0.0, 35.0), (0.0, 75.0)]
    busy_s = 30.0 + 40.0
    assert found.smact == pytest.approx(0.9 * busy_s / 75.0)


def test_a_job_keeps_its_memory_while_it_saves() -> None:
    found = play([TraceJob(1, 0.0, in_phases("a", 0.5), work_s=20.0)], startup_s=1.0)
    held = dict(zip(found.gpus[0].times, found.gpus[0].memory, strict=True))
    assert held == {0.0: 0, 10.0: 4 * GIB, 30.0: 4 * GIB, 35.0: 0}
    assert [smact for _, smact in zip(found.gpus[0].times, found.gpus[0].smact, strict=True)] == [0.0, 0.5, 0.0, 0.0]


def test_a_phase_may_have_an_activity_of_its_own() -> None:
    """Evaluating like the kind, after warming up at a tenth of its activity."""
    warming = Phase("warming up", 10.0, uses_gpu=True, alone={"A100-40GB": busy(0.05)})
    evaluating = Phase("evaluating", 20.0, uses_gpu=True, holds_memory=True)
    job = TraceJob(1, 0.0, kind("a", 4, 0.5, phases=(warming, WORKING, evaluating)), work_s=30.0)
    found = play([job], startup_s=1.0)
    assert spans(found) == [(0.0, 60.0)]
    assert dict(zip(found.gpus[0].times, found.gpus[0].smact, strict=True)) == {0.0: 0.05, 10.0: 0.5, 60.0: 0.0}


def test_phases_must_have_the_work_once() -> None:
    with pytest.raises(InvalidValue, match="one phase of a must be its work"):
        kind("a", 4, phases=(Phase("starting", 5.0),))
    with pytest.raises(InvalidValue, match="the seconds of saving must be 0 or more, got -1"):
        Phase("saving", -1.0)


def test_sharing_slows_jobs_down_until_they_are_alone_again() -> None:
    jobs = [TraceJob(1, 0.0, kind("a", 4, 0.9), work_s=100.0), TraceJob(2, 0.0, kind("b", 4, 0.9), work_s=200.0)]
    settings = {"policy": "magm", "smact_limit": None}
    (_, first), (_, second) = spans(play(jobs, **settings))
    assert 120 < first < 210
    alone_after = 200.0 - first * (100.0 / first)  # both are alike, so the second had done as much as the first
    assert second == pytest.approx(first + alone_after, rel=0.02)
    assert spans(play(jobs, **settings, interference=False)) == [(0.0, 100.0), (0.0, 200.0)]


def test_the_last_job_runs_out_of_memory_and_recovers() -> None:
    jobs = [TraceJob(1, 0.0, kind("a", 25), 100.0), TraceJob(2, 1.0, kind("b", 25), 100.0)]
    found = play(jobs, policy="magm", estimator="none", unknown="floor", free_floor=2 * GIB, startup_s=5.0)
    assert [attempt.cause for attempt in found.jobs[0].attempts] == [FINISHED]
    assert [attempt.cause for attempt in found.jobs[1].attempts][0] == OUT_OF_MEMORY
    assert [job.state for job in found.jobs] == [DONE, DONE]
    at_once = play(
        jobs, policy="magm", estimator="none", unknown="floor", free_floor=2 * GIB, startup_s=5.0, exclusive_after=1
    )
    assert [attempt.cause for attempt in at_once.jobs[1].attempts] == [OUT_OF_MEMORY, FINISHED]
    assert at_once.jobs[1].attempts[1].begin >= at_once.jobs[0].attempts[0].end, "it has a GPU to itself now"


def test_a_job_too_large_for_every_gpu_is_given_up() -> None:
    jobs = [TraceJob(1, 0.0, kind("huge", 50), 10.0), TraceJob(2, 1.0, kind("small", 2), 10.0)]
    found = play(jobs, policy="magm", estimator="none", startup_s=1.0)
    assert [job.state for job in found.jobs] == [FAILED, DONE]
    assert found.figures.ooms >= 1


def test_fragmentation_costs_neighbours_room_but_not_job_alone() -> None:
    alone = [TraceJob(1, 0.0, kind("a", 39), 10.0)]
    assert play(alone, fragmentation=2 * GIB).figures.ooms == 0
    pair = [TraceJob(1, 0.0, kind("a", 20), 50.0), TraceJob(2, 1.0, kind("b", 18.5), 50.0)]
    tight = {"policy": "magm", "margin": 0, "smact_limit": None}
    assert play(pair, **tight).figures.ooms == 0
    assert play(pair, **tight, fragmentation=2 * GIB).figures.ooms == 1


def test_a_placement_sees_the_past() -> None:
    """Without promises the memory of a job that has just come is not seen, so the next one lands beside it."""
    jobs = [TraceJob(1, 0.0, kind("a", 30), 100.0), TraceJob(2, 10.0, kind("b", 30), 100.0)]
    blind = {"policy": "magm", "estimator": "none", "unknown": "floor", "free_floor": 15 * GIB, "smact_limit": None}
    assert play(jobs, **blind, monitor_delay_s=0.0).figures.ooms == 0
    assert play(jobs, **blind, monitor_delay_s=30.0).figures.ooms >= 1


def test_the_activity_of_the_window_keeps_jobs_away_for_a_while() -> None:
    jobs = [TraceJob(1, 0.0, kind("a", 4, 0.9), 1000.0), TraceJob(2, 500.0, kind("b", 4, 0.9), 10.0)]
    first, second = spans(play(jobs, policy="magm"))
    assert second[0] == first[1], "the GPU is too busy until the first has ended; then it is quiet at once"
    assert spans(play(jobs, policy="magm", smact_limit=None))[1][0] == 500.0


def test_two_gpus_go_at_the_pace_of_the_slower() -> None:
    wide = TraceJob(1, 0.0, kind("wide", 4, 0.9), 100.0, gpus=2)
    other = TraceJob(2, 0.0, kind("other", 4, 0.9), 100.0)
    found = play([wide, other], "2xA100-40GB", policy="first-fit", smact_limit=None)
    alone = play([wide], "2xA100-40GB")
    assert alone.jobs[0].attempts[0].gpus == (0, 1) and spans(alone) == [(0.0, 100.0)]
    assert spans(found)[0][1] > 120.0


def test_power_and_energy_follow_the_work() -> None:
    job = TraceJob(1, 0.0, kind("a", 4, 0.5), 100.0)
    found = play([job])
    assert found.energy_j == pytest.approx(100.0 * (100 + 250 * 0.5))
    both = play([job, TraceJob(2, 0.0, kind("b", 4, 0.1), 100.0)], policy="magm", interference=False)
    saved = 2 * 100.0 * waiting_w("A100-40GB")  # each alone draws that; together they do once
    assert both.energy_j < found.energy_j + play([TraceJob(1, 0.0, kind("b", 4, 0.1), 100.0)]).energy_j
    assert both.energy_j > found.energy_j - saved


def test_a_failing_node_takes_its_jobs_along_and_they_return() -> None:
    jobs = [TraceJob(number, 0.0, kind("a", 30), 2000.0) for number in range(1, 5)]
    found = play(jobs, "4xA100-40GB", node_gpus=2, node_mtbf_s=3000.0, node_repair_s=100.0, others=1000, seed=1)
    assert found.figures.lost > 0 and found.figures.done == 4
    for job in found.jobs:
        assert [attempt.cause for attempt in job.attempts[:-1]] == [GPU_LOST] * (len(job.attempts) - 1)
        assert job.attempts[-1].end - job.attempts[-1].begin >= 2000.0
    again = play(jobs, "4xA100-40GB", node_gpus=2, node_mtbf_s=3000.0, node_repair_s=100.0, others=1000, seed=1)
    assert again.jobs == found.jobs


def test_a_gpu_draws_its_idle_power_and_more_with_a_context() -> None:
    works = Utilization(**{**vars(busy(0.5, "H200")), "power_w": 400.0})
    trace = JobTrace("made here", [TraceJob(1, 0.0, JobKind("a", 4 * GIB, {"H200": works}), 100.0)])
    scenario = Scenario(gpus="2xH200", estimator="oracle", world=QUIET).but(startup_s=10.0)
    found = simulate(trace, scenario)
    assert found.energy_j == pytest.approx(110.0 * 78 + 10.0 * 78 + 100.0 * 400)  # it starts for 10 s; one has no job
    assert found.gpus[0].power_w[0] == 78 and resting_w("H200") == 78 and waiting_w("H200") == 121
    assert resting_w("A100-40GB") == pytest.approx(100 * 78 / 121)


def test_a_job_on_a_mig_instance_slows_by_its_share_of_sms() -> None:
    always = Utilization(**{**vars(busy(1.0)), "drama": 0.1})  # its SMs are all that limits it
    jobs = [TraceJob(1, 0.0, JobKind("a", 3 * GIB, {"A100-40GB": always}), 100.0)]
    found = play(jobs, sharing="mig:1g.5gb")
    part = 14 / 108  # of the SMs
    took = 100.0 / part
    assert spans(found) == [(0.0, pytest.approx(took))]
    assert found.gpus[0].smact[0] == 1.0 and found.smact == pytest.approx(1 / 7), "all SMs of one of seven instances"
    rest, base = resting_w("A100-40GB"), waiting_w("A100-40GB")
    beyond = 100.0 * (350.0 - base)  # the work takes what it takes on the whole GPU, but more slowly
    assert found.energy_j == pytest.approx(beyond + took * (base / 7 + rest * 6 / 7))


def test_a_small_job_is_as_fast_on_a_mig_instance() -> None:
    waits = Utilization(**{**vars(busy(0.05)), "drama": 0.0})  # a wait for its host, nearly all of it
    jobs = [TraceJob(1, 0.0, JobKind("a", 3 * GIB, {"A100-40GB": waits}), 100.0)]
    assert spans(play(jobs, sharing="mig:3g.20gb"))[0][1] == pytest.approx(100.0, rel=0.01)
    assert spans(play(jobs, sharing="mig:1g.5gb", interference=False)) == [(0.0, 100.0)]


def test_a_job_on_several_instances_runs_at_the_pace_of_one() -> None:
    wide = TraceJob(1, 0.0, kind("wide", 3, 0.9), 100.0, gpus=3)
    other = TraceJob(2, 0.0, kind("other", 3, 0.9), 100.0)
    both = play([wide, other], sharing="mig:1g.5gb", policy="first-fit")
    assert [job.attempts[0].gpus for job in both.jobs] == [(0, 1, 2), (3,)]
    assert spans(both)[0] == spans(both)[1] == spans(play([other], sharing="mig:1g.5gb"))[0]


def test_a_job_too_large_for_every_instance_is_given_up() -> None:
    found = play(
        [TraceJob(1, 0.0, kind("large", 6), 100.0), TraceJob(2, 0.0, kind("small", 4), 100.0)], sharing="mig:1g.5gb"
    )
    assert [job.state for job in found.jobs] == [FAILED, DONE] and found.figures.ooms >= 1
    assert play([TraceJob(1, 0.0, kind("large", 6), 100.0)], sharing="mig:2g.10gb").figures.ooms == 0


def test_mig_instances_take_one_job_each_and_are_slower() -> None:
    jobs = [TraceJob(number, 0.0, kind("a", 3, 0.9), 100.0) for number in range(1, 10)]
    found = play(jobs, sharing="mig:1g.5gb")
    begins = sorted(begin for begin, _ in spans(found))
    assert begins[:7] == [0.0] * 7 and begins[7] > 100.0
    assert len(found.gpus) == 7


def test_sharing_switched_off_is_one_job_a_gpu() -> None:
    jobs = [TraceJob(number, 0.0, kind("a", 3, 0.1), 100.0) for number in (1, 2)]
    assert spans(play(jobs, sharing="off")) == [(0.0, 100.0), (100.0, 200.0)]


def test_another_gpu_makes_jobs_as_much_faster_as_their_steps() -> None:
    both = {"A100-40GB": busy(0.5), "H200": busy(0.5, "H200", step_s=0.1)}
    trace = JobTrace("made here", [TraceJob(1, 0.0, JobKind("a", 4 * GIB, both), 100.0)], gpu="A100-40GB")
    scenario = Scenario(gpus="H200", estimator="oracle", world=QUIET)
    assert spans(simulate(trace, scenario)) == [(0.0, 50.0)]


def test_a_time_limit_ends_a_job() -> None:
    jobs = [TraceJob(1, 0.0, kind("a", 4), 100.0, time_limit=40.0)]
    found = play(jobs)
    assert found.jobs[0].state == FAILED and found.jobs[0].attempts[0].cause == TIME_LIMIT
    assert spans(found) == [(0.0, 40.0)]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"sharing": "mpps"}, "mps, time-slicing, mig, off"),
        ({"sharing": "timeslice"}, "mps, time-slicing, mig, off"),
        ({"policy": "magn"}, "magm"),
        ({"estimator": "horos"}, "horos"),
        ({"gpus": "4xA1000"}, "A100"),
    ],
)
def test_unknown_names_are_refused(settings: dict[str, str], words: str) -> None:
    with pytest.raises((InvalidValue, UnknownName), match=words):
        play([TraceJob(1, 0.0, kind("a", 4), 1.0)], **settings)


@given(
    seed=st.integers(0, 10**6),
    policy=st.sampled_from(["ullage", "magm", "lug", "round-robin", "exclusive", "best-fit"]),
)
@settings(max_examples=15, deadline=None)
def test_nothing_is_ever_lost_and_no_gpu_is_overfull(seed: int, policy: str) -> None:
    draw = random.Random(seed)
    kinds = [kind(f"k{number}", draw.uniform(0.5, 38.0), draw.random()) for number in range(6)]
    jobs = [
        TraceJob(
            number,
            draw.uniform(0, 2000),
            draw.choice(kinds),
            draw.uniform(0, 900),
            draw.choice((1, 1, 1, 2, 3)),
            f"user{draw.randrange(3)}",
        )
        for number in range(40)
    ]
    found = play(
        jobs,
        "3xA100-40GB",
        policy=policy,
        seed=seed,
        estimator=draw.choice(["oracle", "none"]),
        unknown="floor",
        startup_s=draw.choice((0.0, 20.0)),
        interference_error=0.4,
        monitor_delay_s=draw.choice((0.0, 5.0)),
        sharing=draw.choice(["mps", "time-slicing"]),
        fair=draw.random() < 0.5,
        node_mtbf_s=draw.choice((None, 5000.0)),
        others=1000,
    )
    assert {job.id for job in found.jobs} == {job.id for job in jobs}
    by_id = {job.id: job for job in jobs}
    for job in found.jobs:
        assert job.state in (DONE, FAILED), "with 3 GPUs of 40 GB every job can be placed"
        assert all(one.end <= other.begin for one, other in itertools.pairwise(job.attempts))
        assert all(attempt.begin >= job.arrival for attempt in job.attempts)
        if job.state == DONE:
            assert job.attempts[-1].end - job.attempts[-1].begin >= by_id[job.id].work_s - 1e-6
    for gpu in found.gpus:
        assert all(0 <= used <= gpu.total for used in gpu.memory)
        assert gpu.memory[-1] == 0 and gpu.jobs[-1] == 0
    if policy == "exclusive":
        assert all(count <= 1 for gpu in found.gpus for count in gpu.jobs)
    assert RecoveryRules().attempts >= max(sum(a.cause == OUT_OF_MEMORY for a in job.attempts) for job in found.jobs)


def test_the_same_seed_gives_the_same_result() -> None:
    kinds = [kind(f"k{number}", 8.0, 0.2 * number) for number in range(5)]
    draw = random.Random(3)
    jobs = [TraceJob(number, 10.0 * number, draw.choice(kinds), 300.0) for number in range(60)]
    first, again, other = (play(jobs, "2xA100-40GB", interference_error=0.4, seed=seed) for seed in (1, 1, 2))
    assert first.jobs == again.jobs and first.energy_j == again.energy_j
    assert first.jobs != other.jobs
