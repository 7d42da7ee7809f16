"""GPUs that are reserved for some users for a time: who may start there, and what the others are told."""

from __future__ import annotations

import pytest

from ullage.manager.placement import Activity, Booking, Job, Ledger, PassOutcome, Rules, Slot, decide, policies

GIB = 1 << 30
RULES = Rules(smact_limit=None, margin=0, patience=100.0)
DEMO = Booking(7, begin=1000.0, end=2000.0, text="is reserved for ann (demo)")


def slots(*booked: Booking, count: int = 1) -> list[Slot]:
    """So many GPUs, of which the first one is booked."""
    return [
        Slot(f"GPU-{i}", i, "A100-40GB", 40 * GIB, 0, Activity(smact=0.0), bookings=booked if i == 0 else ())
        for i in range(count)
    ]


def job(number: int, mine: bool = False, **more: object) -> Job:
    fields = {"promise": GIB, "true": GIB, "bookings": frozenset({7} if mine else ()), **more}
    return Job(number, "ann" if mine else "bob", float(number), **fields)  # type: ignore[arg-type]


def ask(waiting: list[Job], now: float, there: list[Slot] | None = None, policy: str = "ullage") -> PassOutcome:
    return decide(policy, waiting, [], there or slots(DEMO), Ledger(), RULES, now)


def placed(outcome: PassOutcome) -> list[int]:
    return [each.job for each in outcome.placed]


@pytest.mark.parametrize(
    ("now", "limit", "starts"),
    [
        (500.0, 400.0, True),
        (500.0, 500.0, True),
        (500.0, 501.0, False),
        (500.0, None, False),
        (1000.0, 1.0, False),
        (1500.0, None, False),
        (2000.0, None, True),
    ],
)
def test_foreign_job_starts_only_if_it_ends_before_the_booking(now: float, limit: float | None, starts: bool) -> None:
    assert placed(ask([job(1, time_limit=limit)], now)) == ([1] if starts else [])
    assert placed(ask([job(1, mine=True, time_limit=limit)], now)) == [1], "its owner may always"


def test_the_reason_says_for_whom_it_is_reserved() -> None:
    (waiting,) = ask([job(1)], 1500.0).waiting
    assert waiting.reason == "needs 1.00 GiB on a GPU; GPU 0 has 40.0 GiB free but is reserved for ann (demo)"
    assert not waiting.never


@pytest.mark.parametrize("policy", policies())
def test_a_job_that_waits_for_a_booking_delays_no_other(policy: str) -> None:
    outcome = ask([job(1), job(2), job(3, mine=True)], 1500.0, policy=policy)
    assert placed(outcome) == [3]
    long_ago = ask([job(1, priority=5), job(2, time_limit=300.0)], 500.0, policy=policy)
    assert placed(long_ago) == [2]


def test_other_gpus_are_taken_instead() -> None:
    outcome = ask([job(1), job(2, gpus=2)], 1500.0, slots(DEMO, count=2))
    assert [(each.job, each.slots) for each in outcome.placed] == [(1, ("GPU-1",))]
    assert outcome.waiting[0].reason == (
        "needs 1.00 GiB on each of 2 GPUs; 1 of the 2 GPUs are ready; GPU 0 has 40.0 GiB free but is reserved for ann "
        "(demo)"
    )


def test_a_job_refused_by_a_booking_does_not_block_smaller_ones() -> None:
    """What failed once fails again, but only for jobs that are kept away from the same GPUs."""
    jobs = [job(1, promise=GIB, true=GIB), job(2, mine=True, promise=30 * GIB, true=30 * GIB)]
    assert placed(ask(jobs, 1500.0)) == [2]


def test_a_job_that_waited_long_keeps_no_gpu_booked_for_others() -> None:
    jobs = [job(1, promise=35 * GIB), job(2, mine=True, promise=35 * GIB), job(3, mine=True, promise=10 * GIB)]
    outcome = ask(jobs, 1500.0)
    assert placed(outcome) == [2]
