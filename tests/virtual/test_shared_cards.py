"""The files of virtual cards: what is taken never exceeds the card, whoever dies at whatever moment."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule, run_state_machine_as_test

from ullage.errors import InvalidValue
from ullage.sandbox.process_identity import Process, is_alive, start_of, this_process
from ullage.virtual.shared_card.cards import STARTUP, Cards, environment

GIB = 1 << 30


@pytest.fixture
def cards(tmp_path):
    return Cards.create(tmp_path / "cards", "2xT4")


def until(condition, what, seconds=60):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"never happened: {what}"


def a_living_process():
    return subprocess.Popen(["cat"], stdin=subprocess.PIPE)


class Takers(RuleBasedStateMachine):
    """Processes that live, take, give and are killed; a dictionary is what the file must say."""

    folder: Path
    processes = Bundle("processes")

    def __init__(self):
        super().__init__()
        Takers.count += 1
        self.card = Cards.create(self.folder / str(self.count), "T4").cards[0]
        self.held = {}

    count = 0

    @rule(target=processes)
    def starts(self):
        child = a_living_process()
        self.held[child.pid] = 0
        return child, Process(child.pid, start_of(child.pid))

    @rule(process=processes, size=st.integers(0, 12 * GIB))
    def takes(self, process, size):
        fits = sum(self.held.values()) + size <= self.card.total
        assert self.card.take(size, process[1]) is fits
        if fits:
            self.held[process[0].pid] += size

    @rule(process=processes, share=st.floats(0, 1))
    def gives(self, process, share):
        size = int(self.held[process[0].pid] * share)
        self.card.give(size, process[1])
        self.held[process[0].pid] -= size

    @rule(process=processes)
    def gives_more_than_it_has(self, process):
        with pytest.raises(InvalidValue, match="at most"):
            self.card.give(self.held[process[0].pid] + 1, process[1])

    @rule(process=consumes(processes), waited_for=st.booleans())
    def is_killed(self, process, waited_for):
        process[0].kill()
        if waited_for:
            process[0].wait()
        else:
            until(lambda: not is_alive(process[1]), "the end of a killed process")
        del self.held[process[0].pid]

    @rule()
    def is_opened_anew(self):
        self.card = Cards.open(self.card.path.parent).cards[0]

    @invariant()
    def the_file_says_what_is_held(self):
        assert self.card.processes() == {pid: size for pid, size in self.held.items() if size}
        assert self.card.used() <= self.card.total

    def teardown(self):
        for pid in self.held:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def test_any_order_of_takes_gives_and_deaths(tmp_path):
    Takers.folder = tmp_path
    run_state_machine_as_test(Takers, settings=settings(max_examples=25, stateful_step_count=25, deadline=None))


TAKER = """
import random, sys
from ullage.virtual.shared_card.cards import Cards
card = Cards.open(sys.argv[1]).cards[0]
random.seed(int(sys.argv[2]))
held, refused = 0, 0
for _ in range(300):
    if held and random.random() < 0.5:
        card.give(held); held = 0
    size = random.randrange(card.total // 2)
    if card.take(size): held += size
    else: refused += 1
    assert sum(card.processes().values()) <= card.total
    assert card.processes().get(__import__("os").getpid(), 0) == held
print(refused)
"""


def test_several_processes_never_take_more_than_there_is(cards):
    takers = [
        subprocess.Popen([sys.executable, "-c", TAKER, cards.folder, str(seed)], stdout=subprocess.PIPE, text=True)
        for seed in range(4)
    ]
    refused = [int(taker.communicate()[0]) for taker in takers]
    assert all(taker.returncode == 0 for taker in takers)
    assert sum(refused) > 0  # they were in each other's way
    assert cards.cards[0].processes() == {}


def test_a_kill_at_any_moment_leaves_a_readable_file(cards):
    card = cards.cards[0]
    assert card.take(GIB)
    for seed in range(40):
        pid = os.fork()
        if pid == 0:
            while True:
                card.take(GIB)
                card.give(GIB)
        wait = random.Random(seed).uniform(0.0005, 0.01)
        until(lambda pid=pid: pid in card.processes(), "the child's first take")
        end = time.monotonic() + wait
        while time.monotonic() < end:
            pass
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        assert Cards.open(cards.folder).cards[0].processes() == {os.getpid(): GIB}
        assert card.free() == card.total - GIB
    card.give(GIB)


def test_a_reused_pid_does_not_inherit(cards):
    card = cards.cards[0]
    assert card.take(GIB, this_process()._replace(start=1))  # as a process of that pid before this one
    assert card.processes() == {}
    assert card.take(card.total)


@pytest.mark.slow
def test_a_fork_while_another_thread_uses_a_card(cards):
    import threading

    card, over = cards.cards[0], threading.Event()

    def use():
        while not over.is_set():
            card.take(1)
            card.give(1)

    thread = threading.Thread(target=use)
    thread.start()
    try:
        for _ in range(30):
            pid = os.fork()
            if pid == 0:
                os._exit(0 if card.take(5) and card.processes()[os.getpid()] == 5 else 1)
            assert os.waitpid(pid, 0)[1] == 0
    finally:
        over.set()
        thread.join()


def test_the_same_cards_are_kept_and_others_refused(cards):
    again = Cards.create(cards.folder, "2xT4")
    assert [card.uuid for card in again.cards] == [card.uuid for card in cards.cards]
    assert len({card.uuid for card in cards.cards}) == 2
    assert [card.uuid for card in Cards.create(cards.folder, "2xT4,H200").cards][:2] == [c.uuid for c in again.cards]
    with pytest.raises(InvalidValue, match="already has other virtual cards"):
        Cards.create(cards.folder, "2xH200")


def test_cuda_visible_devices_selects_cards(cards):
    first, second = cards.cards
    assert cards.visible(None) == [first, second]
    assert cards.visible(f"{second.uuid},{first.uuid}") == [second, first]
    assert cards.visible(second.uuid[:12]) == [second]
    assert cards.visible("1,0") == [second, first]
    assert cards.visible("1,GPU-nothing,0") == [second]
    for nothing in ("", "-1", "NoDevFiles", "GPU-", "2", "²"):
        assert cards.visible(nothing) == []


def test_messages_for_what_is_no_card(tmp_path, cards):
    with pytest.raises(InvalidValue, match="it has none"):
        Cards.open(tmp_path)
    path = cards.cards[0].path
    whole = path.read_bytes()
    path.write_bytes(b"nothing")
    with pytest.raises(InvalidValue, match="is not the file of a virtual card, or is damaged"):
        Cards.open(cards.folder)
    path.write_bytes(whole[:256] + b"x" * 64)
    with pytest.raises(InvalidValue, match="line 2 of the virtual card .* is damaged"):
        cards.cards[0].take(1)
    path.unlink()
    with pytest.raises(InvalidValue, match="cannot be opened: No such file"):
        cards.cards[0].processes()
    with pytest.raises(InvalidValue, match="has no card with the UUID"):
        cards.card("GPU-0")
    assert cards.card(cards.cards[1].uuid) is cards.cards[1]


def test_the_environment_of_a_job():
    base = {"PYTHONPATH": os.pathsep.join(["/mine", str(STARTUP)])}
    made = environment("/cards", ["GPU-1", "GPU-2"], base)
    assert made == {
        "ULLAGE_CARDS": "/cards",
        "CUDA_VISIBLE_DEVICES": "GPU-1,GPU-2",
        "PYTHONPATH": os.pathsep.join([str(STARTUP), "/mine"]),
    }
    assert (STARTUP / "sitecustomize.py").is_file()


def test_watching_cards_needs_no_pytorch():
    code = "import sys, ullage.virtual.shared_card.cards; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
