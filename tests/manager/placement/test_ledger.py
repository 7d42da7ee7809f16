"""The promise ledger: by example, and against a model through random histories."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from ullage.errors import Overbooked
from ullage.manager.placement import HostShare, Ledger, Slot

SLOTS = ("a", "b", "c")


def slot(name: str = "a", total: int = 100, used: int | None = 0, foreign: int = 0, **more: bool) -> Slot:
    return Slot(name, "abc".index(name), "small", total, used, foreign=foreign, **more)


def test_a_promise_that_is_not_yet_taken_counts_as_taken() -> None:
    ledger = Ledger([slot()])
    ledger.promise(1, {"a": 60})
    assert ledger.free("a") == 40
    ledger.observe(1, "a", 10)
    assert ledger.free("a") == 40
    with pytest.raises(Overbooked, match="job 2 needs 41 B on a; 40 B of 100 B are left"):
        ledger.promise(2, {"a": 41})


def test_memory_beyond_a_promise_still_counts_after_its_release() -> None:
    ledger = Ledger([slot()])
    ledger.promise(1, {"a": 60})
    ledger.observe(1, "a", 75)
    assert ledger.free("a") == 25
    ledger.observe(1, "a", 50)
    assert ledger.free("a") == 25


def test_foreign_and_unattributed_memory_count_once() -> None:
    ledger = Ledger([slot(used=30, foreign=30)])
    assert ledger.free("a") == 70
    ledger.see([slot(used=50, foreign=30)])
    assert (ledger.free("a"), ledger.others("a")) == (50, 50), "20 bytes are used by nobody that is known"


def test_used_memory_of_an_unseen_job_counts_once() -> None:
    ledger = Ledger([slot()])
    ledger.promise(1, {"a": 60})
    ledger.see([slot(used=55)])
    assert ledger.free("a") == 40, "the 55 bytes may all be the job's own"
    ledger.see([slot(used=65)])
    assert ledger.free("a") == 35, "5 of them cannot be within its promise"
    ledger.observe(1, "a", 5)
    assert ledger.free("a") == 0, "60 belong to others, 60 are promised"


def test_memory_used_before_a_job_came_is_not_its_own() -> None:
    ledger = Ledger([slot(used=20)])
    ledger.promise(1, {"a": 15})
    assert ledger.free("a") == 65
    ledger.see([slot(used=20)])
    assert ledger.free("a") == 65, "it has not begun"
    ledger.see([slot(used=35)])
    assert ledger.free("a") == 65, "it has"
    ledger.see([slot(used=15)])
    assert ledger.free("a") == 70, "the 15 may be anybody's, so they count as others'"


@settings(max_examples=300, deadline=None)
@given(
    invisible=st.integers(0, 60),
    steps=st.lists(
        st.tuples(
            st.integers(0, 3), st.sampled_from(["promise", "take", "observe", "release", "shrink"]), st.integers(0, 60)
        ),
        max_size=25,
    ),
)
def test_an_invisible_process_keeps_its_memory_unpromised(invisible: int, steps: list[tuple[int, str, int]]) -> None:
    """The truth is played beside it: jobs take up to their promise, a process that nobody can attribute shrinks."""
    ledger, promised, taken = Ledger([slot(used=invisible)]), dict[int, int](), dict[int, int]()
    for job, what, amount in steps:
        if what == "promise" and job not in promised:
            try:
                ledger.promise(job, {"a": amount})
            except Overbooked:
                continue
            promised[job], taken[job] = amount, 0
            assert invisible + sum(promised.values()) <= 100, "a promise took what was not there"
        elif what == "take" and job in promised:
            taken[job] = min(promised[job], amount)
        elif what == "observe" and job in promised:
            ledger.observe(job, "a", taken[job])
        elif what == "release" and ledger.release(job):
            del promised[job], taken[job]
        elif what == "shrink":
            invisible = min(invisible, amount)
        ledger.see([slot(used=invisible + sum(taken.values()))])
        for other in promised:  # the monitor sees those that it could see before
            if ledger.seen(other, "a"):
                ledger.observe(other, "a", taken[other])


def test_unknown_used_memory_keeps_the_ledger_and_foreign_use() -> None:
    ledger = Ledger([slot(used=None, foreign=10)])
    ledger.promise(1, {"a": 60})
    assert ledger.free("a") == 30


def test_a_job_gets_all_its_slots_or_none() -> None:
    ledger = Ledger([slot("a"), slot("b", total=10)])
    with pytest.raises(Overbooked):
        ledger.promise(1, {"a": 50, "b": 50})
    assert (ledger.free("a"), ledger.free("b"), ledger.jobs()) == (100, 10, set())


@pytest.mark.parametrize(
    ("first", "second", "more"), [(True, False, {}), (False, True, {}), (True, True, {}), (False, False, {"mig": True})]
)
def test_exclusive_jobs_and_mig_instances_are_not_shared(first: bool, second: bool, more: dict[str, bool]) -> None:
    ledger = Ledger([slot(**more)])
    ledger.promise(1, {"a": 10}, exclusive=first)
    assert ledger.exclusive("a") == (1 if first else None)
    with pytest.raises(Overbooked, match="job 2 cannot join"):
        ledger.promise(2, {"a": 10}, exclusive=second)
    ledger.release(1)
    ledger.promise(2, {"a": 10}, exclusive=second)


@pytest.mark.parametrize("state", ["drained", "lost"])
def test_drained_lost_and_unheard_of_slots_promise_nothing(state: str) -> None:
    ledger = Ledger([slot(**{state: True})])
    with pytest.raises(Overbooked, match=state):
        ledger.promise(1, {"a": 1})
    with pytest.raises(Overbooked, match="not there"):
        ledger.promise(1, {"b": 1})


def test_release_twice_and_observing_a_job_that_left_do_nothing() -> None:
    ledger = Ledger([slot()])
    ledger.promise(1, {"a": 60})
    assert (ledger.release(1), ledger.release(1)) == (True, False)
    ledger.observe(1, "a", 99)
    assert ledger.free("a") == 100


def test_a_job_cannot_be_promised_the_same_slot_twice() -> None:
    ledger = Ledger([slot()])
    ledger.promise(1, {"a": 10})
    with pytest.raises(Overbooked, match="already holds"):
        ledger.promise(1, {"a": 10})


def test_an_adopted_job_is_entered_even_without_room() -> None:
    ledger = Ledger([slot()])
    ledger.promise(1, {"a": 90})
    ledger.adopt(2, {"a": 50})
    assert (ledger.free("a"), ledger.committed("a"), ledger.slots(2)) == (0, 140, {"a": 50})


def test_a_revised_promise_lets_others_in_or_keeps_them_out() -> None:
    ledger = Ledger([slot()])
    ledger.promise(1, {"a": 100}, exclusive=True)
    ledger.observe(1, "a", 30)
    ledger.revise(1, {"a": 20}, exclusive=False)
    assert ledger.free("a") == 70, "what it uses counts, not the smaller promise"
    ledger.promise(2, {"a": 60})
    ledger.revise(2, {"a": 90}, exclusive=False)
    assert (ledger.free("a"), ledger.committed("a")) == (0, 120)


def test_a_copy_goes_its_own_way() -> None:
    ledger = Ledger([slot()])
    ledger.promise(1, {"a": 10})
    other = ledger.copy()
    other.observe(1, "a", 80)
    other.promise(2, {"a": 10})
    assert (ledger.free("a"), ledger.jobs(), other.free("a")) == (90, {1}, 10)


class LedgerMachine(RuleBasedStateMachine):
    """Promises, releases, observations and foreign processes in any order; a plain model says what may happen."""

    @initialize(totals=st.lists(st.integers(0, 100), min_size=3, max_size=3), mig=st.booleans())
    def start(self, totals: list[int], mig: bool) -> None:
        self.measured = {name: slot(name, total) for name, total in zip(SLOTS, totals, strict=True)}
        if mig:
            self.measured["c"] = slot("c", totals[2], mig=True)
        self.ledger = Ledger(self.measured.values(), HostShare(8, 64))
        self.on_host: dict[int, HostShare] = {}
        self.held: dict[str, dict[int, list[int]]] = {name: {} for name in SLOTS}  # job: [promised, most seen]
        self.alone: dict[str, int] = {}

    def model_committed(self, name: str) -> int:
        return self.measured[name].foreign + sum(max(both) for both in self.held[name].values())

    @rule(
        job=st.integers(0, 5),
        where=st.sets(st.sampled_from(SLOTS)),
        memory=st.integers(0, 120),
        exclusive=st.booleans(),
        share=st.builds(HostShare, st.integers(0, 9), st.integers(0, 70)),
    )
    def promise(self, job: int, where: set[str], memory: int, exclusive: bool, share: HostShare) -> None:
        cores, on_host = (sum(each) for each in zip((0, 0), *self.on_host.values(), strict=True))
        possible = job not in self.on_host
        possible &= share.cores <= max(8 - cores, 0) and share.memory <= max(64 - on_host, 0)
        possible &= all(
            memory <= max(self.measured[name].total - self.model_committed(name), 0)
            and job not in self.held[name]
            and name not in self.alone
            and not (self.held[name] and (exclusive or self.measured[name].mig))
            for name in where
        )
        try:
            self.ledger.promise(job, dict.fromkeys(where, memory), exclusive, share)
        except Overbooked:
            assert not possible
            return
        assert possible
        if share != HostShare() or not where:
            self.on_host[job] = share
        for name in where:
            self.held[name][job] = [memory, 0]
            if exclusive:
                self.alone[name] = job
            overbooked = memory > 0 and self.model_committed(name) > self.measured[name].total
            assert not overbooked, "a promise took what was not there"

    @rule(job=st.integers(0, 5))
    def release(self, job: int) -> None:
        held = any(job in jobs for jobs in self.held.values()) or job in self.on_host
        assert self.ledger.release(job) == held
        self.on_host.pop(job, None)
        for name in SLOTS:
            self.held[name].pop(job, None)
        self.alone = {name: holder for name, holder in self.alone.items() if holder != job}

    @rule(job=st.integers(0, 5), name=st.sampled_from(SLOTS), taken=st.integers(0, 150))
    def observe(self, job: int, name: str, taken: int) -> None:
        self.ledger.observe(job, name, taken)
        if job in self.held[name]:
            self.held[name][job][1] = max(self.held[name][job][1], taken)

    @rule(name=st.sampled_from(SLOTS), foreign=st.integers(0, 120))
    def foreign(self, name: str, foreign: int) -> None:
        before = self.measured[name]
        self.measured[name] = Slot(name, before.index, "small", before.total, None, mig=before.mig, foreign=foreign)
        self.ledger.see([self.measured[name]])

    @invariant()
    def agrees(self) -> None:
        assert self.ledger.on_host() == self.on_host
        assert self.ledger.jobs() == {job for jobs in (*self.held.values(), self.on_host) for job in jobs}
        assert sum(share.cores for share in self.on_host.values()) <= 8
        assert sum(share.memory for share in self.on_host.values()) <= 64
        for name in SLOTS:
            assert self.ledger.committed(name) == self.model_committed(name)
            assert self.ledger.free(name) == max(self.measured[name].total - self.model_committed(name), 0)
            assert set(self.ledger.holders(name)) == set(self.held[name])
            assert self.ledger.exclusive(name) == self.alone.get(name)
            assert name not in self.alone or len(self.held[name]) == 1


LedgerMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=25, deadline=None)
TestLedgerMachine = LedgerMachine.TestCase
