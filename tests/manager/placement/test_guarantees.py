"""What the policy `ullage` promises, over thousands of random states."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from typing import NamedTuple

import pytest

from ullage.manager.placement import Activity, Job, Ledger, PassOutcome, Rules, Running, Slot, Speeds, decide

GIB = 1 << 30
NOW = 1000.0
WEIGHTS = {"a": 1.0, "b": 0.2, "c": 0.6}  # the part of a GPU that each work asks for
STATES = 2000


def predicted(works: Sequence[str], slot: Slot) -> Speeds:
    asked = sum(WEIGHTS[work] for work in works)
    return Speeds([min(1.0, 1.0 / (asked + 1 - WEIGHTS[work])) for work in works], "they share its time")


class State(NamedTuple):
    """GPUs with jobs of some ages on them, measured and not, and a queue."""

    waiting: list[Job]
    running: list[Running]
    slots: list[Slot]
    ledger: Ledger
    rules: Rules

    def under(self, policy: str) -> PassOutcome:
        return decide(policy, self.waiting, self.running, self.slots, self.ledger, self.rules, NOW)


def state(seed: int, gpus: int, speeds: Sequence[float | None]) -> State:
    draw = random.Random(f"{gpus} {seed}")
    slots, running, ledger, numbers = [], [], Ledger(), itertools.count(1)

    def job(submitted: float) -> Job:
        size, work = draw.choice([1, 2, 5, 10, 20, 30, 40]), draw.choice([None, *WEIGHTS])
        ranks = draw.choice([1, 1, 1, 1, 2]) if gpus > 1 else 1
        promises = tuple(draw.randint(1, size) * GIB for _ in range(ranks)) if draw.random() < 0.3 else ()
        return Job(
            next(numbers),
            draw.choice("xy"),
            submitted,
            gpus=ranks,
            promise=max(promises, default=size * GIB) if draw.random() < 0.9 or promises else None,
            promises=promises,
            exclusive=draw.random() < 0.05,
            priority=draw.choice([0, 0, 0, 1]),
            recovery=draw.random() < 0.1,
            busy=draw.choice([None, 0.1, 0.5, 0.9]),
            work=work,
            min_speed=draw.choice(speeds),
            time_limit=draw.choice([None, None, 60.0]),
        )

    for index in range(gpus):
        name = f"GPU-{index}"
        slots.append(
            Slot(name, index, "toy", draw.choice([40, 80]) * GIB, 0, busy_now=draw.choice([None, 0.0, 0.5, 1.0]))
        )
        for _ in range(draw.randint(0, 3)):
            there, age = job(NOW - 500.0), draw.choice([1.0, 5.0, 30.0, 400.0])
            memory = there.promise or GIB
            if there.gpus == 1 and sum(ledger.counted(name).values()) + memory <= slots[-1].total:
                ledger.adopt(there.id, {name: memory}, exclusive=False)
                ledger.observe(there.id, name, draw.choice([None, memory // 2]))
                running.append(Running(there, (name,), NOW - age))
        activity = Activity(smact=draw.choice([None, 0.0, 0.4, 0.79, 0.95]), age=draw.choice([1.0, 60.0]))
        used = sum(ledger.counted(name).values()) if draw.random() < 0.9 else None
        slots[-1] = slots[-1].read_again(used, activity, slots[-1].busy_now)
    waiting = [job(NOW - draw.choice([1.0, 50.0, 250.0])) for _ in range(draw.randint(1, 8))]
    rules = Rules(
        predict=draw.choice([None, predicted]),
        margin=draw.choice([0, 2 * GIB]),
        max_jobs_per_gpu=draw.choice([None, None, 2]),
        smact_limit=draw.choice([0.8, 0.8, None]),
    )
    return State(waiting, running, slots, ledger, rules)


@pytest.mark.parametrize("gpus", [1, 4])
def test_ullage_never_starts_fewer_jobs_than_magm(gpus: int) -> None:
    """No owner asks for a speed and nobody has waited too long: these may keep a job away, as its reason says."""
    more = 0
    for seed in range(STATES):
        drawn = state(seed, gpus, speeds=[None, 0.0])
        ours, theirs = drawn.under("ullage").placed, drawn.under("magm").placed
        assert len(ours) >= len(theirs), f"state {seed}"
        more += len(ours) > len(theirs)
    assert more > STATES / 20, "states in which it matters"


@pytest.mark.parametrize("gpus", [1, 4])
def test_no_pass_breaks_a_requested_speed_or_promises_too_much(gpus: int) -> None:
    kept_away = 0
    for seed in range(STATES):
        drawn = state(seed, gpus, speeds=[None, 0.0, 0.5, 0.9])
        outcome = drawn.under("ullage")
        jobs = {job.id: job for job in drawn.waiting} | {each.job.id: each.job for each in drawn.running}
        for decision in outcome.placed:
            assert len(set(decision.slots)) == jobs[decision.job].gpus, "all of its ranks"
            drawn.ledger.see(drawn.slots)
            drawn.ledger.accept(decision)  # the ledger refuses to overbook
        new = {decision.job for decision in outcome.placed}
        for slot in drawn.slots if drawn.rules.predict else ():
            here = [jobs[number] for number in drawn.ledger.holders(slot.id) if jobs[number].work is not None]
            if len(here) > 1 and any(job.id in new for job in here):
                shares = predicted([str(job.work) for job in here], slot).shares
                asked = [(share, job.min_speed or 0.0) for share, job in zip(shares, here, strict=True)]
                assert all(round(share, 2) >= least for share, least in asked), f"state {seed}"
        kept_away += any("its --min-speed is" in each.reason for each in outcome.waiting)
    assert kept_away > STATES / 100, "states in which a speed keeps a job away"


@pytest.mark.parametrize("gpus", [1, 4])
def test_a_fitting_job_starts_on_an_idle_gpu_or_says_why_not(gpus: int) -> None:
    idle = 0
    for seed in range(STATES):
        drawn = state(seed, gpus, speeds=[None, 0.0, 0.9])
        held = {each.id for each in drawn.slots if each.busy_now == 0.0 and each.used is not None}
        young = {name for each in drawn.running if NOW - each.since < 10.0 for name in each.slots}
        limit = drawn.rules.max_jobs_per_gpu or 99
        open_to = [name for name in held - young if len(drawn.ledger.holders(name)) < limit]
        drawn.ledger.see(drawn.slots)
        room = max((drawn.ledger.free(name) - drawn.rules.margin for name in open_to), default=-1)
        alone = [job for job in drawn.waiting if job.gpus == 1 and not job.exclusive]
        fitting = [job for job in alone if job.promise is not None and job.promise <= room]
        outcome = drawn.under("ullage")
        if fitting and not outcome.placed:
            reasons = {each.job: each.reason for each in outcome.waiting}
            assert all("--min-speed" in reasons[job.id] for job in fitting), f"state {seed}: {reasons}"
        idle += bool(fitting)
    assert idle > STATES / 20, "states in which a GPU idles and a job fits"
