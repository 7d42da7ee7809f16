"""Each policy's order, the conditions on a slot, and the table of names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import pytest

from ullage.errors import InvalidValue, UnknownName
from ullage.manager.placement import Activity, Job, Ledger, PassOutcome, Rules, Running, Slot, Speeds, decide, policies
from ullage.manager.placement.policies import policy

GIB = 1 << 30
# Four GPUs that differ: (used, SM activity). 0 is nearly full and lightly used, 3 is idle.
FOUR = [(30, 0.10), (10, 0.70), (20, 0.40), (0, 0.00)]


def gpus(measured: list[tuple[int | None, float | None]], total: int = 40, **more: object) -> list[Slot]:
    return [
        replace(
            Slot(f"GPU-{index}", index, "A100-40GB", total * GIB, None if used is None else used * GIB),
            activity=Activity(smact=smact, age=1.0),
            foreign=(used or 0) * GIB,
            **more,  # type: ignore[arg-type]
        )
        for index, (used, smact) in enumerate(measured)
    ]


def job(number: int, promise: int | None = None, **more: object) -> Job:
    known = None if promise is None else promise * GIB
    return Job(number, "ada", float(number), promise=known, true=known, **more)  # type: ignore[arg-type]


def chosen(policy: str, slots: list[Slot], jobs: list[Job], rules: Rules | None = None) -> list[tuple[str, ...]]:
    rules = rules or Rules(margin=2 * GIB, fresh_busy=0.0)
    return [each.slots for each in decide(policy, jobs, [], slots, Ledger(), rules, now=100.0).placed]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("exclusive", "GPU-3"),  # the only idle one
        ("round-robin", "GPU-0"),
        ("magm", "GPU-3"),
        ("lug", "GPU-3"),
        ("mug", "GPU-1"),
        ("first-fit", "GPU-0"),
        ("best-fit", "GPU-0"),
        ("worst-fit", "GPU-3"),
        ("least-utilized", "GPU-3"),
        ("ullage", "GPU-3"),
    ],
)
def test_where_a_small_job_goes(name: str, expected: str) -> None:
    assert chosen(name, gpus(FOUR), [job(1, promise=4)]) == [(expected,)]


@pytest.mark.parametrize(
    ("name", "expected"),
    [(name, "GPU-1") for name in ("magm", "mug", "first-fit", "worst-fit")]
    + [(name, "GPU-2") for name in ("lug", "best-fit", "least-utilized", "ullage")],
)
def test_where_a_job_goes_that_does_not_fit_on_the_first(name: str, expected: str) -> None:
    """15 GiB and a margin of 2 do not fit into the 10 GiB of GPU 0; GPU 3 is out of the game."""
    assert chosen(name, gpus(FOUR[:3]), [job(1, promise=15)]) == [(expected,)]


def test_ullage_prefers_the_tightest_of_equally_busy_gpus() -> None:
    large, small = gpus([(0, 0.0)], total=80)[0], Slot("small", 1, "A100-40GB", 40 * GIB, 0, Activity(smact=0.0))
    assert chosen("ullage", [large, small], [job(1, promise=10)]) == [("small",)]


def test_round_robin_continues_from_the_last_promised_slot() -> None:
    slots, ledger = gpus([(0, 0.0)] * 3), Ledger()
    rules = Rules(fresh_busy=0.0)
    where = []
    for number in range(5):
        (decision,) = decide("round-robin", [job(number, promise=1)], [], slots, ledger, rules, now=10.0).placed
        ledger.see(slots)
        ledger.accept(decision)
        where += decision.slots
    assert where == ["GPU-0", "GPU-1", "GPU-2", "GPU-0", "GPU-1"]
    places = chosen("round-robin", slots, [job(number, promise=1) for number in range(4)])
    assert places == [(f"GPU-{number}",) for number in (0, 1, 2, 0)]


def test_exclusive_gives_each_job_a_gpu_and_the_next_one_waits() -> None:
    jobs = [job(1, promise=4), job(2, promise=4), job(3, promise=4)]
    outcome = decide("exclusive", jobs, [], gpus([(0, 0.0), (0, 0.0)]), Ledger(), Rules(), now=10.0)
    assert [(each.slots, each.exclusive) for each in outcome.placed] == [(("GPU-0",), True), (("GPU-1",), True)]
    assert outcome.placed[0].promise == 40 * GIB, "the whole GPU is its"
    assert [each.job for each in outcome.waiting] == [3]


def test_the_activity_limit_closes_a_gpu_and_can_be_changed() -> None:
    busy = gpus([(10, 0.81)])
    assert chosen("magm", busy, [job(1, promise=4)]) == []
    assert chosen("magm", busy, [job(1, promise=4)], Rules(smact_limit=0.85)) == [("GPU-0",)]
    assert chosen("magm", busy, [job(1, promise=4)], Rules(smact_limit=None)) == [("GPU-0",)]
    assert chosen("magm", gpus([(10, 0.80)]), [job(1, promise=4)]) == [("GPU-0",)]


def test_the_margin_stays_free_on_shared_gpus_only() -> None:
    assert chosen("magm", gpus([(20, 0.1)]), [job(1, promise=19)], Rules(margin=2 * GIB)) == []
    assert chosen("magm", gpus([(20, 0.1)]), [job(1, promise=18)], Rules(margin=2 * GIB)) == [("GPU-0",)]
    assert chosen("magm", gpus([(0, 0.0)]), [job(1, promise=40)], Rules(margin=2 * GIB)) == [("GPU-0",)]


def test_jobs_per_gpu_can_be_limited() -> None:
    jobs = [job(number, promise=1) for number in range(4)]
    assert len(chosen("magm", gpus([(0, 0.0)]), jobs, Rules(max_jobs_per_gpu=2))) == 2


def test_jobs_that_the_window_has_not_seen_count_as_busy() -> None:
    jobs = [job(number, promise=1) for number in range(6)]
    assert len(chosen("magm", gpus([(0, 0.0)]), jobs, Rules(fresh_busy=0.3))) == 3, "0.0, 0.3, 0.6, then 0.9"
    predicted = [job(number, promise=1, busy=0.5) for number in range(6)]
    assert len(chosen("magm", gpus([(0, 0.0)]), predicted, Rules(fresh_busy=0.3))) == 2, "0.0, 0.5, then 1.0"
    seen = [Running(job(9, promise=1), ("GPU-0",), since=0.0)]
    ledger = Ledger()
    ledger.adopt(9, {"GPU-0": GIB})
    slots = gpus([(0, 0.5)])
    fresh = decide("magm", jobs, seen, slots, ledger, Rules(fresh_busy=0.4, window=90.0), now=0.0)
    settled = decide("magm", jobs, seen, slots, ledger, Rules(fresh_busy=0.4, window=90.0), now=90.0)
    assert (len(fresh.placed), len(settled.placed)) == (0, 1)


def test_an_idle_gpu_is_not_kept_empty_by_a_finished_job() -> None:
    """The window's mean still shows it, but nobody is there."""
    slot = Slot("GPU-0", 0, "A100-40GB", 40 * GIB, 0, Activity(smact=0.95, age=1.0))
    assert chosen("ullage", [slot], [job(1, promise=4)]) == [("GPU-0",)]
    assert chosen("exclusive", [slot], [job(1, promise=4)]) == [("GPU-0",)]


SPEEDS = {"heavy": 0.55, "middling": 0.8, "light": 0.95}  # of both, of a heavy work beside another one


def beside(works: Sequence[str], slot: Slot) -> Speeds:
    """The slowest work slows all."""
    return Speeds([min(SPEEDS[work] for work in works)] * len(works), "both keep the memory bandwidth busy")


def test_a_partner_below_an_owners_speed_is_refused_in_words() -> None:
    rules, slots = Rules(smact_limit=None, predict=beside), gpus([(0, 0.0)])
    asks = partial(job, 1, promise=2, work="light")

    def outcome(new: Job, there: Job, policy: str = "ullage") -> PassOutcome:
        return decide(policy, [new], [Running(there, ("GPU-0",), 0.0)], slots, Ledger(), rules, 5.0)

    heavy = job(12, promise=8, work="heavy", min_speed=0.5)
    assert outcome(asks(min_speed=0.5), heavy).placed
    assert outcome(asks(min_speed=0.55), heavy).placed, "as much as it asks for is enough"
    assert outcome(asks(min_speed=0.8), heavy, "lug").placed, "only ullage heeds it"
    assert outcome(asks(min_speed=0.8), heavy).waiting[0].reason == (
        "needs 2.00 GiB on a GPU; on GPU 0 it would run at 55% of its speed next to job 12 "
        "(both keep the memory bandwidth busy); its --min-speed is 80%"
    )
    strict = replace(heavy, min_speed=0.9)
    assert outcome(asks(min_speed=0.5), strict).waiting[0].reason == (
        "needs 2.00 GiB on a GPU; on GPU 0 job 12 would run at 55% of its speed next to it "
        "(both keep the memory bandwidth busy); its --min-speed is 90%"
    )
    assert outcome(asks(min_speed=0.8, work=None), strict).placed, "of an unknown work nothing is foretold"
    assert outcome(asks(min_speed=0.8), replace(strict, work=None)).placed


TOGETHER = {
    ("short", "long"): (0.36, 0.82),
    ("same", "same"): (0.55, 0.55),
    ("long", "long"): (0.9, 0.2),
    ("short", "short", "short"): (0.4, 0.4, 0.4),
}


def uneven(works: Sequence[str], slot: Slot) -> Speeds:
    """Many short kernels suffer beside long ones; those who are not listed keep two thirds of their speeds."""
    order = sorted(works, reverse=True)
    shares = dict(zip(order, TOGETHER.get(tuple(order), (0.66,) * len(works)), strict=True))
    return Speeds([shares[work] if len(works) > 1 else 1.0 for work in works], "they take turns")


BUSY = Slot("GPU-0", 0, "A100-40GB", 40 * GIB, GIB, Activity(smact=0.95, age=1.0))


@pytest.mark.parametrize(
    ("there", "new", "on_busy", "on_idle"),
    [
        ([("long", None)], ("short", None), True, True),  # 36% and 82%: 18% more than one after the other
        ([("short", None)], ("long", None), True, True),
        ([("long", None)], ("short", 0.5), False, False),  # its owner wants half
        ([("short", 0.5)], ("long", None), False, False),
        ([("long", 0.8)], ("short", 0.3), True, True),  # both owners accept it
        ([("same", None)], ("same", None), False, True),  # 55% each: only 10% more
        ([("same", 0.5)], ("same", 0.5), False, True),
        ([("long", None)], ("long", None), False, True),  # 110%, and one at a fifth
        ([("short", None), ("short", None)], ("short", None), False, True),  # 120% where it was 132%
        ([("same", None), (None, None)], ("same", None), False, True),  # nothing is known of one that is there
    ],
)
def test_a_prediction_bars_an_idle_gpu_only_for_an_owners_speed(
    there: Sequence[tuple[str | None, float | None]], new: tuple[str, float | None], on_busy: bool, on_idle: bool
) -> None:
    here = [job(7 + each, promise=1, work=work, min_speed=least) for each, (work, least) in enumerate(there)]
    asked = job(1, promise=2, work=new[0], min_speed=new[1])
    running = [Running(each, ("GPU-0",), 0.0) for each in here]
    rules = Rules(predict=uneven)

    def starts(slot: Slot, policy: str) -> bool:
        ledger = Ledger()
        for each in here:
            ledger.adopt(each.id, {"GPU-0": GIB})
        return bool(decide(policy, [asked], running, [slot], ledger, rules, 500.0).placed)

    idle = replace(BUSY, activity=Activity(smact=0.1, age=1.0))
    assert (starts(BUSY, "ullage"), starts(idle, "ullage")) == (on_busy, on_idle)
    assert (starts(BUSY, "lug"), starts(idle, "lug")) == (False, True), "only ullage heeds predictions"


def test_too_small_a_gain_admits_no_job_to_a_busy_gpu() -> None:
    ledger, same = Ledger(), partial(job, promise=2, work="same", min_speed=None)
    ledger.adopt(12, {"GPU-0": GIB})
    for gain, starts in ((0.15, False), (0.1, True)):
        rules, there = Rules(predict=uneven, gain=gain), [Running(same(12), ("GPU-0",), 0.0)]
        outcome = decide("ullage", [same(1)], there, [BUSY], ledger, rules, 500.0)
        assert bool(outcome.placed) == starts
    rules, idle = Rules(smact_limit=None, predict=uneven), gpus([(0, 0.0), (0, 0.0)])
    free = decide("ullage", [same(1)], there, idle, Ledger(), rules, 5.0)
    assert free.placed[0].slots == ("GPU-1",), "on an idle one it costs nobody anything"


def test_no_prediction_leaves_a_neighbour_less_than_a_quarter() -> None:
    def starved(works: Sequence[str], slot: Slot) -> Speeds:
        return Speeds([0.24 if work == "weak" else 1.0 for work in works])

    rules, strong = Rules(predict=starved), job(1, promise=2, work="strong", min_speed=None)
    for least, starts in ((None, False), (0.2, True)):
        ledger, there = Ledger(), [Running(job(7, promise=1, work="weak", min_speed=least), ("GPU-0",), 0.0)]
        ledger.adopt(7, {"GPU-0": GIB})
        assert bool(decide("ullage", [strong], there, [BUSY], ledger, rules, 500.0).placed) == starts


def test_ullage_averages_seconds_and_others_their_window() -> None:
    here = job(9, promise=1)
    ledger = Ledger()
    ledger.adopt(9, {"GPU-0": GIB})
    resting = replace(BUSY, busy_now=0.0)
    working = replace(BUSY, activity=Activity(smact=0.1, age=1.0), busy_now=0.95)

    def placed(policy: str, slot: Slot) -> list[int]:
        running = [Running(here, ("GPU-0",), 0.0)]
        return [
            each.job for each in decide(policy, [job(1, promise=2)], running, [slot], ledger, Rules(), 500.0).placed
        ]

    assert (placed("ullage", resting), placed("magm", resting)) == ([1], [])
    assert placed("magm", working) == placed("ullage", working) == [1], "it starts no fewer than magm"
    assert placed("ullage", replace(BUSY, busy_now=0.95)) == []


def test_a_busy_gpu_takes_a_job_early_if_others_soon_end() -> None:
    """Minute-long jobs are about to end, hour-long ones are not; a published policy does not ask."""
    ledger, working = Ledger(), replace(BUSY, activity=Activity(smact=0.95, age=1.0), busy_now=0.95)
    for number in (7, 8):
        ledger.adopt(number, {"GPU-0": GIB})

    def starts(policy: str, age: float) -> bool:
        there = [Running(job(number, promise=1, busy=0.5), ("GPU-0",), 0.0) for number in (7, 8)]
        return bool(decide(policy, [job(1, promise=2)], there, [working], ledger, Rules(), age).placed)

    assert [starts("ullage", age) for age in (5.0, 20.0, 3600.0)] == [False, True, False]
    assert not starts("magm", 20.0)


def test_an_idle_gpu_reopens_when_the_expected_load_has_decayed() -> None:
    last = job(9, promise=1, busy=0.9)
    ledger, rules, resting = Ledger(), Rules(busy_window=10.0), replace(BUSY, busy_now=0.0)
    ledger.adopt(9, {"GPU-0": GIB})
    started = [
        bool(
            decide(
                "ullage", [job(1, promise=2)], [Running(last, ("GPU-0",), 0.0)], [resting], ledger, rules, now
            ).placed
        )
        for now in (0.0, 1.0, 2.0, 9.0)
    ]
    assert started == [False, False, True, True]


def test_the_gpu_with_the_least_loss_of_speed_is_chosen() -> None:
    rules, slots = Rules(smact_limit=None, predict=beside), gpus([(0, 0.0), (0, 0.0), (0, 0.0)])
    works = ["heavy", None, "middling"]
    there = [job(7 + each, promise=1 + each, work=work, min_speed=0.5) for each, work in enumerate(works)]
    running = [Running(each, (f"GPU-{number}",), 0.0) for number, each in enumerate(there)]

    def goes_to(here: Sequence[Running]) -> list[tuple[str, ...]]:
        new = job(1, promise=2, work="light", min_speed=0.5)
        return [each.slots for each in decide("ullage", [new], here, slots, Ledger(), rules, 5.0).placed]

    assert goes_to(running) == [("GPU-2",)], "what is not known counts as the worst that is accepted"
    assert goes_to(running[:2]) == [("GPU-2",)], "on an idle one nothing is lost"
    spoilt = Running(job(40, promise=1, work="heavy"), ("GPU-2",), 0.0)
    assert goes_to([*running, spoilt]) == [("GPU-2",)], "those there are slow already; it takes nothing more from them"


def test_predicted_speeds_decide_instead_of_activity() -> None:
    busy = Slot("GPU-0", 0, "A100-40GB", 40 * GIB, GIB, Activity(smact=0.95, age=1.0))
    known, rules = job(9, promise=1, work="light", min_speed=0.8), Rules(predict=beside)

    def outcome(new: Job, there: Job = known, slot: Slot = busy, policy: str = "ullage") -> PassOutcome:
        ledger = Ledger()
        ledger.adopt(9, {"GPU-0": GIB})
        return decide(policy, [new], [Running(there, ("GPU-0",), 0.0)], [slot], ledger, rules, 500.0)

    light = job(1, promise=2, work="light", min_speed=0.8)
    assert outcome(light).placed and outcome(replace(light, work="middling")).placed
    over = "free but has an SM activity of 95%, over the limit of 80%; GPU 0 will have room when job 9 ends"
    for refused in (
        outcome(replace(light, work=None)),
        outcome(light, there=replace(known, work=None)),
        outcome(light, policy="lug"),
    ):
        assert not refused.placed and refused.waiting[0].reason.endswith(over)
    strangers = replace(busy, used=5 * GIB, foreign=4 * GIB)
    assert "over the limit" in outcome(light, slot=strangers).waiting[0].reason, "nobody knows what they do"
    heavy = outcome(replace(light, work="heavy"))
    assert "would run at 55% of its speed next to" in heavy.waiting[0].reason


def test_oracles_use_true_memory_and_others_the_promise() -> None:
    lying = Job(1, "ada", 0.0, promise=39 * GIB, true=5 * GIB)
    assert chosen("worst-fit", gpus([(20, 0.1)]), [lying]) == [("GPU-0",)]
    assert chosen("magm", gpus([(20, 0.1)]), [lying]) == []


def test_an_unknown_policy_is_answered_with_all_of_them() -> None:
    with pytest.raises(UnknownName, match="did you mean 'magm'") as error:
        decide("magn", [], [], [], Ledger(), Rules(), now=0.0)
    assert all(name in str(error.value) for name in policies())
    published, oracles = {"exclusive", "round-robin", "magm", "lug", "mug"}, {"first-fit", "best-fit", "worst-fit"}
    assert set(policies()) == published | oracles | {"least-utilized", "ullage"}


def test_a_name_cannot_be_registered_twice() -> None:
    with pytest.raises(ValueError, match="'magm' is already registered"):
        policy("magm", "another one")(lambda place, last: ())


@pytest.mark.parametrize(
    "wrong",
    [
        {"unknown": "guess"},
        {"unmeasured": "yes"},
        {"margin": -1},
        {"smact_limit": float("nan")},
        {"window": 0},
        {"max_jobs_per_gpu": 0},
    ],
)
def test_rules_that_make_no_sense_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(InvalidValue, match=f"{next(iter(wrong))} must be"):
        Rules(**wrong)  # type: ignore[arg-type]
