"""Who comes first, who may pass whom, and what those who wait are told."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from random import Random

import pytest

from ullage.manager.placement import (
    Activity,
    Job,
    Ledger,
    Rules,
    Running,
    Slot,
    Speeds,
    decay,
    decide,
    fair_order,
    held,
)

GIB = 1 << 30
QUIET = Rules(smact_limit=None, margin=0, patience=100.0)
IN_ORDER = ["exclusive", "round-robin", "magm", "lug", "mug", "first-fit", "best-fit", "worst-fit", "least-utilized"]


def slots(count: int, total: int = 40) -> list[Slot]:
    return [Slot(f"GPU-{i}", i, "A100-40GB", total * GIB, 0, Activity(smact=0.0)) for i in range(count)]


def job(number: int, promise: int = 10, submitted: float | None = None, **more: object) -> Job:
    """A job, by default of a user who has no other."""
    at = float(number) if submitted is None else submitted
    return Job(number, str(more.pop("user", f"user {number}")), at, promise=promise * GIB, true=promise * GIB, **more)  # type: ignore[arg-type]


def running(*jobs: tuple[Job, str], since: float = 0.0) -> list[Running]:
    return [Running(each, tuple(where.split()), since) for each, where in jobs]


def order(jobs: list[Job], rules: Rules | None = None, now: float = 100.0, **usage: float) -> list[int]:
    return [each.id for each in fair_order(jobs, rules or Rules(), now, usage)]


def test_priority_then_recovery_then_arrival() -> None:
    jobs = [job(1), job(2, priority=5), job(3, recovery=True), job(4, recovery=True, priority=1), job(5)]
    assert order(jobs) == [2, 4, 3, 1, 5]


def test_users_take_turns_by_what_they_used_and_by_their_shares() -> None:
    jobs = [job(n, user="ada") for n in (1, 2, 3)] + [job(n, user="bob") for n in (11, 12, 13)]
    assert order(jobs) == [1, 11, 2, 12, 3, 13]
    assert order(jobs, ada=10_000.0) == [11, 12, 13, 1, 2, 3]
    assert order(jobs, Rules(fair=False), ada=10_000.0) == [1, 2, 3, 11, 12, 13]
    shares = [job(n, user="ada") for n in (1, 2)] + [job(n, user="bob", share=2.0) for n in (11, 12, 13, 14)]
    assert order(shares) == [1, 11, 12, 2, 13, 14]
    wide = [job(1, user="ada", gpus=4), job(2, user="ada"), job(11, user="bob"), job(12, user="bob")]
    assert order(wide) == [1, 11, 12, 2], "four GPUs are four turns"


def test_priority_goes_before_fair_share_and_waiting_raises_it() -> None:
    jobs = [job(1, submitted=0.0), job(2, submitted=900.0, priority=1)]
    assert order(jobs, Rules(ageing=None), now=1000.0) == [2, 1]
    assert order(jobs, Rules(ageing=2000.0), now=1000.0) == [2, 1]
    assert order(jobs, Rules(ageing=500.0), now=1000.0) == [1, 2]


def test_a_job_that_came_back_has_not_waited_while_it_ran() -> None:
    jobs = [job(1, submitted=0.0, queued=990.0), job(2, submitted=900.0, priority=1)]
    assert order(jobs, Rules(ageing=500.0), now=1000.0) == [2, 1]


def test_usage_fades() -> None:
    """However a time is cut into pieces, it counts for the same, and half of it after a half-life."""
    whole = held(2.0, seconds=10_000.0, half_life=3600.0)
    account = 0.0
    for _ in range(100):
        account = decay(account, 100.0, half_life=3600.0) + held(2.0, seconds=100.0, half_life=3600.0)
    assert account == pytest.approx(whole) and decay(whole, 3600.0, half_life=3600.0) == pytest.approx(whole / 2)
    assert held(1.0, seconds=60.0, half_life=1e9) == pytest.approx(60.0), "long ago is all that counts less"


def test_eight_jobs_that_share_a_gpu_are_one_turn() -> None:
    eighths = [job(n, user="ada", part=1 / 8) for n in range(1, 17)]
    wholes = [job(n, user="bob") for n in (21, 22, 23)]
    assert order(eighths + wholes) == [1, 21, *range(2, 10), 22, *range(10, 17), 23]


@pytest.mark.parametrize("policy", IN_ORDER)
def test_the_dissertations_policies_keep_the_order_by_default(policy: str) -> None:
    jobs = [job(1, promise=35), job(2, promise=35), job(3, promise=1)]
    strict = decide(policy, jobs, [], slots(1), Ledger(), QUIET, now=10.0)
    assert [each.job for each in strict.placed] == [1]
    assert "job 2 is before it" in strict.waiting[1].reason
    passing = Rules(smact_limit=None, margin=0, backfill=True)
    assert [each.job for each in decide(policy, jobs, [], slots(1), Ledger(), passing, now=10.0).placed] == (
        [1] if policy == "exclusive" else [1, 3]
    )


@pytest.mark.parametrize("policy", [*IN_ORDER, "ullage"])
def test_a_waiting_recovery_job_goes_first_but_delays_none(policy: str) -> None:
    there = running((job(100, promise=10), "GPU-0"))
    jobs = [job(1, promise=5), job(2, promise=40, recovery=True, queued=9.0)]
    outcome = decide(policy, jobs, there, slots(2), Ledger(), QUIET, now=10.0)
    assert [each.job for each in outcome.placed][0] == 2
    jobs = [job(1, promise=5), job(2, promise=40, gpus=2, recovery=True, queued=9.0)]
    outcome = decide(policy, jobs, there, slots(2), Ledger(), QUIET, now=10.0)
    assert [each.job for each in outcome.placed] == [1]


@pytest.mark.parametrize("policy", [*IN_ORDER, "ullage"])
def test_a_job_that_can_never_be_placed_delays_no_other(policy: str) -> None:
    jobs = [job(1, promise=50, submitted=-1000.0), job(2, gpus=9, submitted=-1000.0), job(3, promise=5)]
    outcome = decide(policy, jobs, [], slots(2), Ledger(), QUIET, now=10.0)
    assert [each.job for each in outcome.placed] == [3]
    assert [each.never for each in outcome.waiting] == [True, True]


def test_a_job_with_drained_gpus_waits_without_blocking_others() -> None:
    large = Slot("large", 0, "H200", 140 * GIB, 0, Activity(smact=0.0), drained=True)
    jobs = [job(1, promise=100, submitted=-1000.0), job(2, promise=5)]
    outcome = decide("magm", jobs, [], [large, *slots(2)[1:]], Ledger(), QUIET, now=10.0)
    assert [each.job for each in outcome.placed] == [2]
    (waiting,) = outcome.waiting
    assert not waiting.never and waiting.reason.endswith("GPU 0 has 140 GiB free but is drained")


def test_waiting_for_jobs_on_a_drained_gpu_does_not_help() -> None:
    large = Slot("large", 0, "H200", 140 * GIB, 0, Activity(smact=0.0), drained=True)
    there = running((job(100, promise=100), "large"))
    jobs = [job(1, promise=100, submitted=-1000.0), job(2, promise=5)]
    outcome = decide("magm", jobs, there, [large, *slots(2)[1:]], Ledger(), QUIET, now=10.0)
    assert [each.job for each in outcome.placed] == [2]


def test_room_is_kept_only_for_the_first_that_waited_too_long() -> None:
    there = running(*[(job(100 + i, promise=30), f"GPU-{i}") for i in range(3)])
    jobs = [job(1, 35, gpus=2), job(2, 35, gpus=2), job(3, 35), job(4, 6, submitted=999.0)]
    outcome = decide("ullage", jobs, there, slots(3), Ledger(), QUIET, now=1000.0)
    assert [(each.job, each.slots) for each in outcome.placed] == [(4, ("GPU-2",))]


def test_a_job_that_waited_long_reserves_and_is_not_overtaken() -> None:
    there = running((job(100, promise=30), "GPU-0"), (job(101, promise=20), "GPU-1"))
    small = [job(number, promise=6, submitted=900.0) for number in (2, 3, 4)]
    for submitted, expected in ((950.0, {"GPU-0", "GPU-1"}), (800.0, {"GPU-0"})):
        jobs = [job(1, promise=35, submitted=submitted), *small]
        outcome = decide("ullage", jobs, there, slots(2), Ledger(), QUIET, now=1000.0)
        assert {each.slots[0] for each in outcome.placed} == expected
    assert outcome.waiting[-1].reason == (
        "needs 6.00 GiB on a GPU; GPU 1 has 20.0 GiB free but is kept for job 1, which has waited longer; "
        "GPU 0 will have room when job 100 ends"
    )


def test_kept_gpu_is_lent_to_jobs_that_end_before_it_is_needed() -> None:
    there = running((job(100, promise=30, time_limit=1060.0), "GPU-0"))
    blocked = job(1, promise=35, submitted=0.0)
    for limit, expected in ((None, []), (61.0, []), (60.0, [2])):
        jobs = [blocked, job(2, promise=6, submitted=999.0, time_limit=limit)]
        outcome = decide("ullage", jobs, there, slots(1), Ledger(), QUIET, now=1000.0)
        assert [each.job for each in outcome.placed] == expected


def test_a_short_job_backfills_also_after_a_refused_smaller_one() -> None:
    there = running(
        (job(100, promise=30, time_limit=1060.0), "GPU-0"), (job(101, promise=20, time_limit=1060.0), "GPU-1")
    )
    jobs = [
        job(1, promise=35, gpus=2, submitted=0.0),
        job(2, promise=6, submitted=900.0),
        job(3, promise=6, submitted=901.0, time_limit=60.0),
        job(4, promise=18, submitted=902.0, time_limit=60.0),
    ]
    outcome = decide("ullage", jobs, there, slots(2), Ledger(), QUIET, now=1000.0)
    assert {each.job: each.slots for each in outcome.placed} == {3: ("GPU-0",), 4: ("GPU-1",)}


def test_a_job_over_its_time_limit_lends_nothing() -> None:
    there = running((job(100, promise=30, time_limit=10.0), "GPU-0"))
    jobs = [job(1, promise=35, submitted=0.0), job(2, promise=6, submitted=999.0, time_limit=1.0)]
    assert decide("ullage", jobs, there, slots(1), Ledger(), QUIET, now=1000.0).placed == ()


def test_a_job_that_still_holds_memory_is_not_started_again() -> None:
    ledger = Ledger()
    ledger.adopt(1, {"GPU-0": GIB})
    outcome = decide("ullage", [job(1)], [], slots(2), ledger, QUIET, now=10.0)
    assert outcome.placed == () and "its last run still holds memory" in outcome.waiting[0].reason
    twice = decide("ullage", [job(2), job(2)], [], slots(2), ledger, QUIET, now=10.0)
    assert len(twice.placed) == 1 and len(twice.waiting) == 1


def test_several_gpus_are_given_whole_and_distinct() -> None:
    outcome = decide("ullage", [job(1, gpus=3), job(2, gpus=2)], [], slots(4), Ledger(), QUIET, now=10.0)
    assert [len(set(each.slots)) for each in outcome.placed] == [3, 2]
    there = running((job(100, promise=35), "GPU-0 GPU-1 GPU-2"))
    outcome = decide("ullage", [job(1, gpus=2)], there, slots(4), Ledger(), QUIET, now=10.0)
    assert outcome.placed == ()
    assert outcome.waiting[0].reason == (
        "needs 10.0 GiB on each of 2 GPUs; 1 of the 2 GPUs are ready; GPU 0 has the most free, 5.00 GiB; "
        "GPU 0 will have room when job 100 ends"
    )


def test_no_job_joins_an_exclusive_job_despite_free_memory() -> None:
    """On GPUs of different sizes it is promised the smaller size on both."""
    mixed = [slots(1)[0], Slot("large", 1, "H200", 140 * GIB, 0, Activity(smact=0.0))]
    outcome = decide(
        "ullage", [job(1, gpus=2, exclusive=True), job(2, promise=1)], [], mixed, Ledger(), QUIET, now=10.0
    )
    assert [(each.job, each.promise) for each in outcome.placed] == [(1, 40 * GIB)]
    assert outcome.waiting[0].reason.endswith("belongs to one job alone; GPU 1 will have room when job 1 ends")


@pytest.mark.parametrize(
    ("promise", "there", "said"),
    [
        (30, [(12, 0), (12, 0), (38, 1)], "GPU 1 will have room when job 102 ends"),
        (30, [(10, 0), (28, 0), (10, 1), (28, 1)], "GPU 0 will have room when job 101 ends"),
        (39, [(10, 0), (28, 0)], "GPU 0 will have room when jobs 100 and 101 end"),
        (39, [(8, 0), (8, 0), (8, 0), (8, 0)], None),
    ],
)
def test_a_reason_names_the_fewest_jobs_whose_end_makes_room(
    promise: int, there: list[tuple[int, int]], said: str | None
) -> None:
    jobs = running(*((job(100 + at, promise=size), f"GPU-{gpu}") for at, (size, gpu) in enumerate(there)))
    gpus = slots(max(gpu for _, gpu in there) + 1)
    (found,) = decide("ullage", [job(1, promise=promise)], jobs, gpus, Ledger(), QUIET, now=10.0).waiting
    assert found.reason.endswith(f"; {said}") if said else "will have" not in found.reason
    drained = [dataclasses.replace(gpu, drained=True) for gpu in gpus]
    (found,) = decide("ullage", [job(1, promise=promise)], jobs, drained, Ledger(), QUIET, now=10.0).waiting
    assert "will have" not in found.reason


@pytest.mark.parametrize(
    ("waiting", "reason"),
    [
        (job(1, promise=30), "needs 30.0 GiB on a GPU; GPU 0 has the most free, 20.0 GiB"),
        (
            job(1, promise=19),
            "needs 19.0 GiB on a GPU; GPU 0 has the most free, 20.0 GiB, and 2.00 GiB are to stay free",
        ),
        (
            job(1, exclusive=True),
            "needs an idle GPU to itself with 10.0 GiB; none is idle: GPU 0 has the most free, 20.0 GiB",
        ),
        (
            Job(1, "ada", 0.0),
            "needs an idle GPU to itself (its memory is unknown); none is idle: GPU 0 has the most free, 20.0 GiB",
        ),
        (
            job(1, promise=50),
            "needs 50.0 GiB on a GPU; that can never be: no GPU has as much, and the largest has 40.0 GiB",
        ),
        (job(1, gpus=3), "needs 10.0 GiB on each of 3 GPUs; that can never be: there are 2 GPUs"),
        (job(1, promise=39), "needs 39.0 GiB on a GPU; GPU 0 has the most free, 20.0 GiB"),
    ],
)
def test_reasons_say_what_was_needed_and_what_the_best_gpu_had(waiting: Job, reason: str) -> None:
    there = running((job(100, promise=20), "GPU-0"), (job(101, promise=30), "GPU-1"))
    rules = Rules(margin=2 * GIB, smact_limit=None)
    (found,) = decide("ullage", [waiting], there, slots(2), Ledger(), rules, now=10.0).waiting
    assert found.reason == reason + ("" if found.never else "; GPU 0 will have room when job 100 ends")


def test_the_reason_names_the_activity_that_stands_in_the_way() -> None:
    busy = [Slot("GPU-0", 0, "H200", 40 * GIB, 5 * GIB, Activity(smact=0.91, age=1.0), foreign=5 * GIB)]
    (found,) = decide("lug", [job(1)], [], busy, Ledger(), Rules(), now=10.0).waiting
    assert found.reason.endswith("GPU 0 has 35.0 GiB free but has an SM activity of 91%, over the limit of 80%")


LARGE = [
    job(0, promise=38),
    job(0, promise=20, gpus=4),
    job(0, promise=1, exclusive=True),
    job(0, promise=1, gpus=3, exclusive=True),
    job(0, promise=2, work="choosy", min_speed=0.9),
    job(0, promise=3, gpus=3, work="choosy", min_speed=0.9),
    job(0, promise=30, work="sociable", min_speed=0.4),  # a small one fits beside it
    job(0, promise=30, gpus=2, work="sociable", min_speed=0.4),
]


def slow_together(works: Sequence[str], slot: Slot) -> Speeds:
    """What the GPU does, each job has a part of."""
    return Speeds([1 / len(works)] * len(works))


def first_run_of_a_large_job(large: Job, rules: Rules, limits: bool, ticks: int = 400) -> int | None:
    """The tick at which it starts, while at every tick small jobs arrive, enough to fill every GPU for ever.

    The small ones are of one owner. They keep all GPUs busy and do not mind: a job that wants to keep its speed is
    suited by none of them."""
    cluster, ledger = slots(4), Ledger()
    ledger.see(cluster)
    waiting, there, numbers = [large], [], itertools.count(1)
    for number in range(16):
        first = job(1000 + number, promise=8, submitted=-5.0, work="small")
        ledger.promise(first.id, {f"GPU-{number % 4}": first.promise or 0})
        there.append((float(number % 7 + 2), Running(first, (f"GPU-{number % 4}",), 0.0)))
    for tick in range(1, ticks):
        now = float(tick)
        for ended in [each for each in there if each[0] <= now]:
            there.remove(ended)
            ledger.release(ended[1].job.id)
        for number in itertools.islice(numbers, 6):
            limit = float(number % 9 + 3) if limits else None
            waiting.append(job(10_000 + number, 8, now, time_limit=limit, work="small", user="bob"))
        outcome = decide("ullage", waiting, [each for _, each in there], cluster, ledger, rules, now)
        for decision in outcome.placed:
            ledger.accept(decision)
            (found,) = [each for each in waiting if each.id == decision.job]
            waiting.remove(found)
            there.append((now + float(found.id % 9 + 3), Running(found, decision.slots, now)))
            if found is large:
                return tick
        del waiting[200:]
    return None


@pytest.mark.parametrize("limits", [False, True])
@pytest.mark.parametrize("large", LARGE, ids=lambda each: f"{each.gpus}x{(each.promise or 0) // GIB}GiB")
def test_a_large_job_gets_its_turn_while_small_ones_keep_coming(large: Job, limits: bool) -> None:
    rules = Rules(smact_limit=None, margin=0, patience=50.0, predict=slow_together if large.work else None)
    started = first_run_of_a_large_job(large, rules, limits)
    assert started is not None and 50 <= started < 100


@pytest.mark.parametrize("large", LARGE, ids=lambda each: f"{each.gpus}x{(each.promise or 0) // GIB}GiB")
def test_without_reservations_it_would_starve(large: Job) -> None:
    """So the test above can fail."""
    predict = slow_together if large.work else None
    rules = Rules(smact_limit=None, margin=0, patience=math.inf, predict=predict)
    assert first_run_of_a_large_job(large, rules, limits=False, ticks=200) is None


def beside_a_large_one(*guests: Job, large: Job, there: list[Running], rules: Rules | None = None) -> list[int]:
    """Who is placed while a slot is kept for a large job; `there` are those on the slot."""
    rules = rules or Rules(smact_limit=None, margin=0, patience=100.0, predict=slow_together)
    outcome = decide("ullage", [large, *guests], there, slots(1), Ledger(), rules, now=500.0)
    return [placed.job for placed in outcome.placed]


def test_a_backfill_job_joins_if_the_waiting_one_still_fits() -> None:
    large = job(1, 30, work="large", min_speed=0.3)
    there = running((job(90, 20, work="a"), "GPU-0"))
    assert beside_a_large_one(job(2, 10, work="b"), large=large, there=there) == [2]
    assert beside_a_large_one(job(2, 11, work="b"), large=large, there=there) == [], "there would be no room for it"
    assert beside_a_large_one(job(2, 5, work="b"), job(3, 5, work="c"), large=large, there=there) == [2, 3]
    assert beside_a_large_one(job(2, 5, work="b"), job(3, 6, work="c"), large=large, there=there) == [2]
    assert beside_a_large_one(job(2, 5, exclusive=True), job(3, 5), large=large, there=there) == [3], "by its memory"


def test_a_backfill_job_needs_a_waiting_one_that_would_join() -> None:
    """Else that one would have to wait until the guest has ended."""

    def half(works: Sequence[str], slot: Slot) -> Speeds:
        slow = {"large", "b"} <= set(works)
        return Speeds([0.5 if slow and work in ("large", "b") else 0.9 for work in works])

    rules = Rules(smact_limit=None, margin=0, patience=100.0, predict=half)
    there = running((job(90, 20, work="a"), "GPU-0"))
    large = job(1, 30, work="large", min_speed=0.6)
    assert beside_a_large_one(job(2, 5, work="b"), large=large, there=there, rules=rules) == [], "it wants more speed"
    assert beside_a_large_one(job(2, 5, work="c"), large=large, there=there, rules=rules) == [2]
    content = dataclasses.replace(large, min_speed=None)
    assert beside_a_large_one(job(2, 5, work="b"), large=content, there=there, rules=rules) == [2]


def test_guests_of_earlier_passes_count() -> None:
    large = job(1, 30, work="large", min_speed=0.3)
    guest = running((job(80, 8, work="b"), "GPU-0"), since=200.0)
    there = running((job(90, 20, work="a"), "GPU-0")) + guest
    assert beside_a_large_one(job(2, 2, work="c"), large=large, there=there) == [2]
    assert beside_a_large_one(job(2, 3, work="c"), large=large, there=there) == []
    assert beside_a_large_one(job(2, 2, work="c"), large=large, there=guest) == [1, 2], "who was there before has ended"


def test_a_backfill_job_must_suit_waiting_and_present_jobs() -> None:
    there = running((job(90, 20, work="a", min_speed=0.5), "GPU-0"))
    small = job(2, 2, work="b")
    assert beside_a_large_one(small, large=job(1, 30, work="large", min_speed=0.5), there=there) == [2]
    assert beside_a_large_one(small, large=job(1, 30, work="large", min_speed=0.6), there=there) == []
    assert beside_a_large_one(small, large=job(1, 30, exclusive=True), there=there) == []
    choosy = running((job(90, 20, work="a", min_speed=0.6), "GPU-0"))
    assert beside_a_large_one(small, large=job(1, 30, work="large", min_speed=0.5), there=choosy) == []
    crowded = dataclasses.replace(QUIET, predict=slow_together, max_jobs_per_gpu=1)
    assert beside_a_large_one(small, large=job(1, 30, work="large"), there=there, rules=crowded) == []
    assert beside_a_large_one(small, large=job(1, 30, work="large"), there=there, rules=QUIET) == [2], "by its memory"


def element(number: int, array: int = 1, throttle: int = 2, **more: object) -> Job:
    return job(number, 1, array=array, throttle=throttle, **{"user": "ada"} | more)


@pytest.mark.parametrize("policy", ["ullage", *IN_ORDER])
def test_a_throttled_array_runs_no_more_than_its_throttle(policy: str) -> None:
    wait = [element(n) for n in range(1, 9)]
    outcome = decide(policy, wait, [], slots(8), Ledger(), QUIET, now=50.0)
    assert [placed.job for placed in outcome.placed] == [1, 2]
    assert {each.reason for each in outcome.waiting} == {"of array 1 at most 2 run at once"}
    there = running((element(90), "GPU-0"))
    outcome = decide(policy, wait, there, slots(8), Ledger(), QUIET, now=50.0)
    assert len(outcome.placed) == 1, "what runs already counts"
    lowered = [element(n, throttle=1) for n in range(1, 9)]
    two = running((element(90), "GPU-0"), (element(91), "GPU-1"))
    assert not decide(policy, lowered, two, slots(8), Ledger(), QUIET, now=50.0).placed


@pytest.mark.parametrize("policy", ["ullage", *IN_ORDER])
def test_a_throttled_array_delays_no_job_and_keeps_no_slot(policy: str) -> None:
    wait = [element(1, throttle=1), element(2, throttle=1), job(3, 1, user="bob"), job(4, 1)]
    outcome = decide(policy, wait, running((element(90), "GPU-0")), slots(3), Ledger(), QUIET, now=5000.0)
    assert {placed.job for placed in outcome.placed} == {3, 4}
    assert {each.reason for each in outcome.waiting} == {"of array 1 at most 1 run at once"}


def test_a_long_throttled_array_leaves_its_users_turns() -> None:
    wait = [element(n) for n in range(1, 100)] + [job(200, user="ada")] + [job(n, user="bob") for n in range(300, 310)]
    rules = Rules(smact_limit=None, margin=0, max_jobs_per_gpu=1)
    outcome = decide("exclusive", wait, [], slots(5), Ledger(), rules, now=400.0)
    assert 200 in [placed.job for placed in outcome.placed]


def test_elements_that_cannot_go_let_others_of_their_array_go() -> None:
    wait = [element(1, exclusive=True), element(2), element(3)]
    there = running((job(90, 1), "GPU-0"))
    outcome = decide("ullage", wait, there, slots(1), Ledger(), QUIET, now=50.0)
    assert [placed.job for placed in outcome.placed] == [2, 3]


def test_unequal_ranks_are_promised_their_needs_in_slot_order() -> None:
    stages = job(1, 30, gpus=2, promises=(5 * GIB, 30 * GIB))
    outcome = decide("ullage", [stages, job(2, 30)], [], slots(2), Ledger(), QUIET, 100.0)
    first, second = outcome.placed
    assert (first.slots, first.memory) == (("GPU-0", "GPU-1"), {"GPU-0": 5 * GIB, "GPU-1": 30 * GIB})
    assert second.slots == ("GPU-0",), "35 GiB are free beside the small rank"
    others = running((job(3, 30), "GPU-0"))
    turned = decide("ullage", [stages], others, slots(2), Ledger(), QUIET, 100.0)
    assert turned.placed[0].memory == {"GPU-0": 5 * GIB, "GPU-1": 30 * GIB}
    large_first = job(1, 30, gpus=2, promises=(30 * GIB, 5 * GIB))
    turned = decide("ullage", [large_first], others, slots(2), Ledger(), QUIET, 100.0)
    assert turned.placed[0].slots == ("GPU-1", "GPU-0"), "the small rank goes where little is left"
    alone = decide("exclusive", [stages], [], slots(2), Ledger(), QUIET, 100.0)
    assert alone.placed[0].memory == {"GPU-0": 40 * GIB, "GPU-1": 40 * GIB}
    beside = decide("ullage", [job(2, 30)], running((stages, "GPU-0 GPU-1")), slots(2), Ledger(), QUIET, 100.0)
    assert beside.placed[0].slots == ("GPU-0",), "a running job that the ledger does not know counts rank by rank"


@pytest.mark.parametrize("seed", range(40))
def test_ranks_that_differ_start_if_and_only_if_each_finds_gpu(seed: int) -> None:
    random = Random(seed)
    count, ranks = random.randint(2, 5), random.randint(2, 4)
    held_there = [random.randint(0, 39) for _ in range(count)]
    there = running(*[(job(10 + place, size), f"GPU-{place}") for place, size in enumerate(held_there)])
    promises = tuple(random.randint(1, 40) * GIB for _ in range(ranks))
    stages = job(1, max(promises) // GIB, gpus=ranks, promises=promises)
    free = [(40 - size) * GIB for size in held_there]
    possible = any(
        all(free[place] >= promise for place, promise in zip(places, promises, strict=True))
        for places in itertools.permutations(range(count), ranks)
    )
    outcome = decide("ullage", [stages], there, slots(count), Ledger(), QUIET, 100.0)
    assert bool(outcome.placed) == possible, (promises, free)
    if outcome.placed:
        assert all(free[int(slot[-1])] >= promise for slot, promise in outcome.placed[0].memory.items())
    else:
        assert outcome.waiting[0].never == (ranks > count)


def test_job_whose_ranks_differ_keeps_gpus_that_will_hold_them() -> None:
    small = [*slots(1), Slot("GPU-1", 1, "T4", 16 * GIB, 0, Activity(smact=0.0))]
    stages = job(1, 30, gpus=2, promises=(10 * GIB, 30 * GIB))
    there = running((job(5, 20, time_limit=1000.0), "GPU-0"), (job(6, 10, time_limit=1000.0), "GPU-1"))
    now = QUIET.patience + 10.0
    outcome = decide("ullage", [stages, job(2, 15)], there, small, Ledger(), QUIET, now)
    assert not outcome.placed and not outcome.waiting[0].never, "job 2 has no time limit and would hold up the first"
    assert outcome.waiting[0].reason.startswith("needs 10.0 GiB, 30.0 GiB on 2 GPUs; ")
    assert decide("ullage", [stages], [], small, Ledger(), QUIET, now).placed[0].slots == ("GPU-1", "GPU-0")
    larger = job(1, 30, gpus=2, promises=(20 * GIB, 30 * GIB))
    assert decide("ullage", [larger], [], small, Ledger(), QUIET, now).waiting[0].never
