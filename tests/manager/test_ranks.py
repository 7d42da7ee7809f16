"""Jobs of several GPUs: each GPU is promised what its rank takes."""

import os
import subprocess
import sys

import pytest
from tests.paths import ROOT

from ullage.estimation.jobs.command import script_of
from ullage.virtual.shared_card.cards import Cards, environment

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
def test_stages_of_a_pipeline_are_promised_what_the_largest_takes(ranks):
    (ranks.work / "pipeline.py").write_text(PIPELINE)
    job = submitted(ranks, "torchrun", "--nproc-per-node", "4", "pipeline.py", gpus=4)
    assert job["estimate"] == "estimated by ullage for A100-40GB, as rank 3 of 4"
    assert 12 * GIB <= job["promise"] < 16 * GIB, "the last stage has the wide layer; the first takes little"


@pytest.mark.slow
def test_a_dry_run_shows_what_each_gpu_would_be_promised(ranks):
    words = ["--gpus", "4", "--estimate-wait", "300s", "--", "torchrun", "--nproc-per-node", "gpu", "train.py"]
    told = ranks.cli("submit", "--dry-run", *words)
    assert "promise 4.76 GiB (estimated by ullage for A100-40GB)" in told, told


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
