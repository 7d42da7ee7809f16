"""The ends of jobs are told: by a hook and by a job's own command; at least once, and to nobody else."""

import json
import os
import pwd
import subprocess
import tempfile
from pathlib import Path

import psutil
import pytest
from tests.paths import public_python

from ullage.errors import DiskFull


def served(home, *lines):
    home.settings += "[notify]\n" + "\n".join(lines) + "\n"
    home.start()
    return home


def events(home, kind):
    return [event["text"] for event in home.client.events() if event["kind"] == kind]


def keeper(folder):
    """A command that keeps what it is told, a line each."""
    return f"sh -c 'cat >> {folder}/told && echo >> {folder}/told'"


def told(folder):
    file = folder / "told"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def test_a_command_gets_the_end_of_a_job_and_nothing_else(home):
    served(home)
    job = home.script("exit 3", on_end=keeper(home.work), name="train", env={"TOKEN": "secret"})
    home.until(lambda: events(home, "notified"), "the delivery")
    [facts] = told(home.work)
    assert (facts["job"], facts["name"], facts["state"]) == (job, "train", "failed")
    assert (facts["exit_code"], facts["cause"]) == (3, "failed by itself")
    assert "secret" not in json.dumps(facts) and "command" not in facts
    assert events(home, "notified") == ["command: sh: exit code 0"]


def test_a_forbidden_command_is_refused_at_submission(home):
    served(home, "commands = false")
    message = home.cli("submit", "--memory", "1GiB", "--on-end", "true", "--", "true", code=2)
    assert "this site runs none (notify.commands in the settings)" in message


def test_the_sites_hook_is_run_for_every_end(home, tmp_path):
    hook = tmp_path / "hook"
    hook.write_text(f'#!/bin/sh\ncat > "{tmp_path}/told-$ULLAGE_END_JOB-$ULLAGE_END_STATE"\n')
    hook.chmod(0o755)
    served(home, f'hook = ["{hook}"]')
    done, held = home.script("true"), home.script("true", hold=True)
    home.client.cancel(held)
    home.until((tmp_path / f"told-{done}-done").exists, "the first end")
    home.until((tmp_path / f"told-{held}-cancelled").exists, "the second end")
    home.until(lambda: len(events(home, "notified")) == 2, "both to be crossed out")
    assert json.loads((tmp_path / f"told-{done}-done").read_text())["name"] == "sh"


def test_a_command_that_hangs_is_ended_and_reported(home):
    served(home, "command_timeout = 5.0")
    length = f"1000.{os.getpid()}"  # by which its processes are found
    home.script("true", on_end=f"sh -c 'sleep {length} & sleep {length}'")
    assert "command: sh: it " in home.until(lambda: events(home, "not notified"), "the end of it")[0]
    home.until(lambda: not [each for each in psutil.process_iter() if length in command_line(each)], "its end")


def command_line(process):
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


AS_NOBODY = """
import sys
from ullage.manager.core.notifications import by_command
from ullage.manager.running.environment import least_environment
from ullage.manager.identity import rights
import pwd
user = pwd.getpwnam("nobody")
facts = {"id": "1-1", "job": 1, "state": "done"}
for cwd in sys.argv[1:]:
    command = ["sh", "-c", "echo $(id -u) $(pwd) $ULLAGE_END_STATE > told"]
    print(by_command(command, facts, least_environment(user.pw_uid), cwd, rights(user.pw_uid, user.pw_gid), 60.0))
"""


def test_a_jobs_command_has_its_users_rights_before_its_folder():
    if os.geteuid() != 0:
        pytest.skip("needs root, to run a command as another user")
    if public_python() is None:
        pytest.skip("needs a Python that every user can run")
    python, path = public_python()
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        os.chmod(folder, 0o755)
        private, inside, open_to_all = Path(folder, "private"), Path(folder, "private/inside"), Path(folder, "open")
        for place, mode in ((private, 0o700), (inside, 0o777), (open_to_all, 0o777)):
            place.mkdir()
            place.chmod(mode)
        words = [python, "-c", AS_NOBODY, str(open_to_all), str(inside)]
        said = subprocess.run(words, env={"PYTHONPATH": path}, cwd="/", capture_output=True, text=True, check=True)
        assert (open_to_all / "told").read_text() == f"{pwd.getpwnam('nobody').pw_uid} {open_to_all} done\n"
        assert not (inside / "told").exists() and "done=False" in said.stdout.splitlines()[1]


@pytest.mark.parametrize("point", ["notify-before-delivery", "notify-delivered", "over"])
def test_a_kill_between_the_end_and_the_delivery_loses_nothing(home, point):
    home.start(crash_at=point)
    job = home.script("true", on_end=keeper(home.work))
    home.until(lambda: home.process.poll() is not None, "the crash")
    home.start()
    assert home.wait(job)["state"] == "done"
    home.until(lambda: events(home, "notified"), "the delivery")
    ids = {facts["id"] for facts in told(home.work)}
    times = 2 if point == "notify-delivered" else 1
    assert len(ids) == 1 and len(told(home.work)) == times, "again, with the same id"
    home.stop()
    home.start()
    assert len(events(home, "notified")) == 1, "what was crossed out stays so"


def test_a_full_disk_repeats_no_notification(make_here, tmp_path):
    here = make_here()
    commit, failures = here.daemon.notifier._commit, []

    async def full_at_first(work):
        if len(failures) < 2:
            failures.append(work)
            here.daemon.notifier._woken.set()
            raise DiskFull("nothing was written: the disk is full")
        return await commit(work)

    here.daemon.notifier._commit = full_at_first
    here.submit("true", on_end=keeper(tmp_path))
    here.until(lambda: "notified" in [each["kind"] for each in here.call("events")["events"]], "it to be crossed out")
    assert len(failures) == 2 and len(told(tmp_path)) == 1


def test_a_users_slow_command_does_not_delay_the_daemon(home):
    served(home, f'hook = ["sh", "-c", "touch {home.work}/hooked-$ULLAGE_END_JOB"]', "command_timeout = 300.0")
    slow = home.script("true", on_end=f"sh -c 'while [ ! -e {home.work}/proceed ]; do sleep 0.05; done'")
    home.wait(home.script("true"))
    home.until((home.work / f"hooked-{slow}").exists, "another kind of telling")
    assert home.client.ping()
