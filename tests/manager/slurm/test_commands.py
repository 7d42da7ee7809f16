"""What Ullage reads from a real Slurm."""

import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest
from tests.manager.slurm.private_slurm import PATIENCE
from tests.paths import ROOT

from ullage.errors import SlurmFailed
from ullage.manager.slurm import commands
from ullage.manager.slurm.commands import Gres, SlurmNode


def test_the_nodes_say_how_many_shards_a_gpu_has(slurm):
    found = commands.nodes()
    assert [node.name for node in found] == ["n1", "n2", "n3"]
    assert found[0] == SlurmNode("n1", "IDLE", 4, "fake", 160, ("all",))
    assert found[0].shards_per_gpu == 40
    assert commands.default_partition() == "all"
    assert commands.configuration()["GresTypes"] == "gpu,shard"


def test_a_job_is_read_with_what_it_asked_for_and_where_it_is(slurm, tmp_path):
    words = ["--gres=shard:12", "--comment", "two words, a=b", "--job-name", "a name", "--output", str(tmp_path / "o")]
    job = commands.submit([*words, "--wrap", "echo $CUDA_VISIBLE_DEVICES $SLURM_SHARDS_ON_NODE; exit 3"])
    slurm.until_state(job, "FAILED")
    (described,) = commands.jobs([job])
    assert described.requested == (Gres("shard", None, 12),) and described.shards == 12
    assert (described.comment, described.name) == ("two words, a=b", "a name")
    assert (described.state, described.exit_code) == ("FAILED", 3)
    assert (tmp_path / "o").read_text().split()[-1] == "12"
    assert job in [each.id for each in commands.jobs()]


def test_a_refusal_of_slurm_is_one_message(slurm):
    with pytest.raises(SlurmFailed, match="^sbatch failed: Batch job submission failed: .*not available$"):
        commands.submit(["--gres=gpu:5", "--wrap", "true"])


def test_a_silent_controller_is_reported_within_the_limit(slurm):
    slurm.kill_daemon("slurmctld", signal.SIGKILL)
    try:
        with pytest.raises(SlurmFailed, match="did not answer within 0.5 s"):
            commands.run("scontrol", "show", "config", limit=0.5)
    finally:
        slurm.start_daemon("slurmctld")


def test_without_slurm_it_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SlurmFailed, match="apt-get install slurm-client"):
        commands.nodes()


def test_numbers_and_states_of_later_slurm_releases_are_read():
    told = {
        "job_id": 7,
        "job_state": ["OUT_OF_MEMORY"],
        "state_reason": "None",
        "start_time": {"set": True, "infinite": False, "number": 17},
        "tres_per_node": "gres/shard:12",
        "exit_code": {"return_code": {"set": True, "number": 0}, "signal": {"id": {"set": True, "number": 9}}},
        "array_job_id": {"set": False, "infinite": False, "number": 0},
    }
    job = commands._job(told)
    assert (job.state, job.started, job.exit_code) == ("OUT_OF_MEMORY", 17, 137)
    assert job.shards == 12 and job.array_job == 0
    assert commands._job({**told, "job_state": ["FAILED", "COMPLETING"]}).state == "COMPLETING"  # its epilog runs


def test_a_private_slurm_and_its_jobs_end_with_their_starter(slurm, tmp_path):
    program = textwrap.dedent(f"""
        import sys, time
        from pathlib import Path
        from tests.manager.slurm.private_slurm import PrivateSlurm
        cluster = PrivateSlurm(Path({str(tmp_path)!r}), nodes=1)
        cluster.start()
        job = cluster.submit("--output=/dev/null", "--wrap", "exec sleep 4242")
        cluster.until_state(job, "RUNNING")
        print("up", flush=True)
        time.sleep(60)
    """)
    paths = os.pathsep.join([str(ROOT), str(ROOT / "src")])
    owner = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": paths}
    )
    assert owner.stdout.readline() == b"up\n"
    owner.kill()
    owner.wait(PATIENCE)
    deadline = time.monotonic() + PATIENCE
    while found := _processes_of(tmp_path):
        assert time.monotonic() < deadline, found
        time.sleep(0.02)


def _processes_of(folder):
    """Those that have a folder in their environment."""
    found = {}
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/environ", "rb") as environ, open(f"/proc/{pid}/cmdline", "rb") as command:
                if f"SLURM_CONF={folder}/".encode() in environ.read():
                    found[pid] = command.read()
        except OSError:
            continue
    return found
