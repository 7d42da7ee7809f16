"""The largest batch: exact, and in few estimates."""

import random

import pytest
import torch

import ullage
from ullage.errors import InvalidValue, UnknownName
from ullage.estimation.largest_batch import Search, jobs_together
from ullage.estimation.scripts.parent import many_runs


def job(base, slope, limit, share, noise, seed):
    """What a job takes: nearly linear, and full at some share of the limit."""
    chance = random.Random(seed)
    seen = {}

    def trial(number):
        if number not in seen:
            taken = int(base + slope * number * (1 + noise * chance.random()))
            seen[number] = taken, taken <= share * limit
        return seen[number]

    return trial, seen


@pytest.mark.parametrize("seed", range(60))
def test_the_answer_fits_and_the_next_one_does_not(seed):
    chance = random.Random(seed)
    slope, share, noise = 10 ** chance.uniform(6.5, 9), chance.uniform(0.85, 1), chance.choice([0, 0.003])
    trial, seen = job(chance.randint(0, 10**9), slope, 24 * 10**9, share, noise, seed)
    search = Search(trial, 24 * 10**9)
    largest = search.largest(start=chance.choice([1, 8, 64]))
    assert largest == 0 or seen[largest][1]
    assert not seen[largest + 1][1]
    assert search.trials == len(seen) <= 15


def test_a_step_and_nothing_that_fits():
    assert Search(lambda number: (number, number <= 1000), limit=1100, step=32).largest(start=224) == 992
    assert Search(lambda number: (number, False), limit=10).largest(start=8) == 0
    assert Search(lambda number: (number, number <= 1), limit=10).largest(start=8) == 1


def test_the_largest_batch_of_a_model_is_exact():
    model = ullage.Model("torchvision:alexnet", batch_size=8, input_shape=[3, 64, 64], optimizer="sgd")
    heard = []
    found = ullage.max_batch(model, gpu="RTX-2060", progress=lambda *facts: heard.append(facts))
    assert ullage.estimate(model, batch_size=found, gpu="RTX-2060").fits
    assert not ullage.estimate(model, batch_size=found + 1, gpu="RTX-2060").fits
    assert found.trials == len(heard) <= 24
    assert found.estimate.fits and not found.beyond.fits
    assert 0 < found.sure <= found
    assert ullage.estimate(model, batch_size=found.sure, gpu="RTX-2060").upper <= found.estimate.gpu_memory
    assert f"largest batch size on RTX-2060: {int(found)} " in found.report()
    assert found.to_dict()["largest"] == found.largest == found


@pytest.mark.slow
def test_image_size_and_sequence_length():
    size = ullage.max_batch(
        ullage.Model("torchvision:squeezenet1_1", inference=True), what="image-size", gpu="RTX-2060", batch_size=64
    )
    assert size % 32 == 0 and size.estimate.fits and not size.beyond.fits
    tiny = {"n_layer": 1, "n_embd": 64, "n_head": 2, "vocab_size": 1000}
    length = ullage.max_batch(
        ullage.Model("hf:GPT2LMHeadModel", settings=tiny, attention="math"),
        what="sequence-length",
        gpu="RTX-2060",
        batch_size=1,
    )
    assert length > 1024 and length.estimate.fits and not length.beyond.fits


def test_a_function_gets_the_number_as_its_parameter():
    def train(width, batch_size=1):
        layer = torch.nn.Linear(1 << 20, 1, device="cuda")
        layer(torch.zeros(batch_size, 1 << 20, device="cuda")).sum().backward()

    def first(batch_size):
        train(1, batch_size)

    found = ullage.max_batch(first, gpu="RTX-2060", steps=None)
    assert found and found.estimate.fits and not found.beyond.fits
    with pytest.raises(UnknownName, match="batch_size"):
        ullage.max_batch(first, gpu="RTX-2060", parameter="batchsize")
    with pytest.raises(InvalidValue, match="must have a parameter"):
        ullage.max_batch(lambda: None, gpu="RTX-2060")


@pytest.mark.slow
def test_data_smaller_than_the_batch_is_reported():
    def train(batch):
        torch.empty(min(batch, 100) << 20, device="cuda")

    found = ullage.max_batch(train, gpu="T4")
    assert 100 <= found.same_from < found
    assert f"from {found.same_from} on it needs the same: does the data have that many samples?" in found.report()


def test_nothing_fits():
    found = ullage.max_batch(
        ullage.Model("hf:LlamaForCausalLM", sequence_length=8, settings={"num_hidden_layers": 16}), gpu="RTX-2060"
    )
    assert found == 0 and found.sure == 0 and "no batch size fits on RTX-2060" in found.report()


def test_bad_questions():
    with pytest.raises(UnknownName, match="image-size"):
        ullage.max_batch("torchvision:resnet18", what="imagesize")
    with pytest.raises(InvalidValue, match="--batch-arg"):
        ullage.max_batch("train.py")


def test_how_many_jobs_fit_together():
    one = ullage.estimate(ullage.Model("torchvision:resnet18", batch_size=4, input_shape=[3, 32, 32]), gpu="A100-40GB")
    count = jobs_together(one)
    assert count * one.upper <= one.gpu_memory < (count + 1) * one.upper
    tight = ullage.estimate("torchvision:resnet18", batch_size=512, gpu="RTX-2060")
    assert jobs_together(tight) == 0


@pytest.mark.slow
def test_repeated_runs_of_a_script_each_start_from_scratch(tmp_path):
    """A search forks its runs from one process that has imported PyTorch; each has its own arguments and variables."""
    script = tmp_path / "train.py"
    script.write_text(
        "import os, sys, torch\n"
        "import torch.distributed as dist\n"
        "dist.init_process_group('nccl')\n"
        "assert dist.get_world_size() == int(os.environ['WORLD_SIZE'])\n"
        "assert not hasattr(torch, 'left_behind')\n"
        "torch.left_behind = torch.empty(int(sys.argv[1]) * dist.get_world_size() << 20, device='cuda')\n"
    )
    with many_runs():
        found = [
            ullage.estimate(script, args=[size], gpu="T4", ranks=ranks).peak_allocated
            for size, ranks in (("8", 2), ("8", 4), ("2", 4))
        ]
    assert found == [size << 22 for size in (16, 32, 8)]


def test_a_failure_at_a_larger_batch_names_it_and_a_fitting_one(tmp_path):
    """As one that leaves out the last batch of its data does, if there is no other."""
    script = tmp_path / "train.py"
    script.write_text(
        "import sys, torch\n"
        "for batch in [torch.zeros(64, 1024)][int(sys.argv[2]) > 64:]:\n"
        "    loss = (torch.nn.Linear(1024, 1024).cuda()(batch.cuda())).sum()\n"
        "loss.backward()\n"
    )
    with pytest.raises(
        ullage.errors.ScriptFailed, match=r"^batch size \d+ fits; with a batch size of \d+ .does the data"
    ) as e:
        ullage.max_batch(script, gpu="T4", batch_arg="--batch-size")
    assert "train.py fails: NameError: name 'loss' is not defined" in str(e.value)
