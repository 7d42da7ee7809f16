"""What holds for every policy, on any cluster, with any queue."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections import Counter
from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from ullage.manager.placement import (
    Activity,
    Booking,
    HostShare,
    Job,
    Ledger,
    PassOutcome,
    Rules,
    Running,
    Slot,
    Speeds,
    decide,
    policies,
)
from ullage.manager.placement.custom_policies import GpuView, custom_policy
from ullage.manager.placement.policies import Policy

ORACLES = {"first-fit", "best-fit", "worst-fit", "least-utilized"}
fraction = st.none() | st.floats(0, 1)
activities = st.builds(Activity, gract=fraction, smact=fraction, age=st.none() | st.floats(0, 60))


FIRST, SECOND = Booking(1, 1200.0, 2000.0, "is reserved"), Booking(2, 900.0, 1500.0, "is reserved")
bookings = st.sampled_from([(), (), (), (FIRST,), (SECOND, Booking(3, 1600.0, 1700.0, "is reserved"))])


@st.composite
def clusters(draw: st.DrawFn) -> list[Slot]:
    slots = []
    for index in range(draw(st.integers(1, 4))):
        total = draw(st.integers(1, 100))
        foreign = draw(st.sampled_from([0, 0, 0, 10, 120]))
        used = draw(st.none() | st.integers(foreign, 150))
        flags = draw(st.sampled_from([{}, {}, {}, {"mig": True}, {"drained": True}, {"lost": True}]))
        flags = {**flags, "foreign": foreign, "bookings": draw(bookings)}
        slots.append(Slot(f"s{index}", index, "toy", total, used, draw(activities), **flags))
    return slots


def jobs(first: int, most: int) -> st.SearchStrategy[list[Job]]:
    fields = st.fixed_dictionaries(
        {
            "user": st.sampled_from("ab"),
            "submitted": st.floats(0, 1000),
            "gpus": st.sampled_from([1, 1, 1, 2, 3, 0]),
            "promise": st.none() | st.integers(0, 110),
            "true": st.none() | st.integers(0, 110),
            "exclusive": st.sampled_from([False, False, True]),
            "priority": st.integers(0, 1),
            "recovery": st.booleans(),
            "busy": fraction,
            "work": st.sampled_from([None, "a", "b", "c"]),
            "min_speed": st.sampled_from([None, 0.0, 0.5, 0.8, 1.0]),
            "time_limit": st.none() | st.floats(1, 1000),
            "bookings": st.sampled_from([frozenset(), frozenset(), frozenset({1}), frozenset({2, 3})]),
            "host": st.sampled_from([HostShare(), HostShare(), HostShare(2, 0), HostShare(0, 30), HostShare(9, 70)]),
        }
    )
    return st.lists(fields, max_size=most).map(
        lambda found: [Job(first + number, **each) for number, each in enumerate(found)]
    )


def predicted(works: Sequence[str], slot: Slot) -> Speeds | None:
    """Works share by time; b waits for its host most of the time. What s3 is, nobody knows."""
    weights = {"a": 1.0, "b": 0.2, "c": 0.6}
    asked = sum(weights[work] for work in works)
    return None if slot.id == "s3" else Speeds([min(1.0, 1.0 / (asked + 1 - weights[work])) for work in works], "why")


rules = st.builds(
    Rules,
    smact_limit=st.sampled_from([None, 0.8]),
    free_floor=st.sampled_from([None, 5]),
    margin=st.sampled_from([0, 2]),
    unknown=st.sampled_from(["exclusive", "floor"]),
    max_jobs_per_gpu=st.sampled_from([None, 2]),
    unmeasured=st.sampled_from(["alone", "never"]),
    idle_memory=st.sampled_from([0, 5]),
    predict=st.sampled_from([None, predicted]),
    backfill=st.sampled_from([None, True]),
    patience=st.sampled_from([0.0, 500.0, math.inf]),
)


def _whimsical(job: Job, gpus: Sequence[GpuView], now: float) -> Sequence[GpuView]:
    """A policy of one's own that tries the last ones first and lets every fifth job wait."""
    return gpus[::-1] if job.id % 5 else ()


OWN = custom_policy("whimsical.py:choose", _whimsical)
Scene = tuple[str | Policy, list[Job], list[Running], list[Slot], Ledger, Rules]


@st.composite
def scenes(draw: st.DrawFn) -> Scene:
    """A cluster on which an earlier pass has put jobs, some of which were then seen to use memory."""
    slots, chosen, site = draw(clusters()), draw(st.sampled_from(policies())), draw(rules)
    host = draw(st.sampled_from([None, HostShare(4, 50), HostShare(10, 100)]))
    ledger, running = Ledger(slots, host), []
    first = {job.id: job for job in draw(jobs(100, 5))}
    for decision in decide(chosen, list(first.values()), [], slots, ledger, site, now=500.0).placed:
        ledger.accept(decision)
        running.append(Running(first[decision.job], decision.slots, since=500.0))
    for each in running:
        for slot in each.slots:
            ledger.observe(each.job.id, slot, draw(st.none() | st.integers(0, 120)))
    if host is not None and draw(st.booleans()):
        ledger.host = HostShare(4, 50)  # a setting was lowered: more may be held than there is
    return chosen, draw(jobs(1, 10)), running, slots, ledger, site


def decided(scene: Scene) -> PassOutcome:
    return decide(*scene, now=1000.0)


def every_decision_can_be_promised_and_every_job_is_answered_once(scene: Scene) -> None:
    """The ledger is the judge: it refuses what would overbook, share what is exclusive or a MIG instance, or use a
    slot that is drained or lost. Nothing is refused."""
    chosen, waiting, _, slots, ledger, site = scene
    before = copy.deepcopy(ledger.__dict__)
    outcome = decided(scene)
    assert ledger.__dict__ == before, "decide changed the ledger"
    for decision in outcome.placed:
        ledger.accept(decision)
    answered = [each.job for each in outcome.placed] + [each.job for each in outcome.waiting]
    assert Counter(answered) == Counter(job.id for job in waiting)
    assert all(each.reason for each in outcome.waiting)


def jobs_get_what_they_asked_for(scene: Scene) -> None:
    chosen, waiting, _, slots, ledger, site = scene
    by_id, by_slot = {job.id: job for job in waiting}, {slot.id: slot for slot in slots}
    outcome = decided(scene)
    for decision in outcome.placed:
        job = by_id[decision.job]
        promise = job.true if chosen in ORACLES else job.promise
        assert len(decision.slots) == len(set(decision.slots)) == job.gpus
        assert decision.host == job.host
        if job.gpus == 0:
            continue
        assert decision.promise >= (promise or 0)
        assert decision.exclusive or not (job.exclusive or chosen == "exclusive")
        assert promise is not None or decision.exclusive or site.unknown == "floor"
        for slot in (by_slot[name] for name in decision.slots):
            assert not slot.drained and not slot.lost
            for each in slot.bookings:
                over = job.time_limit is not None and 1000.0 + job.time_limit <= each.begin
                assert each.id in job.bookings or over or each.end <= 1000.0
            assert not (slot.used is None and site.unmeasured == "never")
            if chosen in ORACLES and job.true is not None:
                assert job.true <= max(slot.total - max(slot.foreign, 0), 0)
    for name, slot in by_slot.items():
        here = [each for each in outcome.placed if name in each.slots]
        together = len(here) + len(ledger.holders(name))
        assert not (here and slot.used is None) or together == 1, "a slot that nobody measures is not shared"
        assert not here or site.max_jobs_per_gpu is None or together <= site.max_jobs_per_gpu


def the_same_question_has_the_same_answer_and_the_order_of_the_arguments_does_not_matter(scene: Scene) -> None:
    chosen, waiting, running, slots, ledger, site = scene
    turned = (chosen, waiting[::-1], running[::-1], slots[::-1], ledger, site)
    assert decided(scene).placed == decided(scene).placed == decided(turned).placed


def a_second_pass_places_nobody_who_was_told_to_wait(scene: Scene) -> None:
    """Nothing has changed but that the placed jobs are there, and their users had their turns: the answers hold.
    (Without reservations: a job that reserves and the jobs placed after it may make others' room.)"""
    chosen, waiting, running, slots, ledger, site = scene
    site = dataclasses.replace(site, patience=math.inf)
    outcome = decide(chosen, waiting, running, slots, ledger, site, now=1000.0)
    by_id, usage = {job.id: job for job in waiting}, Counter[str]()
    for decision in outcome.placed:
        job = by_id[decision.job]
        ledger.accept(decision)
        running = [*running, Running(job, decision.slots, since=1000.0)]
        usage[job.user] += site.turn * (job.gpus or 1)
    left = [by_id[each.job] for each in outcome.waiting]
    assert decide(chosen, left, running, slots, ledger, site, now=1000.0, usage=usage).placed == ()


def nobody_is_slowed_below_what_his_owner_accepts(scene: Scene) -> None:
    """Nobody new, and nobody who was there: not beside those whose work is known, where that can be predicted."""
    chosen, waiting, running, slots, ledger, site = scene
    outcome = decided(scene)
    jobs = {job.id: job for job in waiting} | {each.job.id: each.job for each in running}
    for slot in slots:
        new = [each.job for each in outcome.placed if slot.id in each.slots]
        known = [jobs[each] for each in (*ledger.holders(slot.id), *new) if jobs[each].work is not None]
        speeds = predicted([job.work for job in known], slot)
        added = any(jobs[each].work is not None for each in new)
        if chosen == "ullage" and site.predict is not None and added and len(known) > 1 and speeds is not None:
            assert all(share >= (job.min_speed or 0.0) - 0.005 for share, job in zip(speeds.shares, known, strict=True))


RULES = [
    nobody_is_slowed_below_what_his_owner_accepts,
    every_decision_can_be_promised_and_every_job_is_answered_once,
    jobs_get_what_they_asked_for,
    the_same_question_has_the_same_answer_and_the_order_of_the_arguments_does_not_matter,
    a_second_pass_places_nobody_who_was_told_to_wait,
]


@settings(max_examples=5 * settings.default.max_examples, deadline=None)
@given(scenes())
def test_every_rule_holds_in_any_scene(scene) -> None:
    """A scene takes longer to draw than to judge: each is judged by all rules."""
    for rule in RULES:
        rule(copy.deepcopy(scene))
