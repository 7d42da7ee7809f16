"""Random state on the virtual GPU is kept and restored, though no number is drawn."""

import weakref

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ullage.virtual import virtual_gpu


@pytest.fixture(autouse=True)
def gpu():
    with virtual_gpu("H200") as gpu:
        yield gpu


def test_seeds_are_set_and_states_restored():
    torch.manual_seed(5)
    assert torch.cuda.initial_seed() == 5
    state = torch.cuda.get_rng_state()
    assert state.dtype is torch.uint8 and state.shape == (16,)
    torch.cuda.manual_seed_all(6)
    torch.cuda.set_rng_state(state)
    assert torch.cuda.initial_seed() == 5
    torch.cuda.set_rng_state_all(torch.cuda.get_rng_state_all())
    torch.cuda.seed()
    with pytest.raises(RuntimeError, match="wrong size"):
        torch.cuda.set_rng_state(torch.get_rng_state())


def test_fork_rng_keeps_the_state():
    torch.manual_seed(5)
    with torch.random.fork_rng():
        torch.manual_seed(6)
    assert torch.cuda.initial_seed() == torch.initial_seed() == 5


def test_generators_work_in_random_operators():
    generator = torch.Generator(device="cuda").manual_seed(7)
    assert generator.device == torch.device("cuda:0") and generator.initial_seed() == 7
    assert torch.randn(3, device="cuda", generator=generator).shape == (3,)
    assert torch.empty(3, device="cuda").uniform_(generator=generator).is_cuda
    assert torch.randint(0, 9, (4,), device="cuda", generator=generator).shape == (4,)


def test_every_generator_is_a_generator():
    assert isinstance(torch.Generator(device="cuda"), torch.Generator)
    assert isinstance(torch.Generator(), torch.Generator)
    assert isinstance(torch.default_generator, torch.Generator)
    assert not isinstance(3, torch.Generator)
    same = [torch.randperm(9, generator=torch.Generator().manual_seed(1)).tolist() for _ in range(2)]
    assert same[0] == same[1]


def test_truncated_normal_weights_are_drawn_when_read(gpu):
    weight = nn.Parameter(torch.empty(200, 300))
    nn.init.trunc_normal_(weight, std=0.5, a=-1.0, b=1.0)
    bias = nn.init.trunc_normal_(torch.empty(8), std=0.5, a=-1.0, b=1.0)
    assert gpu.host.is_unfilled(weight) and weight.cuda().is_cuda
    assert 0.3 < weight.std() < 0.5 and weight.abs().max() <= 1.0
    assert not gpu.host.is_unfilled(weight) and bias.abs().max() <= 1.0


def test_a_batch_is_let_go_of_when_its_copy_has_gone_to_the_gpu(gpu):
    batch = torch.randn(200, 300)
    moved = batch.to(torch.bfloat16).cuda()
    gone = weakref.ref(batch)
    del batch
    assert gone() is None and not gpu.host.has_unfilled and moved.is_cuda


def test_a_copy_keeps_values_from_before_a_truncated_normal(gpu):
    weight = torch.zeros(200, 300)
    copy = weight.clone()
    nn.init.trunc_normal_(weight)
    assert copy.count_nonzero() == 0 and weight.count_nonzero() > 59_000


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_keeps_the_random_state(reentrant):
    block = nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.1), nn.Linear(64, 64)).cuda()
    x = torch.randn(8, 64, device="cuda", requires_grad=True)
    y = checkpoint(block, x, use_reentrant=reentrant, preserve_rng_state=True)
    y.sum().backward()
    assert x.grad.shape == x.shape
    assert block[0].weight.grad.shape == (64, 64)
