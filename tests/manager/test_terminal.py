"""Interactive jobs: a shell on a promised part of a GPU, which its user can leave and come back to."""

import fcntl
import json
import os
import pty
import pwd
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time

import psutil
import pytest
from tests.manager.test_users import as_user, shared  # noqa: F401

from ullage.manager import transport
from ullage.manager.client import Client


class Person:
    """Somebody at a terminal of their own who types `ullage WORDS`."""

    def __init__(self, home, *words):
        self.master, slave = pty.openpty()
        self.resize(33, 111)
        self.seen = ""
        self.process = subprocess.Popen(
            [sys.executable, "-m", "ullage", *words],
            env=home.environment() | {"SHELL": "/bin/sh", "PS1": "$ "},
            cwd=home.work,
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
            preexec_fn=self._sit_down,
        )
        os.close(slave)

    @staticmethod
    def _sit_down():
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # tests that run in the background of a shell ignore it

    def resize(self, rows, columns):
        fcntl.ioctl(self.master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def types(self, text):
        """Like a terminal's window, which shows what is printed while a long text is pasted."""
        os.set_blocking(self.master, False)
        left, deadline = text.encode(), time.monotonic() + 60
        while left:
            assert time.monotonic() < deadline, (len(left), self.seen)
            readable, writable, _ = select.select([self.master], [self.master], [], 1.0)
            if readable:
                self.seen += os.read(self.master, 65536).decode(errors="replace")
            if writable:
                left = left[os.write(self.master, left) :]

    def sees(self, pattern):
        deadline = time.monotonic() + 60
        while not re.search(pattern, self.seen):
            assert time.monotonic() < deadline, (pattern, self.seen)
            if select.select([self.master], [], [], 1.0)[0]:
                try:
                    self.seen += os.read(self.master, 65536).decode(errors="replace")
                except OSError:
                    assert re.search(pattern, self.seen), (pattern, self.seen)
        found = re.search(pattern, self.seen)
        self.seen = self.seen[found.end() :]
        return found

    def leaves_with(self):
        while select.select([self.master], [], [], 60.0)[0]:
            try:
                self.seen += os.read(self.master, 65536).decode(errors="replace")
            except OSError:
                break
        os.close(self.master)
        return self.process.wait(60)


def test_a_shell_has_its_promise_a_terminal_and_an_exit_code(common):
    person = Person(common, "submit", "-i", "--memory", "8GiB", "--name", "by hand")
    person.sees("connected to job")
    person.types("echo promised $ULLAGE_PROMISED_BYTES; tty; stty size\n")
    person.sees(rf"promised {8 << 30}\s+/dev/pts/\d+\s+33 111")
    person.resize(20, 60)
    person.types("sleep 0.5; stty size\n")
    person.sees("20 60")
    person.types("sleep 1000; echo not reached\n")
    person.sees("not reached")  # what was typed comes back
    number = common.client.queue()[-1]["id"]
    common.until(lambda: "sleep" in str(_names(common, number)), "the command")
    person.types("\x03")
    person.types("exit 7\n")
    assert person.leaves_with() == 7
    job = common.wait(number)
    assert (job["name"], job["state"], job["exit_code"], len(job["attempts"])) == ("by hand", "failed", 7, 1)
    assert "33 111" in common.client.logs(number)


def _names(home, number):
    started = json.loads((home.folder / "manager/jobs" / str(number) / "1/started.json").read_text())
    return [child.name() for child in psutil.Process(started["job_pid"]).children()]


def test_one_can_leave_and_come_back(common):
    person = Person(common, "submit", "--interactive", "--memory", "1GiB", "--", "/bin/sh")
    person.sees("connected to job (\\d+)")
    person.types("here=before; echo said $here\n")
    person.sees("said before")
    person.types("\x1d")
    number = person.sees("left job (\\d+) running")[1]
    assert person.leaves_with() == 0 and common.job(int(number))["state"] == "running"
    person = Person(common, "attach", number)
    person.sees("said before")  # the last of what was printed
    person.types("echo again $here; exit\n")
    person.sees("again before")
    assert person.leaves_with() == 0 and common.wait(int(number))["state"] == "done"
    assert "is done" in common.nursery.run(["attach", number], common.environment(), str(common.work), "").stderr


def test_a_client_has_a_connection_after_ctrl_c_at_any_moment(common, monkeypatch):
    client = Client(common.folder)
    for where in ("send", "getresponse"):
        with monkeypatch.context() as patch:
            whole = getattr(transport._UnixConnection, where)

            def interrupted(connection, *args, whole=whole):
                if whole.__name__ == "send":
                    whole(connection, *args)
                raise KeyboardInterrupt

            patch.setattr(transport._UnixConnection, where, interrupted)
            with pytest.raises(KeyboardInterrupt):
                client.call("hold", jobs=[1])  # head and body are written one after the other
        assert client.ping()["protocol"] == transport.PROTOCOL


def test_a_waiting_user_sees_the_reason_and_can_stop(home):
    home.options = ["--virtual", "1xA100-40GB", "--estimator", "none"]
    home.start()
    blocker = home.submit(proceed="proceed", exclusive=True)
    home.wait(blocker, "running")
    person = Person(home, "submit", "-i", "--memory", "8GiB")
    person.sees("job 2 is queued: .*belongs to one job alone")
    person.types("\x03")
    assert person.leaves_with() == 130 and home.wait(2)["state"] == "cancelled"
    patient = Person(home, "submit", "-i", "--memory", "8GiB")
    patient.sees("job 3 is queued")
    home.go()
    patient.sees("connected to job 3")
    patient.types("echo $((6 * 7))\n")
    patient.sees("42")  # it is ready: until then SIGTERM would end it
    home.client.cancel(3)
    assert patient.leaves_with() == 128 + 1, "a shell that is used by hand ends by SIGHUP"
    assert home.wait(3)["state"] == "cancelled"


def test_a_shell_outlives_the_daemon_and_takes_a_long_paste(served):
    person = Person(served, "submit", "-i", "--memory", "1GiB")
    person.sees("connected to job")
    served.kill()
    person.types("stty -echo -icanon; wc -l <<END\n")
    person.types("a line that is pasted\n" * 3000 + "END\n")
    person.sees("3000")
    person.types("exit\n")
    assert person.leaves_with() == 0
    served.start()
    assert served.wait(1)["state"] == "done"


def test_commands_can_come_from_a_file(common):
    said = common.cli("submit", "-i", "--memory", "1GiB", text="echo promised $ULLAGE_PROMISED_BYTES\n")
    assert f"promised {1 << 30}" in said


def test_jobs_that_cannot_be_interactive_are_refused(common):
    assert "cannot have array too" in common.cli("submit", "-i", "--array", "1-2", "--", "sh", code=2)
    number = common.submit(proceed="proceed")
    assert f"job {number} has no terminal" in common.cli("attach", str(number), code=2)
    common.go()


def test_only_its_user_attaches_to_a_terminal(shared):  # noqa: F811
    mine = shared.submit(["cat"], interactive=True)
    shared.wait(mine, "running")
    assert "which is root's" in as_user(shared, "attach", job=mine)["refused"]
    socket_file = shared.folder / "manager/jobs" / str(mine) / "1/terminal"
    assert socket_file.stat().st_mode & 0o777 == 0o600 and socket_file.stat().st_uid == 0
    job = {"command": ["cat"], "cwd": str(shared.work), "memory": 1 << 30, "interactive": True}
    theirs = as_user(shared, "submit", job=job, key="nobodys terminal")["ok"]["jobs"][0]
    shared.wait(theirs, "running")
    found = as_user(shared, "attach", job=theirs)["ok"]["socket"]
    assert os.stat(found).st_uid == pwd.getpwnam("nobody").pw_uid and os.stat(found).st_mode & 0o777 == 0o600
    shared.client.cancel(mine, theirs)
    assert {shared.wait(number)["state"] for number in (mine, theirs)} == {"cancelled"}
