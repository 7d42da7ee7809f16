"""A private Slurm for all tests of a worker, cleared before each of them; skipped where Slurm is not installed."""

import functools
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.manager.slurm.private_slurm import PrivateSlurm, missing

from ullage.manager.core import estimates
from ullage.sandbox.worker_pool import WorkerPool

# On a GPU, be it a virtual one, it trains; in a job it only says what Slurm gave it.
TRAINING = """
import os, sys
if "SLURMD_NODENAME" in os.environ:
    print("shards", os.environ.get("SLURM_SHARDS_ON_NODE"), "gpu", os.environ.get("CUDA_VISIBLE_DEVICES"))
    sys.exit()
import torch
kept = torch.empty(int(sys.argv[1]) << 20, dtype=torch.uint8, device="cuda")  # MiB
model = torch.nn.Linear(64, 64, device="cuda")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(10):
    optimizer.zero_grad()
    model(torch.randn(8, 64, device="cuda")).sum().backward()
    optimizer.step()
"""


@pytest.fixture(scope="session")
def _cluster() -> Iterator[PrivateSlurm]:
    if missing():
        pytest.skip(f"Slurm is not installed ({', '.join(missing())}): as root 'make test-slurm' installs it")
    folder = Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp"))  # a socket's path must be short, and others may enter
    folder.chmod(0o755)
    try:
        with PrivateSlurm(folder) as cluster:
            yield cluster
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def slurm(_cluster: PrivateSlurm, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> PrivateSlurm:
    """The cluster: three nodes with four GPUs of forty shards each, and nothing in the queue.

    Slurm's commands that the test runs itself speak to it as well. Slurm calls the GPUs "fake"; they are A100-40GB.
    """
    _cluster.clear()
    for name, value in _cluster.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("ULLAGE_HOME", str(tmp_path / "home"))
    (_cluster.folder / "ullage.toml").write_text('[gpus]\nfake = "A100-40GB"\n')
    return _cluster


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of somebody who trains, which is also the current one: train.py, and job.sh that runs it."""
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "train.py").write_text(TRAINING)
    (folder / "job.sh").write_text(
        f"#!/bin/bash\n#SBATCH --gpus=1 --output=%j.out\nSIZE=4096\n{sys.executable} train.py $SIZE\n"
    )
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture(scope="session")
def _warm_estimates() -> Iterator[WorkerPool]:
    warm = WorkerPool(["ullage.estimation.jobs.child", "ullage.estimation.asking", "ullage.estimation.scripts.child"])
    yield warm
    warm.close()


@pytest.fixture
def warm_estimates(_warm_estimates: WorkerPool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Estimates in this process are forked from one that has imported PyTorch, as the daemon has it done."""
    monkeypatch.setattr(estimates, "run", functools.partial(estimates.run, warm=_warm_estimates))
