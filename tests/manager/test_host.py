"""Cores and host memory are counted beside GPU memory, also across a crash of the daemon."""

import os
import sqlite3

import pytest

from ullage.manager.core.limits import host_of, share_of
from ullage.manager.monitor.host import usable_cores, usable_memory
from ullage.manager.placement import HostShare
from ullage.manager.settings import HostSettings

BLOCKS = "touch $0; while [ ! -e proceed ]; do sleep 0.05; done"


@pytest.fixture
def host(home):
    """A daemon whose jobs may have four cores and 8 GiB together."""
    home.settings += '[host]\ncores = 4\nmemory = "8GiB"\n'
    home.start()
    return home


def blocking(home, name, **more):
    return home.submit(["/bin/sh", "-c", BLOCKS, name], **more)


def test_a_job_waits_for_cores_and_starts_when_they_come_free(host):
    first = blocking(host, "first", cores=3)
    host.wait(first, "running")
    second, third = host.submit(cores=2), host.submit(cores=1)
    host.until(lambda: "cores" in (host.job(second)["reason"] or ""), "a reason")
    assert host.wait(third)["state"] == "done", "there was a core for it"
    host.until(lambda: host.job(second)["reason"] == "needs 2 cores; 1 of 4 are free", "the reason")
    assert "3 cores" in host.cli("queue") and "host       3 cores" in host.cli("status", str(first))
    assert "host: 1 of 4 cores and 8.00 GiB of 8.00 GiB host memory are free" in host.cli("queue", "--show-gpus")
    host.go()
    assert host.wait(second)["state"] == "done"
    memory = 8 << 30
    assert host.client.ping()["host"] == {"cores": 4, "memory": memory, "free_cores": 4, "free_memory": memory}


def test_the_next_daemon_counts_what_running_jobs_hold(host):
    first = blocking(host, "first", cores=3, host_memory=6 << 30)
    host.wait(first, "running")
    host.kill()
    host.start()
    assert (host.client.ping()["host"]["free_cores"], host.client.ping()["host"]["free_memory"]) == (1, 2 << 30)
    second = host.submit(host_memory=4 << 30)
    host.until(lambda: "host memory" in (host.job(second)["reason"] or ""), "a reason")
    assert host.job(second)["reason"] == "needs 4.00 GiB of host memory; 2.00 GiB of 8.00 GiB are free"
    host.go()
    assert host.wait(second)["state"] == "done"


def test_a_job_without_a_gpu_needs_only_a_core(host):
    blocking(host, "full", gpus=2, memory=None, exclusive=True)
    host.until((host.work / "full").exists, "the job that has all GPUs")
    job = host.script('echo "gpus=$CUDA_VISIBLE_DEVICES cores=$ULLAGE_CORES $OMP_NUM_THREADS"', gpus=0, memory=None)
    done = host.wait(job)
    assert (done["state"], done["estimate"], done["cores"]) == ("done", "it uses no GPU", 1)
    assert host.client.logs(job) == "gpus= cores=1 1\n"
    assert "without a GPU" in host.cli("status", str(job))
    assert host.cli("submit", "--gpus", "0", "--", "true").endswith(": queued (it uses no GPU)\n")
    many = [host.submit(gpus=0, memory=None, proceed="later") for _ in range(6)]
    host.until(lambda: sum(host.job(one)["state"] == "running" for one in many) == 4, "four of them")
    host.go("later")
    assert all(host.wait(one)["state"] == "done" for one in many)


def test_the_threads_that_a_job_asked_for_itself_stay(host):
    job = host.script("echo $OMP_NUM_THREADS", cores=2, env={"OMP_NUM_THREADS": "7", "PATH": os.environ["PATH"]})
    host.wait(job)
    assert host.client.logs(job) == "7\n"


def test_impossible_requests_are_refused_at_once(host):
    said = host.cli("submit", "--cores", "5", "--memory", "1GiB", "--", "true", code=2)
    assert said == "ullage: the job asks for 5 cores; jobs have 4 cores and 8.00 GiB of host memory here\n"
    said = host.cli("submit", "--gpus", "0", "--memory", "1GiB", "--", "true", code=2)
    assert "gpus must be 1 or more for memory, got 0" in said


def test_jobs_without_host_needs_are_promised_the_defaults(home):
    home.settings += '[host]\ncores = 4\nmemory = "8GiB"\ndefault_cores = 3\ndefault_memory = "1GiB"\n'
    home.start()
    first = blocking(home, "first")
    home.wait(first, "running")
    second = home.submit()
    home.until(lambda: "cores" in (home.job(second)["reason"] or ""), "a reason")
    held = sqlite3.connect(home.folder / "manager/state.db").execute("SELECT cores, host_promise FROM attempts")
    assert held.fetchall() == [(3, 1 << 30)]


def test_jobs_share_the_daemons_own_limits(tmp_path):
    (tmp_path / "cpu.max").write_text("150000 100000\n")
    (tmp_path / "memory.max").write_text(f"{1 << 20}\n")
    assert (usable_cores(tmp_path), usable_memory(tmp_path)) == (1, 1 << 20)
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert usable_cores(tmp_path) == len(os.sched_getaffinity(0))
    reserve = HostSettings(reserve_cores=1000, reserve_memory=usable_memory() - 5)
    assert host_of(reserve) == HostShare(1, 5)
    assert share_of({"gpus": 1, "host_memory": None}, HostSettings()) == HostShare()
