"""Jobs run as real processes, end for reasons that are told right, and outlive their daemon."""

import json
import os
import signal
import subprocess

import psutil
import pytest


@pytest.mark.tiny
def test_a_job_runs_once_on_a_gpu_that_it_was_promised(common):
    number = common.script("echo to $CUDA_VISIBLE_DEVICES; echo oops >&2")
    job = common.wait(number)
    attempt = job["attempts"][0]
    assert job["state"] == "done" and job["cause"] == "finished" and len(job["attempts"]) == 1
    assert attempt["promise"] == 1 << 30 and attempt["exit_code"] == 0
    assert common.client.call("logs", job=number)["text"] == f"to {attempt['slots'][0]}\n"
    assert common.client.call("logs", job=number, stream="stderr")["text"] == "oops\n"


def test_running_jobs_outlive_the_daemon_and_are_adopted(served):
    number = served.submit(proceed="proceed")
    served.until(lambda: served.log(), "the job to start")
    served.wait(number, "running")
    served.kill()
    served.start()
    assert served.job(number)["state"] == "running"
    assert [gpu["promised"] for gpu in served.client.call("gpus")].count(1 << 30) == 1
    served.go()
    assert served.wait(number)["state"] == "done"
    assert served.log() == [f"start {number} 1", f"end {number} 1"]


def test_a_job_that_ends_while_the_daemon_is_down_is_known(served):
    number = served.submit(proceed="proceed")
    served.wait(number, "running")
    served.kill()
    served.go()
    served.until(lambda: f"end {number} 1" in served.log(), "the job to end")
    served.start()
    assert served.wait(number)["attempts"][0]["cause"] == "finished"


@pytest.mark.parametrize(
    ("script", "state", "cause"),
    [
        ("exit 3", "failed", "failed by itself"),
        ("kill -SEGV $$", "failed", "failed by itself"),
        ("no-such-program", "failed", "failed by itself"),
    ],
)
def test_a_bug_is_not_tried_again(common, script, state, cause):
    job = common.wait(common.script(script))
    assert (job["state"], job["cause"], len(job["attempts"])) == (state, cause, 1)


def test_a_program_that_is_not_there_is_named(common):
    job = common.wait(common.submit(["/no/such/program"]))
    assert job["detail"] == "cannot run /no/such/program: No such file or directory"


def test_cancelling_ends_the_whole_tree_of_processes(common):
    script = "setsid sleep 1000 & echo $! > pids; sleep 1000 & echo $! >> pids; touch there; wait"
    number = common.script(script)
    common.until((common.work / "there").exists, "the job's processes")
    common.wait(number, "running")
    pids = [int(line) for line in (common.work / "pids").read_text().split()]
    common.client.call("cancel", jobs=[number])
    job = common.wait(number)
    assert (job["state"], job["cause"]) == ("cancelled", "cancelled")
    assert not [pid for pid in pids if psutil.pid_exists(pid)]


def test_a_job_that_ignores_sigterm_is_killed_after_the_grace(common):
    number = common.script("trap '' TERM; touch there; while :; do sleep 0.1; done")
    common.until((common.work / "there").exists, "the job")
    common.client.call("cancel", jobs=[number])
    assert common.wait(number)["attempts"][0]["signal"] == signal.SIGKILL


def test_a_time_limit_is_kept_while_the_daemon_is_down(served):
    """The daemon dies in the moment in which the job runs."""
    before = served.submit(proceed="proceed")
    number = served.script("sleep 1000", after=before, time_limit=1.5)
    served.wait(before, "running")
    served.kill()
    served.go()
    served.start(crash_at="running", wait=False)
    assert served.process.wait(60) == -signal.SIGKILL
    pid = json.loads((served.folder / "manager/jobs" / str(number) / "1/started.json").read_text())["supervisor_pid"]
    served.until(lambda: not psutil.pid_exists(pid), "the job to end")
    served.start()
    assert served.wait(number)["cause"] == "time limit"


def test_a_reused_pid_is_neither_believed_nor_signalled(served):
    number = served.submit(proceed="proceed")
    served.wait(number, "running")
    folder = served.folder / "manager/jobs" / str(number) / "1"
    started = json.loads((folder / "started.json").read_text())
    served.kill()
    os.kill(started["supervisor_pid"], signal.SIGKILL)  # the job ends with it
    served.until(lambda: not psutil.pid_exists(started["job_pid"]), "the job to end")
    bystander = subprocess.Popen(["sleep", "1000"])
    try:
        started |= {"supervisor_pid": bystander.pid, "job_pid": bystander.pid}  # as if its number had come again
        (folder / "started.json").write_text(json.dumps(started))
        served.start()
        served.until(lambda: len(served.job(number)["attempts"]) == 2, "a second attempt")
        served.client.call("cancel", jobs=[number])
        served.wait(number)
        assert bystander.poll() is None
    finally:
        bystander.kill()
    first = served.job(number)["attempts"][0]
    assert first["cause"] == "watching process lost"
    assert not [line for line in served.log() if line.startswith("twice")]


def test_after_a_restart_of_the_machine_jobs_are_tried_again(served):
    """As it looks then: the job and its supervisor are gone, and the kernel's name for its run is another one."""
    number = served.submit(proceed="proceed")
    served.wait(number, "running")
    served.kill()
    file = served.folder / "manager/jobs" / str(number) / "1/started.json"
    started = json.loads(file.read_text())
    os.kill(started["supervisor_pid"], signal.SIGKILL)
    served.until(lambda: not psutil.pid_exists(started["job_pid"]), "the job to end")
    file.write_text(json.dumps(started | {"boot": "00000000-0000-0000-0000-000000000000"}))
    served.go()
    served.start()
    job = served.wait(number)
    assert [attempt["cause"] for attempt in job["attempts"]] == ["host restarted", "finished"]


def test_a_job_killed_from_outside_is_retried(common):
    number = common.script("if [ -e there ]; then exit 0; fi; touch there; kill -KILL $$")
    job = common.wait(number)
    assert [attempt["cause"] for attempt in job["attempts"]] == ["killed", "finished"]
    assert "SIGKILL, sent from outside" in job["attempts"][0]["detail"]


def test_a_job_finds_its_venv_variables_folder_and_mask(common):
    tool = common.work / "env/bin/tool"
    tool.parent.mkdir(parents=True)
    tool.write_text('#!/bin/sh\necho "$0 $WORD $PWD ${VIRTUAL_ENV}${CONDA_PREFIX} $CUDA_VISIBLE_DEVICES"; touch made\n')
    tool.chmod(0o755)
    own = {"WORD": "a b", "PATH": os.environ["PATH"], "CUDA_VISIBLE_DEVICES": "the submitter's"}
    for kind in ("venv", "conda"):
        job = common.wait(common.submit(["tool"], env=own, umask=0o077, **{kind: str(tool.parents[1])}))
        slot = job["attempts"][0]["slots"][0]
        said = common.client.call("logs", job=job["id"])["text"]
        assert said == f"{tool} a b {common.work} {tool.parents[1]} {slot}\n"
        assert (common.work / "made").stat().st_mode & 0o777 == 0o600
        (common.work / "made").unlink()
    gone = common.wait(common.submit(["tool"], env=own, conda="/no/such/environment"))
    assert "there is no conda environment" in gone["detail"]
    assert [attempt["cause"] for attempt in gone["attempts"]] == ["failed by itself"]


def test_a_job_dies_with_its_supervisor_and_is_tried_again(common):
    number = common.submit(proceed="proceed")
    common.wait(number, "running")
    started = json.loads((common.folder / "manager/jobs" / str(number) / "1/started.json").read_text())
    os.kill(started["supervisor_pid"], signal.SIGKILL)
    common.until(lambda: len(common.job(number)["attempts"]) == 2, "a second attempt")
    common.go()
    job = common.wait(number)
    assert [attempt["cause"] for attempt in job["attempts"]] == ["watching process lost", "finished"]
    assert common.log()[-1] == f"end {number} 2" and not [line for line in common.log() if line.startswith("twice")]


def test_a_killed_supervisors_processes_end_before_a_retry(common):
    """Even a process that has made itself a session and an environment of its own."""
    script = """
    if [ -e there ]; then exit 0; fi
    setsid env -i sleep 1000 &
    echo $! > left; touch there; wait
    """
    number = common.script(script)
    common.until((common.work / "there").exists, "the job")
    common.wait(number, "running")
    left = psutil.Process(int((common.work / "left").read_text()))
    common.until(lambda: left.name() == "sleep", "the process that is left")
    folder = common.folder / "manager/jobs" / str(number) / "1"
    os.kill(json.loads((folder / "started.json").read_text())["supervisor_pid"], signal.SIGKILL)
    job = common.wait(number)
    assert [attempt["cause"] for attempt in job["attempts"]] == ["watching process lost", "finished"]
    assert not left.is_running() or left.status() == psutil.STATUS_ZOMBIE
