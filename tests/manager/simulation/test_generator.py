"""Traces that are drawn."""

from collections import Counter
from itertools import pairwise
from statistics import mean

import pytest

from ullage.errors import UllageError
from ullage.manager.simulation.generator import generate_trace
from ullage.manager.simulation.known import known_workloads
from ullage.manager.simulation.trace import JobTrace

DAY_S = 86400.0


def needed(trace: JobTrace, gpus: int) -> float:
    """The share of a cluster that the jobs need alone until the last has come."""
    return sum(job.work_s * job.gpus for job in trace.jobs) / (gpus * trace.jobs[-1].arrival)


def sizes(trace: JobTrace) -> dict[str, float]:
    counted = Counter(known_workloads()[job.kind.name].size for job in trace.jobs)
    return {size: count / len(trace.jobs) for size, count in counted.items()}


def facts(trace: JobTrace) -> list[tuple[object, ...]]:
    return [(job.arrival, job.kind.name, job.work_s, job.gpus, job.user) for job in trace.jobs]


def test_a_seed_gives_the_same_trace_and_another_seed_another() -> None:
    assert facts(generate_trace(200, 3)) == facts(generate_trace(200, 3))
    assert facts(generate_trace(200, 3)) != facts(generate_trace(200, 4))


def test_jobs_come_in_order_from_zero_and_are_numbered() -> None:
    trace = generate_trace(500, 1, burst=3, daily=0.5)
    assert trace.jobs[0].arrival == 0 and [job.id for job in trace.jobs] == list(range(1, 501))
    assert all(one.arrival <= other.arrival for one, other in pairwise(trace.jobs))


@pytest.mark.parametrize("options", [{}, {"burst": 4.0}, {"daily": 0.9}, {"tail": "pareto", "spread": 2.0}])
def test_the_load_is_what_was_asked_for(options: dict[str, object]) -> None:
    trace = generate_trace(4000, 7, gpus=16, load=0.6, **options)
    assert needed(trace, 16) == pytest.approx(0.6, rel=0.03)


def test_the_mixes_have_their_shares() -> None:
    assert sizes(generate_trace(20000, 1)) == pytest.approx({"light": 0.65, "medium": 0.27, "large": 0.08}, abs=0.015)
    assert sizes(generate_trace(20000, 1, mix="heavy")) == pytest.approx({"medium": 0.83, "large": 0.17}, abs=0.015)
    own = generate_trace(50, 1, mix={"resnet50 b32": 1})
    assert {job.kind.name for job in own.jobs} == {"resnet50 b32"}


def test_poisson_gaps_vary_by_their_mean_and_bursts_more() -> None:
    def variation(trace: JobTrace) -> float:
        gaps = [later.arrival - earlier.arrival for earlier, later in pairwise(trace.jobs)]
        return mean(gap * gap for gap in gaps) / mean(gaps) ** 2 - 1

    assert variation(generate_trace(20000, 2)) == pytest.approx(1.0, abs=0.1)
    assert variation(generate_trace(20000, 2, burst=8)) > 4


def test_a_burst_is_of_one_user_and_one_workload() -> None:
    trace = generate_trace(400, 5, burst=1000, load=0.01)
    assert len({(job.user, job.kind.name) for job in trace.jobs}) == 1


def test_more_jobs_come_in_the_afternoon_than_in_the_night() -> None:
    trace = generate_trace(5000, 3, gpus=8, daily=0.8)
    hours = Counter(int(job.arrival % DAY_S // 3600) for job in trace.jobs)
    assert trace.jobs[-1].arrival > 10 * DAY_S
    assert sum(hours[hour] for hour in range(12, 18)) > 4 * sum(hours[hour] for hour in range(6))


def test_a_few_users_submit_most_unless_set_otherwise() -> None:
    counted = Counter(job.user for job in generate_trace(20000, 1, users=10, zipf=1.0).jobs)
    assert counted["user01"] / counted["user10"] == pytest.approx(10, rel=0.3)
    alike = Counter(job.user for job in generate_trace(20000, 1, users=10, zipf=0.0).jobs)
    assert max(alike.values()) / min(alike.values()) < 1.2


def test_work_has_a_heavy_tail_unless_it_has_none() -> None:
    one = {"resnet50 b32": 1.0}
    usual = known_workloads()["resnet50 b32"].epoch_s
    assert {job.work_s for job in generate_trace(20, 1, mix=one, spread=0).jobs} == {usual}
    drawn = sorted(job.work_s for job in generate_trace(20000, 1, mix=one, spread=1.5).jobs)
    assert mean(drawn) == pytest.approx(usual, rel=0.1)
    assert drawn[len(drawn) // 2] < 0.5 * mean(drawn) and sum(drawn[-200:]) > 0.15 * sum(drawn)


def test_the_number_of_gpus_can_be_drawn_too() -> None:
    counted = Counter(job.gpus for job in generate_trace(10000, 1, gpu_counts={1: 3, 8: 1}).jobs)
    assert set(counted) == {1, 8} and counted[8] / 10000 == pytest.approx(0.25, abs=0.02)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"jobs": 0}, "jobs must be 1 or more, got 0"),
        ({"load": 0}, "load must be above 0"),
        ({"load": float("inf")}, "load must be above 0, got inf"),
        ({"burst": float("nan")}, "burst must be 1 or more, got nan"),
        ({"daily": 2}, "daily must be from 0 to 1"),
        ({"tail": "normal"}, "tail must be lognormal or pareto"),
        ({"tail": "pareto"}, "spread must be 0 or more, above 1 for pareto"),
        ({"mix": "light"}, "no mix of workloads named 'light'"),
        ({"mix": {"resnet5O b32": 1}}, "did you mean 'resnet50 b32'"),
    ],
)
def test_impossible_draws_are_refused(options: dict[str, object], words: str) -> None:
    with pytest.raises(UllageError, match=words):
        generate_trace(**{"jobs": 10, **options})
