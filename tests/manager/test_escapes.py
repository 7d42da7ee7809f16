"""Never two live processes of one job: what detached itself in every way ends before the next attempt begins."""

import json
import os
import pwd
import signal
import subprocess
import sys

import psutil
import pytest
from tests.manager.conftest import SOURCE

from ullage.manager.running.cgroups import Cgroups, own_root
from ullage.manager.running.process_tree import remove_cgroup

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
def test_without_cgroups_detached_processes_end_with_supervisor(home, daemon):
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


def test_a_cgroup_ends_even_if_all_its_watchers_are_killed(served):
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


TAKE = """
import os, pathlib, sys, time
from ullage.virtual.shared_card.cards import Cards
assert Cards.open(os.environ["ULLAGE_CARDS"]).card(os.environ["CUDA_VISIBLE_DEVICES"]).take(3 << 30)
while not os.path.exists("proceed"):
    time.sleep(0.02)
"""


def test_memory_of_an_unmarked_process_counts_for_its_job(served):
    if not Cgroups().usable:
        pytest.skip("this user may make no cgroup here")
    (served.work / "take.py").write_text(TAKE)
    few = " ".join(f"{name}=${name}" for name in ("ULLAGE_CARDS", "CUDA_VISIBLE_DEVICES", "PYTHONPATH"))
    number = served.script(f"exec env -i {few} {sys.executable} take.py", env=served.environment())
    served.until(lambda: served.job(number)["used"] == 3 << 30, "its memory to be seen as its own")
    assert not any(gpu["foreign"] for gpu in served.client.call("gpus"))
    served.go()
    assert served.wait(number)["state"] == "done"


AS_NOBODY = """
import os, pwd, signal, subprocess, sys, time
sys.path.insert(0, sys.argv[1])
from ullage.manager.running.process_tree import cgroup_members, kill_cgroup
from ullage.manager.running.cgroups import Cgroups
user = pwd.getpwnam("nobody")
os.setgroups([]); os.setgid(user.pw_gid); os.setuid(user.pw_uid)
groups = Cgroups()
if not groups.usable:
    sys.exit(groups.why)
folder = groups.make("token")
child = subprocess.Popen(["sleep", "1000"])
open(folder + "/cgroup.procs", "w").write(str(child.pid))
assert cgroup_members(folder) == [child.pid] and kill_cgroup(folder) == 1
assert child.wait(60) == -signal.SIGKILL
os.rmdir(folder)
"""


def as_nobody_in(group):
    """Run the test above as an ordinary user whose process is in that group."""

    def join():
        (group / "cgroup.procs").write_text(str(os.getpid()))

    command = [sys.executable, "-c", AS_NOBODY, str(SOURCE)]
    return subprocess.run(command, preexec_fn=join, capture_output=True, text=True, timeout=60, cwd="/")


def test_an_ordinary_user_has_groups_only_below_a_delegated_one(tmp_path):
    if os.geteuid() != 0:
        pytest.skip("needs root, to delegate a cgroup")
    if not Cgroups().usable:
        pytest.skip("this user may make no cgroup here")
    nobody, own = pwd.getpwnam("nobody"), own_root() / f"ullage-test-{os.getpid()}"
    own.mkdir()
    try:
        assert "ullage-jobs cannot be used: Permission denied" in as_nobody_in(own).stderr
        for name in ("", "cgroup.procs", "cgroup.subtree_control", "cgroup.threads"):
            os.chown(own / name, nobody.pw_uid, nobody.pw_gid)
        done = as_nobody_in(own)
        assert done.returncode == 0, done.stderr
    finally:
        remove_cgroup(str(own))
