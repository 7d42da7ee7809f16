"""Jobs of several GPUs: each GPU is promised what its rank takes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.manager.conftest import answer_of
from tests.paths import ROOT

from ullage.estimation.jobs.child import _by_rank
from ullage.estimation.jobs.command import script_of
from ullage.estimation.result import Estimate
from ullage.manager.monitor.nvml import NvmlSource
from ullage.manager.monitor.sampling import Monitor
from ullage.sandbox.parent import Outcome
from ullage.virtual.shared_card.cards import Cards, environment

sys.path.insert(0, str(Path(__file__).parent / "monitor"))
from fake_nvml import FakeGpu, FakeNvml  # noqa: E402

GIB = 1 << 30

# Eight GiB of weights that the ranks divide among themselves.
SHARDED = """
import os, torch
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
weights = torch.zeros(2 * 1024**3 // int(os.environ["WORLD_SIZE"]), device="cuda", requires_grad=True)
optimizer = torch.optim.SGD([weights], lr=0.1)
for _ in range(3):
    weights.sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""

# Stages that hand on what they have: the last one is much larger.
PIPELINE = """
import os, torch
import torch.distributed as dist
dist.init_process_group("nccl")
rank, last = dist.get_rank(), dist.get_world_size() - 1
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
model = torch.nn.Linear(1024, 1024 * (1024 if rank == last else 1), device="cuda")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    x = torch.randn(8, 1024, device="cuda")
    if rank > 0:
        dist.recv(x, rank - 1)
    y = model(x)
    gradient = torch.ones_like(y)
    if rank < last:
        dist.send(y.detach(), rank + 1)
        dist.recv(gradient, rank + 1)
    y.backward(gradient)
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.fixture(scope="module")
def ranks(tmp_path_factory, make_home):
    made = make_home(tmp_path_factory.mktemp("h"))
    made.options = ["--virtual", "4xA100-40GB"]
    made.variables = {"PATH": f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}"}
    made.start()
    (made.work / "train.py").write_text(SHARDED)
    yield made
    made.close()


def submitted(home, *command, **more):
    """A job of several GPUs whose estimate is there, and that does not start."""
    number = home.submit(list(command), memory=None, hold=True, env=home.environment(), **more)
    return home.client.wait_for_estimate(number, 300.0)


def test_each_gpu_is_promised_what_its_rank_takes(ranks):
    job = submitted(ranks, "torchrun", "--nproc-per-node", "4", "train.py", gpus=4)
    assert job["estimate"] == "estimated by ullage for A100-40GB, as rank 0 of 4"
    assert 4 * GIB <= job["promise"] < 7 * GIB, "a quarter of the weights and as much of gradients"


@pytest.mark.slow
def test_stages_of_a_pipeline_are_promised_what_each_takes(ranks):
    (ranks.work / "pipeline.py").write_text(PIPELINE)
    job = submitted(ranks, "torchrun", "--nproc-per-node", "4", "pipeline.py", gpus=4)
    assert job["estimate"] == "estimated by ullage for A100-40GB, as rank 3 of 4"
    assert 12 * GIB <= job["promise"] < 16 * GIB, "the last stage has the wide layer; the first takes little"
    first, second, between, last = job["promises"]
    assert max(first, second, between) < 3 * GIB and last == job["promise"]


@pytest.mark.slow
def test_a_dry_run_shows_what_each_gpu_would_be_promised(ranks):
    words = ["--gpus", "4", "--estimate-wait", "300s", "--", "torchrun", "--nproc-per-node", "gpu", "train.py"]
    told = ranks.cli("submit", "--dry-run", *words)
    assert "promise 4.76 GiB (estimated by ullage for A100-40GB)" in told, told


def followed(upper, *ranks):
    """An estimate; rank by rank, those that were followed, with what each takes at most."""
    found = [{"rank": number, "upper": each} for number, each in ranks]
    return Estimate(
        gpu="T4",
        gpu_memory=16,
        peak_allocated=1,
        peak_reserved=1,
        process_memory=1,
        upper=upper,
        breakdown={},
        fits=True,
        headroom=0,
        steps=3,
        seconds=1.0,
        ranks=found,
    )


def test_an_unestimated_rank_is_promised_as_much_as_the_largest():
    small = followed(12, (0, 5), (1, 6), (3, 12))
    assert _by_rank([small], 12, ranks=4) == [5, 6, 12, 12]
    other = followed(14, (0, 7), (1, 2), (3, 14))
    assert _by_rank([small, other], 14, ranks=4) == [7, 6, 14, 14], "on two kinds of GPU"
    assert _by_rank([followed(12)], 12, ranks=4) is None, "one rank stands for all of them"


def test_copies_of_a_pipeline_take_what_its_stages_take():
    beside = followed(12, (0, 5), (1, 6), (2, 6), (3, 12))
    assert _by_rank([beside], 12, ranks=8) == [5, 6, 6, 12, 5, 6, 6, 12], "stages beside each other"
    between = followed(12, (0, 5), (2, 6), (4, 6), (6, 12))
    assert _by_rank([between], 12, ranks=8) == [5, 5, 6, 6, 6, 6, 12, 12], "copies beside each other"
    assert _by_rank([beside], 12, ranks=6) == [5, 6, 6, 12, 12, 12], "four stages do not make six ranks"


STAGES = [2 * GIB, 30 * GIB]
WAIT = "echo $CUDA_VISIBLE_DEVICES; while [ ! -e proceed ]; do sleep 0.05; done"


@pytest.fixture
def two_stages(make_here, monkeypatch):
    """Makes daemons with two GPUs of 41 GiB, for which every job is two ranks that differ."""
    answer = answer_of(max(STAGES), "T", world_size=2, rank=1, by_rank=STAGES)
    monkeypatch.setattr("ullage.manager.core.estimates.run", lambda *args, **more: Outcome(answer=answer))
    gpus = [FakeGpu(uuid=f"GPU-{name}", name="T", total=41 * GIB, used=0) for name in "ab"]

    def make():
        monitor = Monitor(NvmlSource(FakeNvml(gpus)), interval=0.1)
        return make_here(monitor=monitor, placing={"smact_limit": "off"}, running={"over_promise": "leave"})

    return make, gpus


def promised(here):
    return {gpu["id"]: gpu["promised"] for gpu in here.call("gpus")}


def submit_stages(here, **more):
    number = here.submit(WAIT, memory=None, estimator="ullage", model="x:y", gpus=2, **more)
    here.until(lambda: here.job(number)["estimate"], "the estimate")
    return number


def test_each_gpu_is_promised_the_need_of_its_rank(two_stages):
    here = two_stages[0]()
    number = submit_stages(here)
    here.until(lambda: here.job(number)["state"] == "running", "the job to run")
    job = here.job(number)
    where = dict(zip(job["gpus_used"], STAGES, strict=True))
    assert job["promises"] == STAGES and promised(here) == where
    beside = here.submit(WAIT, memory=20 * GIB)
    here.until(lambda: here.job(beside)["state"] == "running", "another job to run beside the small rank")
    assert here.job(beside)["gpus_used"] == job["gpus_used"][:1]
    here.close()
    again = two_stages[0]()
    assert promised(again)[job["gpus_used"][1]] == STAGES[1], "also after a restart"
    assert promised(again)[job["gpus_used"][0]] == STAGES[0] + 20 * GIB
    (again.folder / "work/proceed").touch()
    assert list(again.until_over(number)["attempts"][0]["promises"]) == STAGES
    assert again.call("logs", job=number)["text"].strip() == ",".join(job["gpus_used"]), "the first rank's GPU is first"


@pytest.mark.slow
def test_a_rank_beyond_its_own_promise_is_reported(two_stages):
    make, gpus = two_stages
    here = make()
    number = submit_stages(here)
    here.until(lambda: here.job(number)["state"] == "running", "the job to run")
    small = here.job(number)["gpus_used"][0]
    pid = here.until(lambda: here.daemon.context.pids.get(number), "its process")
    gpu = next(each for each in gpus if each.uuid == small)
    gpu.compute, gpu.used = {pid: 8 * GIB}, 8 * GIB
    here.until(lambda: here.job(number)["over_promise"], "it to be seen: the other rank's promise is not its own")
    gpu.compute, gpu.used = {}, 0


def test_a_job_with_more_gpus_than_ranks_promises_the_largest(two_stages):
    here = two_stages[0]()
    number = submit_stages(here, hold=True)
    here.call("edit", jobs=[number], changes={"gpus": 1})
    job = here.job(number)
    assert (job["promise"], job["promises"]) == (max(STAGES), [])


def test_launchers_say_how_many_ranks_there_are():
    def ranks_of(line, gpus):
        found = script_of(line.split()).ranks(gpus)
        assert found.pop("launcher", "").startswith("accelerate launch") == ("accelerate" in line)
        return found

    assert ranks_of("accelerate launch train.py", 2) == {"world_size": 2}
    assert ranks_of("python -m accelerate.commands.launch --num_processes 3 train.py", 4) == {"world_size": 3}
    assert ranks_of("accelerate launch --num_processes 8 --num_machines 2 train.py", 4) == {"world_size": 8, "nodes": 2}
    assert ranks_of("deepspeed --num_gpus 2 train.py", 4) == {"world_size": 2}
    assert ranks_of("torchrun train.py", 4) == {"world_size": 1}, "torchrun starts one process if nobody says more"
    assert ranks_of("python train.py", 4) == {"world_size": 4}, "it starts its processes itself"


def test_a_rank_that_runs_out_of_memory_gives_all_of_them_more(common):
    script = "[ $ULLAGE_ATTEMPT_NUMBER = 2 ] || { echo 'torch.OutOfMemoryError: CUDA out of memory'; exit 1; }"
    job = common.wait(common.script(script, memory=4 * GIB, gpus=2))
    assert job["state"] == "done" and [len(each["slots"]) for each in job["attempts"]] == [2, 2]
    assert [each["promise"] // GIB for each in job["attempts"]] == [4, 9]


def test_a_rank_takes_its_memory_on_the_card_of_its_number(tmp_path):
    cards = Cards.create(tmp_path / "cards", "2xT4")
    code = """
import os, torch
from ullage.virtual.shared_card.cards import Cards
kept = torch.ones(1, device="cuda")
print([card.used() > 0 for card in Cards.open(os.environ["ULLAGE_CARDS"]).cards])
"""
    base = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    env = base | environment(cards.folder, [card.uuid for card in cards.cards], base=base)
    assert subprocess.check_output([sys.executable, "-c", code], env=env, text=True).strip() == "[False, True]"
