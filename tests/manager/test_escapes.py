"""Never two live processes of one job: what detached itself in every way ends before the next attempt begins."""

import json
import os
import signal
import sys

import psutil
import pytest

from ullage.manager.running.cgroups import Cgroups

# Leaves a process with another parent, session and name, no open file and no environment, and stays. The next attempt
# writes down whether that one still lives.
ESCAPE = """
import os, sys, time
if os.path.exists("left"):
    try:
        state = open("/proc/" + open("left").read() + "/stat").read().rpartition(")")[2].split()[0]
    except OSError:
        state = "Z"
    open("second", "w").write("gone" if state == "Z" else "alive")
    sys.exit(0)
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        open("left.new", "w").write(str(os.getpid()))
        os.rename("left.new", "left")
        os.closerange(0, 4096)
        os.execve("/bin/sleep", ["sleep", "1000"], {})
    os._exit(0)
os.wait()
time.sleep(1000)
"""


def start_escaping(home):
    number = home.submit([sys.executable, "-c", ESCAPE], env={"PATH": os.environ["PATH"]})
    home.wait(number, "running")
    home.until((home.work / "left").exists, "the process that detaches itself")
    left = psutil.Process(int((home.work / "left").read_text()))
    home.until(lambda: left.name() == "sleep", "it to be another program")
    started = json.loads((home.folder / "manager/jobs" / str(number) / "1/started.json").read_text())
    return number, started


def kill(*pids):
    for pid in pids:
        os.kill(pid, signal.SIGKILL)


def assert_gone_before_the_second_attempt(home, number):
    job = home.wait(number)
    assert [attempt["cause"] for attempt in job["attempts"]] == ["watching process lost", "finished"]
    assert (home.work / "second").read_text() == "gone"


@pytest.mark.parametrize("daemon", ["up", "down"])
def test_without_cgroups_what_detached_itself_ends_with_its_supervisor(home, daemon):
    home.settings += "cgroup = false\n"
    home.start()
    number, started = start_escaping(home)
    assert started["cgroup"] is None
    if daemon == "down":
        home.kill()
    kill(started["supervisor_pid"])
    if daemon == "down":
        home.start()
    assert_gone_before_the_second_attempt(home, number)


def test_with_a_cgroup_it_ends_even_if_all_who_watched_it_are_killed(served):
    if not Cgroups().usable:
        pytest.skip("this user may make no cgroup here")
    number, started = start_escaping(served)
    served.kill()
    kill(started["guardian_pid"], started["supervisor_pid"])
    served.start()
    assert_gone_before_the_second_attempt(served, number)
    assert not os.path.exists(started["cgroup"])


def test_the_guardian_may_be_killed_and_the_job_goes_on(served):
    number = served.submit(proceed="proceed")
    served.wait(number, "running")
    kill(json.loads((served.folder / f"manager/jobs/{number}/1/started.json").read_text())["guardian_pid"])
    served.go()
    job = served.wait(number)
    assert [attempt["cause"] for attempt in job["attempts"]] == ["finished"]
