"""The example for submitit, with submitit's own executors, with a real Slurm and without."""

import importlib.util
import pathlib

import pytest

from ullage.manager.slurm import commands
from ullage.manager.slurm.commands import read_comment
from ullage.units import GIB, MIB

real = pytest.importorskip("submitit", reason="the package submitit is not installed")


@pytest.fixture(scope="module")
def example():
    path = pathlib.Path(__file__).parents[3] / "examples/schedulers/submitit_shards.py"
    spec = importlib.util.spec_from_file_location("submitit_shards", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def takes_memory(gib):
    """Allocates on a GPU where one is, real or virtual."""
    import os
    import sys

    if "SLURM_JOB_ID" not in os.environ and "torch" in sys.modules and sys.modules["torch"].cuda.is_available():
        torch = sys.modules["torch"]
        torch.empty(gib << 30, dtype=torch.uint8, device="cuda")
    return gib


def test_a_job_of_submitit_runs_in_slurm_with_its_shards(example, slurm, tmp_path):
    executor = real.AutoExecutor(folder=tmp_path / "logs", cluster="slurm")
    job = example.submit(executor, takes_memory, 3, gpu="A100-40GB")
    slurm.until_state(int(job.job_id), "COMPLETED", "FAILED")
    assert job.result() == 3
    [found] = commands.jobs([int(job.job_id)])
    told = read_comment(found.comment)
    assert found.shards == told["shards"] == -(-told["upper"] // GIB) and told["gpu"] == "A100-40GB"
    assert 3 * GIB + 256 * MIB < told["upper"] < 5 * GIB


def test_a_job_of_submitit_without_slurm_runs_as_it_is(example, tmp_path):
    executor = real.AutoExecutor(folder=tmp_path, cluster="debug")
    assert example.submit(executor, takes_memory, 3, gpu="A100-40GB").result() == 3


def test_a_function_that_does_not_fit_is_refused(example, tmp_path):
    executor = real.AutoExecutor(folder=tmp_path, cluster="debug")
    with pytest.raises(ValueError, match="does not fit on T4"):
        example.submit(executor, takes_memory, 30, gpu="T4")
