"""Cores and host memory: counted beside GPUs, with reasons, for nobody twice, and for nobody never."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ullage.errors import Overbooked
from ullage.manager.placement import (
    Activity,
    HostShare,
    Job,
    Ledger,
    PassOutcome,
    Rules,
    Running,
    Slot,
    decide,
    fair_order,
    policies,
)

GIB = 1 << 30
HOST = HostShare(8, 64 * GIB)
RULES = Rules(smact_limit=None, margin=0, patience=100.0)


def slots(count: int = 2) -> list[Slot]:
    return [Slot(f"GPU-{i}", i, "A100-40GB", 40 * GIB, 0, Activity(smact=0.0)) for i in range(count)]


def job(number: int, cores: int = 0, memory: int = 0, submitted: float | None = None, **more: object) -> Job:
    at = float(number) if submitted is None else submitted
    fields = {"promise": GIB, "true": GIB, "host": HostShare(cores, memory * GIB), **more}
    return Job(number, f"user {number}", at, **fields)  # type: ignore[arg-type]


def ask(
    waiting: list[Job],
    there: Sequence[Job] = (),
    host: HostShare | None = HOST,
    now: float = 10.0,
    policy: str = "ullage",
    rules: Rules = RULES,
    gpus: int = 2,
) -> PassOutcome:
    running = [Running(each, ("GPU-0",)[: each.gpus], 0.0) for each in there]
    return decide(policy, waiting, running, slots(gpus), Ledger(host=host), rules, now)


def placed(outcome: PassOutcome) -> list[int]:
    return [each.job for each in outcome.placed]


@pytest.mark.parametrize(
    ("waiting", "there", "reason"),
    [
        (job(1, cores=8), job(100, cores=5), "needs 8 cores; 3 of 8 are free"),
        (job(1, memory=32), job(100, memory=48), "needs 32.0 GiB of host memory; 16.0 GiB of 64.0 GiB are free"),
        (job(1, cores=9), job(100), "needs 9 cores; that can never be: jobs have 8 here"),
        (job(1, cores=8, gpus=0), job(100, cores=5), "needs 8 cores; 3 of 8 are free"),
        (
            job(1, cores=8, promise=41 * GIB),
            job(100, cores=5),
            "needs 41.0 GiB on a GPU; that can never be: no GPU has as much, and the largest has 40.0 GiB",
        ),
        (
            job(1, cores=8, gpus=2, exclusive=True),
            job(100, cores=5),
            "needs 2 idle GPUs to itself with 1.00 GiB; 1 of the 2 GPUs are ready; none is idle: GPU 0 has the most "
            "free, 39.0 GiB; GPU 0 will have room when job 100 ends; it also needs 8 cores; 3 of 8 are free",
        ),
    ],
)
def test_a_job_waits_for_what_the_host_lacks_and_says_so(waiting: Job, there: Job, reason: str) -> None:
    (found,) = ask([waiting], [there]).waiting
    assert found.reason == reason


def test_users_take_turns_also_with_jobs_that_need_no_gpu() -> None:
    first = [dataclasses.replace(job(number, gpus=0), user="ada") for number in (1, 2, 3)]
    second = [dataclasses.replace(job(number, gpus=0), user="bob") for number in (11, 12, 13)]
    assert [each.id for each in fair_order(first + second, RULES, now=20.0)] == [1, 11, 2, 12, 3, 13]


def test_unrequested_resources_are_not_counted() -> None:
    there = [job(100, cores=8, memory=64)]
    assert placed(ask([job(1), job(2, gpus=0)], there)) == [1, 2]
    assert placed(ask([job(1, cores=100)], there, host=None)) == [1], "a host that is not counted holds everything"


def test_a_job_without_a_gpu_needs_no_gpu() -> None:
    outcome = ask([job(1, cores=2, gpus=0, promise=None), job(2, gpus=1)], gpus=0)
    assert [(each.job, each.slots, each.promise) for each in outcome.placed] == [(1, (), 0)]


def test_a_job_that_needs_too_much_delays_no_other() -> None:
    for policy in policies():
        assert placed(ask([job(1, cores=9), job(2, cores=8)], policy=policy, now=1000.0)) == [2], policy


def test_a_job_passes_one_waiting_for_cores_for_a_limited_time() -> None:
    there, waiting = [job(100, cores=5)], [job(1, cores=8, submitted=0.0), job(2, cores=1, submitted=1.0)]
    assert placed(ask(waiting, there, now=50.0)) == [2]
    outcome = ask(waiting, there, now=150.0)
    assert placed(outcome) == []
    assert outcome.waiting[1].reason == ("needs 1 core; 3 are free, but 8 are kept for job 1, which has waited longer")
    assert placed(ask(waiting, [], now=150.0)) == [1]


def test_kept_cores_are_lent_to_jobs_that_end_in_time() -> None:
    there = [job(100, cores=5, time_limit=400.0)]
    long, short = job(2, cores=1, submitted=1.0, time_limit=300.0), job(3, cores=1, submitted=2.0, time_limit=200.0)
    assert placed(ask([job(1, cores=8, submitted=0.0, gpus=0), long, short], there, now=150.0)) == [3]


def test_jobs_may_use_room_that_the_waiting_job_leaves() -> None:
    there = [job(100, cores=1, exclusive=True)]
    wide = job(1, cores=4, submitted=0.0, gpus=2, exclusive=True)
    jobs = [wide, job(2, cores=3, gpus=0, submitted=1.0), job(3, cores=1, gpus=0, submitted=2.0)]
    assert placed(ask(jobs, there, now=150.0)) == [2], "of 7 free cores 4 are kept"


def test_the_ledger_promises_the_host_with_the_gpus_or_neither() -> None:
    ledger = Ledger(slots(1), HOST)
    ledger.promise(1, {"GPU-0": GIB}, host=HostShare(6, 10 * GIB))
    with pytest.raises(Overbooked, match="job 2 needs 3 cores; 2 cores and 54.0 GiB of host memory are left"):
        ledger.promise(2, {"GPU-0": GIB}, host=HostShare(3))
    assert ledger.holders("GPU-0") == (1,)
    ledger.adopt(3, {}, host=HostShare(5))
    assert ledger.free_on_host() == HostShare(0, 54 * GIB), "who runs already is counted, room or not"
    assert ledger.release(1) and ledger.release(3) and ledger.free_on_host() == HOST


shares = st.builds(HostShare, st.integers(0, 8), st.sampled_from([0, 0, 16 * GIB, 64 * GIB]))


@settings(max_examples=60, deadline=None)
@given(
    wanted=shares,
    gpus=st.integers(0, 2),
    policy=st.sampled_from(["ullage", "magm", "exclusive"]),
    small=st.lists(
        st.tuples(st.integers(0, 3), st.integers(0, 1), st.sampled_from([None, 3.0, 9.0])), min_size=1, max_size=6
    ),
)
@example(wanted=HostShare(8), gpus=0, policy="ullage", small=[(1, 0, None)] * 6)
@example(wanted=HostShare(0, 64 * GIB), gpus=1, policy="ullage", small=[(1, 0, 9.0), (2, 0, 3.0)] * 3)
def test_every_job_that_could_ever_run_gets_its_turn(
    wanted: HostShare, gpus: int, policy: str, small: list[tuple[int, int, float | None]]
) -> None:
    """Small jobs fill the host before it comes, and arrive at every tick; each runs for a while and ends."""
    rules = Rules(smact_limit=None, margin=0, patience=20.0, fair=False)
    cluster, ledger = slots(2), Ledger(slots(2), HOST)
    large = Job(0, "ada", 15.5, gpus=gpus, promise=30 * GIB, host=wanted)
    waiting: list[Job] = []
    there: list[tuple[float, Running]] = []
    numbers = itertools.count(1)
    for tick in range(1, 150):
        now = float(tick)
        waiting += [large] if tick == 16 else []
        for ended in [each for each in there if each[0] <= now]:
            there.remove(ended)
            ledger.release(ended[1].job.id)
        for (cores, asks_gpus, limit), number in zip(small, numbers, strict=False):
            share = HostShare(cores, cores * 8 * GIB)
            waiting.append(Job(number, "ada", now, gpus=asks_gpus, promise=8 * GIB, host=share, time_limit=limit))
        outcome = decide(policy, waiting, [each for _, each in there], cluster, ledger, rules, now)
        for decision in outcome.placed:
            ledger.accept(decision)
            (found,) = [each for each in waiting if each.id == decision.job]
            waiting.remove(found)
            there.append((now + (found.time_limit or 7.0), Running(found, decision.slots, now)))
            if found is large:
                return
        waiting = [each for each in waiting if each is large or now - each.submitted < 10]
    raise AssertionError(f"it never ran: {[each.reason for each in outcome.waiting if each.job == 0]}")
