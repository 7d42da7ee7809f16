"""What is not known never looks idle, free or small."""

from __future__ import annotations

import pytest

from ullage.manager.placement import Activity, Job, Ledger, Rules, Slot, decide

GIB = 1 << 30
IDLE = Activity(smact=0.0, age=1.0)


def slot(index: int = 0, used: int | None = 0, activity: Activity = IDLE, foreign: int = 0) -> Slot:
    known = None if used is None else used * GIB
    return Slot(f"GPU-{index}", index, "A100-40GB", 40 * GIB, known, activity, foreign=foreign * GIB)


def jobs(count: int, promise: int | None, **more: object) -> list[Job]:
    return [
        Job(number, "ada", float(number), promise=None if promise is None else promise * GIB, **more)  # type: ignore[arg-type]
        for number in range(count)
    ]


def placed(policy: str, waiting: list[Job], slots: list[Slot], rules: Rules) -> list[tuple[str, ...]]:
    return [each.slots for each in decide(policy, waiting, [], slots, Ledger(), rules, now=10.0).placed]


@pytest.mark.parametrize("policy", ["ullage", "magm", "lug", "mug", "round-robin", "worst-fit"])
def test_gpu_of_unknown_memory_takes_one_job_at_a_time_or_none(policy: str) -> None:
    waiting = [Job(number, "ada", 0.0, promise=GIB, true=GIB) for number in range(3)]
    assert placed(policy, waiting, [slot(used=None)], Rules()) == [("GPU-0",)]
    assert placed(policy, waiting, [slot(used=None)], Rules(smact_limit=None)) == [("GPU-0",)]
    assert placed(policy, waiting, [slot(used=None)], Rules(unmeasured="never")) == []


def test_foreign_memory_counts_on_a_gpu_of_unknown_memory() -> None:
    blind = slot(used=None, foreign=30)
    assert placed("magm", jobs(1, promise=20), [blind], Rules(smact_limit=None)) == []
    assert placed("exclusive", jobs(1, promise=1), [blind], Rules()) == []


@pytest.mark.parametrize("policy", ["ullage", "magm", "lug", "mug"])
def test_a_gpu_of_unknown_activity_is_not_shared(policy: str) -> None:
    unknown = Activity()
    assert placed(policy, jobs(3, promise=1), [slot(activity=unknown)], Rules()) == [("GPU-0",)]
    assert placed(policy, jobs(3, promise=1), [slot(used=20, foreign=20, activity=unknown)], Rules()) == []
    assert len(placed(policy, jobs(3, promise=1), [slot(activity=unknown)], Rules(smact_limit=None))) == 3


def test_predictions_stand_in_for_an_unknown_activity() -> None:
    predicted = jobs(5, promise=1, busy=0.4)
    assert len(placed("ullage", predicted, [slot(activity=Activity())], Rules())) == 3, "0.4, 0.8, then 1.2"


@pytest.mark.parametrize("policy", ["lug", "mug", "ullage", "least-utilized"])
def test_a_known_activity_is_preferred_to_an_unknown_one(policy: str) -> None:
    slots = [slot(0, activity=Activity()), slot(1, used=5, foreign=5, activity=Activity(smact=0.5))]
    assert placed(policy, [Job(1, "ada", 0.0, promise=GIB, true=GIB)], slots, Rules()) == [("GPU-1",)]


def test_old_reading_is_unknown_and_gpu_activity_replaces_sms() -> None:
    def opened(activity: Activity) -> bool:
        return bool(placed("magm", jobs(1, promise=1), [slot(used=5, foreign=5, activity=activity)], Rules()))

    assert opened(Activity(smact=0.1, age=29.0)) and not opened(Activity(smact=0.1, age=31.0))
    assert opened(Activity(gract=0.5)) and not opened(Activity(gract=0.9))
    assert opened(Activity(gract=0.9, smact=0.2)), "where both are known the SMs count"


@pytest.mark.parametrize("policy", ["ullage", "magm", "lug", "mug", "round-robin", "best-fit"])
def test_a_job_of_unknown_need_is_placed_by_the_sites_rule(policy: str) -> None:
    waiting = jobs(2, promise=None)
    alone = decide(policy, waiting, [], [slot()], Ledger(), Rules(unknown="exclusive"), now=10.0)
    assert [(each.job, each.exclusive) for each in alone.placed] == [(0, True)]
    floor = decide(policy, waiting, [], [slot()], Ledger(), Rules(unknown="floor", free_floor=5 * GIB), now=10.0)
    assert [(each.promise, each.exclusive) for each in floor.placed] == [(5 * GIB, False)] * 2


def test_the_floor_looks_at_free_memory_and_is_promised_once() -> None:
    rules = Rules(unknown="floor", free_floor=5 * GIB, smact_limit=None)
    assert placed("magm", jobs(1, promise=None), [slot(used=36, foreign=36)], rules) == []
    assert placed("magm", jobs(3, promise=None), [slot(used=29, foreign=29)], rules) == [("GPU-0",)] * 2


def test_without_a_floor_only_jobs_of_unknown_need_overbook() -> None:
    rules = Rules(unknown="floor", free_floor=None, smact_limit=None, margin=0)
    full = [slot(used=40, foreign=40)]
    assert len(placed("magm", jobs(9, promise=None), full, rules)) == 9
    assert placed("magm", jobs(9, promise=1), full, rules) == []


def test_measured_memory_of_unknown_jobs_is_not_free() -> None:
    slots, ledger = [slot()], Ledger()
    rules = Rules(unknown="floor", free_floor=5 * GIB, smact_limit=None, margin=0)
    ledger.adopt(100, {"GPU-0": 5 * GIB})
    ledger.observe(100, "GPU-0", 30 * GIB)
    assert decide("magm", jobs(1, promise=11), [], slots, ledger, rules, now=10.0).placed == ()
    assert decide("magm", jobs(1, promise=10), [], slots, ledger, rules, now=10.0).placed != ()
