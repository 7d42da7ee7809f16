"""A board that is kept from pass to pass decides as a pass over a fresh snapshot does."""

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ullage.manager.placement import Activity, Board, Job, Ledger, Rules, Running, Slot, Speeds, decide, place
from ullage.manager.placement.policies import find_policy
from ullage.units import GIB

WORKS = {"light": 0.95, "heavy": 0.5}  # the speed that each leaves to others


def speeds(works: list[str], slot: Slot) -> Speeds:
    whole = 1.0
    for work in works:
        whole *= WORKS[work]
    return Speeds([whole / WORKS[work] for work in works])


class Machine:
    """Slots whose jobs come and go, seen by a board that is kept and by fresh snapshots."""

    def __init__(self, policy: str, rules: Rules, gpus: int) -> None:
        self.policy, self.rules = policy, rules
        self.slots = {f"GPU-{i}": Slot(f"GPU-{i}", i, "toy", 40 * GIB, 0, Activity(smact=0.0)) for i in range(gpus)}
        self.ledger = Ledger(self.slots.values())
        self.board = Board(find_policy(policy), rules, list(self.slots.values()), self.ledger, (), 0.0)
        self.running: dict[int, Running] = {}

    def changed(self, slot: str, now: float, drift: bool = False) -> None:
        here = {number: each for number, each in self.running.items() if slot in each.slots}
        used = sum(each.job.true or 0 for each in here.values())
        smact = min(1.0, sum(each.job.busy or 0.0 for each in here.values()))
        self.slots[slot] = replace(self.slots[slot], used=used, activity=Activity(smact=smact))
        for number, each in here.items():
            self.ledger.observe(number, slot, each.job.true)
        if drift:
            self.board.drift(slot, smact, 0.0, now)
        else:
            self.board.put(self.slots[slot], here, now)

    def end(self, number: int, now: float) -> None:
        gone = self.running.pop(number)
        self.ledger.release(number)
        for slot in gone.slots:
            self.changed(slot, now)

    def both(self, waiting: list[Job], now: float) -> tuple[list[object], list[object]]:
        for slot in {slot for each in self.running.values() for slot in each.slots}:
            self.changed(slot, now, drift=True)  # what was new in the last pass has been there for a window now
        fresh = decide(
            self.policy, waiting, list(self.running.values()), list(self.slots.values()), self.ledger, self.rules, now
        )
        kept = place(self.board, waiting, now)
        for decision in kept:
            job = next(job for job in waiting if job.id == decision.job)
            self.running[job.id] = Running(job, decision.slots, now)
        for slot in {slot for decision in kept for slot in decision.slots}:
            self.changed(slot, now)
        return list(fresh.placed), list(kept)


@pytest.mark.parametrize("policy", ["ullage", "magm", "lug", "exclusive", "round-robin", "best-fit"])
@given(seed=st.integers(0, 10**6))
@settings(max_examples=8, deadline=None)
def test_a_kept_board_decides_as_a_fresh_one(policy: str, seed: int) -> None:
    draw = random.Random(seed)
    rules = Rules(
        predict=speeds if draw.random() < 0.5 else None, reservations=0, fair=draw.random() < 0.5, window=1.0,
        pairing=draw.choice((0.0, 50.0)),
    )  # fmt: skip
    machine, waiting, now, number = Machine(policy, rules, draw.randint(1, 6)), [], 0.0, 0
    for _ in range(30):
        now += 10.0
        for _ in range(draw.randrange(4)):
            number += 1
            work = draw.choice([*WORKS, None])
            memory = draw.choice((1, 4, 10, 10, 25)) * GIB
            waiting.append(Job(
                number, f"user{draw.randrange(3)}", now, draw.choice((1, 1, 1, 2)),
                memory if draw.random() < 0.9 else None, memory, draw.random() < 0.1,
                busy=draw.choice((None, 0.2, 0.5)), work=work, min_speed=0.6 if work else 0.0,
            ))  # fmt: skip
        for gone in [each for each in machine.running if draw.random() < 0.2]:
            machine.end(gone, now)
        fresh, kept = machine.both(waiting, now)
        assert kept == fresh
        waiting = [job for job in waiting if job.id not in machine.running]


def test_a_job_that_waited_too_long_gets_its_place_on_a_kept_board() -> None:
    machine = Machine("ullage", Rules(patience=100.0, longest_patience=100.0, fair=False), gpus=1)
    small = [Job(number, "ada", float(number), promise=10 * GIB, true=10 * GIB, busy=0.1) for number in range(1, 4)]
    machine.both(small, 3.0)
    large = Job(10, "ada", 5.0, promise=38 * GIB, true=38 * GIB)
    more = [Job(number, "bob", float(number), promise=10 * GIB, true=10 * GIB, busy=0.1) for number in range(11, 40)]
    now = 200.0
    while 10 not in machine.running:
        machine.end(min(machine.running), now)
        machine.both([job for job in [large, *more] if job.id not in machine.running], now)
        now += 1.0
    assert set(machine.running) == {10}
