"""Policies of one's own: what the function sees, what it may answer, and that it cannot do harm."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from ullage.errors import InvalidValue, PolicyFailed
from ullage.manager.placement import Activity, Job, Ledger, PassOutcome, Rules, Running, Slot, Speeds, decide
from ullage.manager.placement.custom_policies import GpuView, custom_policy, forgiving
from ullage.manager.placement.policies import Policy

GIB = 1 << 30
Gpus = Sequence[GpuView]


def slots(*used: int) -> list[Slot]:
    return [
        Slot(f"GPU-{index}", index, "A100-40GB", 40 * GIB, each * GIB, Activity(0.0, 0.0, age=1.0), foreign=each * GIB)
        for index, each in enumerate(used)
    ]


def job(number: int, promise: int | None = 4, **more: Any) -> Job:
    return Job(number, "ada", float(number), promise=None if promise is None else promise * GIB, **more)


def passed(
    policy: Policy, jobs: list[Job], cluster: list[Slot], running: Sequence[Running] = (), **rules: Any
) -> PassOutcome:
    return decide(policy, jobs, running, cluster, Ledger(), Rules(fresh_busy=0.0, **rules), now=100.0)


def where(function: Callable[..., Any], jobs: list[Job], cluster: list[Slot], **rules: Any) -> dict[int, list[int]]:
    """The indices of the GPUs that each job got."""
    outcome = passed(custom_policy("mine.py:choose", function), jobs, cluster, **rules)
    return {each.job: [int(slot[-1]) for slot in each.slots] for each in outcome.placed}


def test_a_job_goes_where_the_function_says() -> None:
    def fullest(job: Job, gpus: Gpus, now: float) -> GpuView:
        return min(gpus, key=lambda gpu: gpu.free)

    assert where(fullest, [job(1), job(2)], slots(0, 8, 3)) == {1: [1], 2: [1]}


def test_only_fitting_gpus_are_offered_so_none_is_overbooked() -> None:
    offered = []

    def watch(job: Job, gpus: Gpus, now: float) -> GpuView:
        offered.append([gpu.index for gpu in gpus])
        return gpus[0]

    cluster = [*slots(0, 30, 35, 39), Slot("GPU-4", 4, "A100-40GB", 40 * GIB, 0, drained=True)]
    assert where(watch, [job(1, 6), job(2, 6, exclusive=True), job(3, 30), job(4, 41)], cluster) == {1: [0], 3: [0]}
    assert offered == [[0, 1], [0]], "2 asks for a GPU to itself, and 4 for more than there is: there is nothing to ask"


def test_the_answer_may_depend_on_the_job() -> None:
    def apart(job: Job, gpus: Gpus, now: float) -> GpuView | None:
        return next((gpu for gpu in gpus if all(there.user != job.user for there in gpu.jobs)), None)

    jobs = [job(1), job(2), Job(3, "bob", 3.0, promise=GIB)]
    assert where(apart, jobs, slots(0), fair=False) == {1: [0], 3: [0]}
    assert where(apart, jobs, slots(0, 0), fair=False) == {1: [0], 2: [1], 3: [0]}


def test_none_and_too_few_let_a_job_wait_with_a_reason() -> None:
    def idle_ones(job: Job, gpus: Gpus, now: float) -> list[GpuView] | None:
        return None if job.id == 3 else [gpu for gpu in gpus if gpu.idle]

    outcome = passed(
        custom_policy("mine.py:choose", idle_ones), [job(1, gpus=2), job(2, gpus=2), job(3)], slots(0, 0, 9)
    )
    assert [each.job for each in outcome.placed] == [1]
    assert {each.reason for each in outcome.waiting} == {
        "needs 4.00 GiB on each of 2 GPUs; there is room, but the site's policy lets it wait",
        "needs 4.00 GiB on a GPU; there is room, but the site's policy lets it wait",
    }


def test_arguments_of_the_function() -> None:
    seen: dict[str, Any] = {}

    def look(job: Job, gpus: Gpus, now: float) -> None:
        seen.update(job=job, gpus=gpus, now=now)

    there = Job(7, "bob", 1.0, promise=10 * GIB, work="train", busy=0.4)
    running = [Running(there, ("GPU-0",), since=0.0)]
    asked = Job(8, "ada", 2.0, promise=4 * GIB, true=5 * GIB, work="infer", min_speed=0.5, queued=40.0, time_limit=60.0)
    cluster = slots(0, 0)
    policy = custom_policy("mine.py:choose", look)
    passed(policy, [asked], cluster, running, predict=lambda works, slot: Speeds([1 / len(works)] * len(works)))
    assert seen["now"] == 100.0
    wanted = {"promise": 4 * GIB, "work": "infer", "min_speed": 0.5, "time_limit": 60.0, "queued": 40.0}
    assert {name: getattr(seen["job"], name) for name in wanted} == wanted
    assert (seen["job"].id, seen["job"].user, seen["job"].exclusive, seen["job"].true) == (8, "ada", False, None)
    empty, shared = seen["gpus"]
    assert (empty.index, empty.idle, empty.count, empty.jobs) == (1, True, 0, ())
    assert (shared.index, shared.name, shared.total) == (0, "A100-40GB", 40 * GIB)
    assert (shared.free, shared.idle, shared.count, shared.load) == (30 * GIB, False, 1, 0.0)
    assert [each.work for each in shared.jobs] == ["train"]
    assert shared.speeds(seen["job"]) == [0.5, 0.5]
    assert shared.speeds() == empty.speeds(seen["job"]) == [1.0]
    with pytest.raises(AttributeError):
        shared.free = 40 * GIB


def test_speeds_that_cannot_be_predicted_are_none() -> None:
    found: list[list[float] | None] = []

    def look(job: Job, gpus: Gpus, now: float) -> None:
        found.append(gpus[0].speeds(job))

    policy = custom_policy("mine.py:choose", look)
    unknown = [Running(job(7), ("GPU-0",), since=0.0)]
    passed(policy, [job(1, work="x")], slots(0), unknown, predict=lambda works, slot: Speeds([0.9] * len(works)))
    passed(policy, [job(1, work="x")], slots(0), [Running(job(7, work="y"), ("GPU-0",), since=0.0)])
    assert found == [None, None]


def test_speeds_are_available_to_policies_that_ignore_them() -> None:
    found: list[list[float] | None] = []

    def look(job: Job, gpus: Gpus, now: float) -> GpuView:
        found.append(gpus[0].speeds(job))
        return gpus[0]

    there = [Running(job(7, work="y", min_speed=0.8), ("GPU-0",), since=0.0)]
    slow = {"predict": lambda works, slot: Speeds([0.1] * len(works))}
    assert not passed(custom_policy("mine.py:choose", look), [job(1, work="x")], slots(0), there, **slow).placed
    look.predicts = False  # type: ignore[attr-defined]
    assert passed(custom_policy("mine.py:choose", look), [job(1, work="x")], slots(0), there, **slow).placed
    assert found == [[0.1, 0.1]], "the first time it was not even asked: the neighbour would be too slow"


@pytest.mark.parametrize("backfills", [True, False])
def test_traits_are_attributes_of_the_function(backfills: bool) -> None:
    def large_ones_wait(job: Job, gpus: Gpus, now: float) -> GpuView | None:
        return None if (job.promise or 0) > 20 * GIB else gpus[0]

    large_ones_wait.backfills = backfills  # type: ignore[attr-defined]
    assert where(large_ones_wait, [job(1, 30), job(2)], slots(0)) == ({2: [0]} if backfills else {})


def test_a_trait_that_does_not_exist_is_refused() -> None:
    def choose(job: Job, gpus: Gpus, now: float) -> None: ...

    choose.backfill = True  # type: ignore[attr-defined]
    with pytest.raises(
        InvalidValue, match="mine.py:choose must have True or False for oracle, alone, backfills, predicts, got "
    ):
        custom_policy("mine.py:choose", choose)


def test_a_job_that_it_lets_wait_keeps_no_gpu_from_others() -> None:
    def not_the_first(job: Job, gpus: Gpus, now: float) -> GpuView | None:
        return None if job.id == 1 else gpus[0]

    assert where(not_the_first, [job(1), job(2)], slots(0), patience=0.0) == {2: [0]}


WRONG: dict[str, Callable[..., Any]] = {
    "ZeroDivisionError: division by zero (line ": lambda job, gpus, now: 1 / 0,
    "SystemExit: 3 (line ": lambda job, gpus, now: exec("raise SystemExit(3)"),
    "return one of the GPUs that it was given, a list of them, each once, or None, got 0": lambda job, gpus, now: 0,
    "each once, or None, got [GpuView(index=0": lambda job, gpus, now: [gpus[0], gpus[0]],
    "it must return a list of GPUs because the job asks for 2, got one GPU": lambda job, gpus, now: gpus[0],
}


@pytest.mark.parametrize("message", WRONG)
def test_a_failing_or_nonsensical_function_is_one_message(message: str) -> None:
    policy = custom_policy("mine.py:choose", WRONG[message])
    with pytest.raises(PolicyFailed) as raised:
        passed(policy, [job(9, gpus=2)], slots(0, 0))
    said = str(raised.value)
    assert said.startswith("the policy mine.py:choose failed for job 9: ") and message in said


def test_an_error_in_a_policy_is_logged_and_others_placed() -> None:
    def choosy(job: Job, gpus: Gpus, now: float) -> GpuView:
        return gpus[0] if job.promise / GIB else gpus[1]  # type: ignore[operator]

    told: list[PolicyFailed] = []
    policy = forgiving(custom_policy("mine.py:choose", choosy), told.append)
    outcome = passed(policy, [job(1, None), job(2)], slots(0, 0))
    assert [each.job for each in outcome.placed] == [2]
    assert [each.job for each in outcome.waiting] == [failure.job for failure in told] == [1]
