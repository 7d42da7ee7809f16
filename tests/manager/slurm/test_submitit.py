"""submitit's own executors, with a real Slurm and without."""

import pytest

from ullage.adapters import service, submitit
from ullage.manager.slurm import commands
from ullage.manager.slurm.comment import read_comment
from ullage.units import GIB

real = pytest.importorskip("submitit", reason="the package submitit is not installed")


@pytest.fixture(autouse=True)
def _known(monkeypatch):
    need = service.MemoryNeed("A100-40GB", 3 * GIB + 1, True, 40 * GIB)
    monkeypatch.setattr(submitit, "need_of", lambda *_, **__: need)


def test_a_job_of_submitit_runs_in_slurm_with_its_shards(slurm, tmp_path):
    executor = real.AutoExecutor(folder=tmp_path / "logs", cluster="slurm")
    executor.update_parameters(slurm_additional_parameters={"exclude": "n1"})
    job = submitit.submit(executor, max, 3, 4, gpu="A100-40GB")
    slurm.until_state(int(job.job_id), "COMPLETED", "FAILED")
    assert job.result() == 4
    [found] = commands.jobs([int(job.job_id)])
    assert found.shards == 4 and found.nodes != "n1"
    assert read_comment(found.comment) == {"upper": 3 * GIB + 1, "shards": 4, "gpu": "A100-40GB"}


def test_a_job_of_submitit_without_slurm_runs_as_it_is(tmp_path):
    executor = real.AutoExecutor(folder=tmp_path, cluster="debug")
    assert submitit.submit(executor, max, 3, 4, gpu="A100-40GB").result() == 4
