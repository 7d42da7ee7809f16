"""Children forked from this process: pauses, output, pipes, death with the parent."""

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ullage_lab.forking import ForkedHere


def finished(child):
    """Read to the child's end."""
    while not child.is_silent:
        child.read()
    return child.close()


def test_a_child_is_a_process_of_its_own_and_leads_its_group():
    outcome = finished(ForkedHere(lambda pause: {"pid": os.getpid(), "group": os.getpgid(0)}))
    assert outcome.answer["pid"] == outcome.answer["group"] != os.getpid()


def test_a_child_waits_where_it_pauses(tmp_path):
    def work(pause):
        pause("ready")
        (tmp_path / "went on").touch()
        pause("paused")
        return {"done": True}

    child = ForkedHere(work)
    child.read()
    assert child.at == "ready" and not select.select([child], [], [], 0.2)[0] and not any(tmp_path.iterdir())
    child.go_on()
    child.read()
    assert child.at == "paused" and any(tmp_path.iterdir()) and not child.has_answered
    child.go_on()
    assert finished(child).answer == {"done": True}


def test_a_child_that_stays_ends_when_it_may():
    child = ForkedHere(lambda pause: {"done": True}, stay=True)
    child.read()
    assert child.has_answered and not select.select([child], [], [], 0.2)[0] and not child.has_ended()
    child.go_on()
    assert finished(child).answer == {"done": True}


def test_a_childs_output_goes_to_its_log(tmp_path, capfd):
    def work(pause):
        print("by Python")
        os.system("echo by another program")
        return {}

    finished(ForkedHere(work, log=tmp_path / "log"))
    finished(ForkedHere(work))
    assert (tmp_path / "log").read_text() == "by Python\nby another program\n"
    assert capfd.readouterr() == ("", "")


def fails(pause):
    raise ValueError("bad sizes\nand more")


def is_killed(pause):
    os.kill(os.getpid(), signal.SIGKILL)
    return {}


def leaves(pause):
    os._exit(3)


@pytest.mark.parametrize(
    ("work", "failure", "reason"),
    [
        (fails, "ValueError: bad sizes", "error"),
        (is_killed, "was ended by SIGKILL (was memory short?)", "died"),
        (leaves, "ended without an answer, with exit code 3", "died"),
    ],
)
def test_a_childs_failure_is_reported(work, failure, reason):
    outcome = finished(ForkedHere(work))
    assert (outcome.failure, outcome.reason) == (failure, reason)


def starts_another(file):
    def work(pause):
        other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        file.with_suffix(".new").write_text(f"{os.getpid()} {other.pid}")
        file.with_suffix(".new").replace(file)
        time.sleep(600)
        return {}

    return work


def test_closing_ends_a_child_with_what_it_has_started(tmp_path, gone, until):
    pids = tmp_path / "pids"
    child = ForkedHere(starts_another(pids))
    until(pids.exists, "the child has begun")
    assert child.close().reason == "died"
    gone(pids)


def test_a_child_does_not_hold_the_pipes_of_its_siblings():
    """A sibling that pauses learns that the parent is gone by the end of its pipe."""
    first = ForkedHere(lambda pause: pause("ready") or {})
    first.read()
    pipes = [os.fstat(descriptor).st_ino for descriptor in (first.fileno(), first._leave)]
    held = finished(ForkedHere(lambda pause: {"inodes": inodes_of_open_files()}))
    first.close()
    assert not set(pipes) & set(held.answer["inodes"])


def inodes_of_open_files():
    found = []
    for number in range(256):
        with contextlib.suppress(OSError):  # a thread of the child opens files now and then
            found.append(os.fstat(number).st_ino)
    return found


PARENT = """
import sys
sys.path.insert(0, {here!r})
from pathlib import Path
from test_forked_here import ForkedHere, starts_another
import time
child = ForkedHere(starts_another(Path({pids!r})))
if {still}:
    while not Path({pids!r}).exists():
        time.sleep(0.01)
    child.set_suspended()
    Path({pids!r} + ".still").touch()
child.read()
"""


@pytest.mark.parametrize("still", [False, True])
def test_a_child_and_its_processes_end_with_a_killed_parent(still, tmp_path, gone, until):
    pids = tmp_path / "pids"
    begun = tmp_path / "pids.still" if still else pids
    code = PARENT.format(here=str(Path(__file__).parent), pids=str(pids), still=still)
    parent = subprocess.Popen([sys.executable, "-c", code])
    until(lambda: begun.exists() or parent.poll() is not None, "the child has begun")
    parent.kill()
    parent.wait()
    gone(pids)


def test_a_paused_child_ends_with_its_parent(tmp_path, until):
    reading, writing = os.pipe()
    parent = os.fork()
    if parent == 0:
        try:
            os.close(reading)
            work = lambda pause: pause("ready") or (tmp_path / "went on").touch() or {}  # noqa: E731
            child = ForkedHere(work)
            child.read()
        finally:
            os._exit(0)
    os.close(writing)
    os.waitpid(parent, 0)
    assert os.read(reading, 1) == b"", "the child is gone when nobody holds the pipe"
    os.close(reading)
    assert not any(tmp_path.iterdir())
