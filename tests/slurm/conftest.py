"""A private Slurm for all tests of a worker, cleared before each of them; skipped where Slurm is not installed."""

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.slurm.private_slurm import PrivateSlurm, missing


@pytest.fixture(scope="session")
def _cluster() -> Iterator[PrivateSlurm]:
    if missing():
        pytest.skip(
            f"Slurm is not installed ({', '.join(missing())}): 'make test-slurm' installs it where root runs it"
        )
    folder = Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp"))  # a socket's path must be short, and others may enter
    folder.chmod(0o755)
    try:
        with PrivateSlurm(folder) as cluster:
            yield cluster
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def slurm(_cluster: PrivateSlurm, monkeypatch: pytest.MonkeyPatch) -> PrivateSlurm:
    """The cluster: three nodes with four GPUs of forty shards each, and nothing in the queue.

    Slurm's commands that the test runs itself speak to it as well.
    """
    _cluster.clear()
    for name, value in _cluster.environment.items():
        monkeypatch.setenv(name, value)
    return _cluster
