"""A daemon that hangs or dies: systemd is told while steps succeed, and a job that kills the daemon is put on hold."""

import configparser
import os
import signal
import socket
import threading

import pytest
from tests.paths import ROOT

from ullage.manager.core.watchdog import MOST_CRASHES


class Systemd:
    """The other end of $NOTIFY_SOCKET."""

    def __init__(self, file):
        self.heard = []
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(str(file))
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self):
        while words := self._socket.recv(1000):
            self.heard.append(words.decode())


@pytest.fixture
def systemd(monkeypatch, tmp_path):
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
    return Systemd(tmp_path / "notify")


def test_systemd_hears_ready_and_alive_until_the_steps_fail(systemd, make_here):
    here = make_here()
    here.until(lambda: systemd.heard.count("WATCHDOG=1") >= 2, "signs of life")
    assert systemd.heard[0] == "READY=1" and "NOTIFY_SOCKET" not in os.environ
    follow, failed = here.daemon.attempts.follow, threading.Semaphore(0)

    def fail():
        failed.release()
        raise RuntimeError("a mistake of ours")

    here.daemon.attempts.follow = fail
    for _ in range(2):  # the second failing step begins after the last good one is over
        assert failed.acquire(timeout=60)
    before = len(systemd.heard)
    for _ in range(2):
        assert failed.acquire(timeout=60)
    assert len(systemd.heard) == before, "who does not succeed is silent"
    here.daemon.attempts.follow = follow
    here.until(lambda: len(systemd.heard) > before, "signs of life again")
    here.close()
    assert systemd.heard[-1] == "STOPPING=1"


@pytest.mark.parametrize("unit", sorted((ROOT / "examples/systemd").glob("*.service")), ids=lambda unit: unit.name)
def test_the_units_ask_for_these_signs(unit):
    parser = configparser.ConfigParser(interpolation=None)
    parser.read(unit)
    service = parser["Service"]
    assert service["Type"] == "notify" and service["WatchdogSec"] and service["Restart"] == "always"


def crash(home, times):
    for _ in range(times):
        home.start(crash_at="order-written", wait=False)
        assert home.process.wait(60) == -signal.SIGKILL


def submit_killer(home):
    """A job whose start ends the daemon."""
    home.start(crash_at="order-written")
    number = home.submit(proceed="proceed")
    assert home.process.wait(60) == -signal.SIGKILL
    return number


def test_a_job_whose_start_ends_the_daemon_three_times_is_held(home):
    number = submit_killer(home)
    crash(home, MOST_CRASHES - 1)
    home.start()
    job = home.job(number)
    assert job["state"] == "held" and f"the daemon ended {MOST_CRASHES} times" in job["reason"], job
    assert home.wait(home.script("true"))["state"] == "done", "others go on"
    home.client.call("release", jobs=[number])
    home.go()
    assert home.wait(number)["state"] == "done"
    assert home.log() == [f"start {number} {MOST_CRASHES + 1}", f"end {number} {MOST_CRASHES + 1}"]


def test_a_job_that_starts_at_last_begins_anew(home):
    number = submit_killer(home)
    crash(home, MOST_CRASHES - 2)
    home.start()
    home.wait(number, "running")
    home.kill()
    home.start()
    home.go()
    assert home.wait(number)["state"] == "done"
    told = [event["text"] for event in home.client.call("events")["events"] if event["kind"] == "daemon ended"]
    assert len(told) == MOST_CRASHES - 1
