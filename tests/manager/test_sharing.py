"""MPS, with a control program that behaves like NVIDIA's as far as the manager uses it."""

import os
from pathlib import Path

import pytest
from tests.mps import CONTROL


@pytest.fixture
def with_mps(home, tmp_path):
    program = tmp_path / "bin/nvidia-cuda-mps-control"
    program.parent.mkdir()
    program.write_text(CONTROL)
    program.chmod(0o755)
    home.variables["PATH"] = f"{program.parent}{os.pathsep}{os.environ['PATH']}"
    home.options += ["--sharing", "mps"]
    return home


def calls(home):
    return (home.folder / "run/mps-log/calls").read_text().split()


def test_mps_is_started_watched_restarted_and_stopped(with_mps):
    home = with_mps
    home.start()
    script = """
    echo $CUDA_MPS_ACTIVE_THREAD_PERCENTAGE $CUDA_MPS_PINNED_DEVICE_MEM_LIMIT
    ls $CUDA_MPS_PIPE_DIRECTORY
    echo $CUDA_MPS_PIPE_DIRECTORY
    """
    number = home.script(script, mps_threads=40, mps_memory=6 << 30, gpus=2)
    home.wait(number)
    *said, folder = home.client.call("logs", job=number)["text"].split()
    assert said == ["40", "0=6144M,1=6144M", "alive"]
    alive = Path(folder) / "alive"  # in the home, or elsewhere where that path is too long for a socket
    alive.unlink()
    home.until(alive.exists, "MPS to be started again")
    assert "MPS does not answer; it is started again" in home.said()
    home.stop()
    assert calls(home) == ["started", "started", "quit"]


def test_mps_stays_for_jobs_that_go_on_and_is_adopted(with_mps):
    home = with_mps
    home.start()
    number = home.submit(proceed="proceed")
    home.wait(number, "running")
    home.stop()
    assert calls(home) == ["started"], "a job that goes on needs it"
    home.start()
    assert "MPS is already running" in home.said()
    home.go()
    assert home.wait(number)["state"] == "done"


def test_a_job_that_lost_its_mps_server_is_tried_again(with_mps):
    home = with_mps
    home.start()
    script = """
    if [ ! -e was-there ]; then
        touch was-there
        echo "RuntimeError: CUDA error: the remote procedural call between the MPS server and the MPS client failed" >&2
        exit 1
    fi
    """
    job = home.wait(home.script(script))
    assert [attempt["cause"] for attempt in job["attempts"]] == ["MPS server lost", "finished"]


def test_a_machine_without_mps_says_what_is_missing(home):
    said = home.cli("serve", "--virtual", "T4", "--sharing", "mps", code=1)
    assert said.startswith("ullage: --sharing mps needs nvidia-cuda-mps-control") and said.count("\n") == 1
