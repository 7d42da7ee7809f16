"""The last step of Ullage's own loop: foreseen where it is like the one before it, followed where it may not be."""

import random

import pytest
import torch
from torch import nn

from ullage import estimate
from ullage.estimation.timeline.trace import Trace
from ullage.jobs import Model, train
from ullage.jobs.tasks import Task
from ullage.virtual.watching import own_loop

FOLLOWED, FORESEEN = 3, 2  # forward passes


class Counted(nn.Module):
    """A model that counts its forward passes where nobody looks, and does something besides."""

    def __init__(self, besides=lambda model: None):
        super().__init__()
        widths = nn.Linear(192, 9000), nn.BatchNorm1d(9000), nn.ReLU(), nn.Linear(9000, 96)
        self.layers = nn.Sequential(nn.Flatten(), *widths)
        self.besides, self.seen, self.state = besides, 0, []
        self.passes = Passes()

    def forward(self, inputs):
        self.passes.count += 1
        self.besides(self)
        return self.layers(inputs)


class Passes:
    count = 0


@pytest.fixture
def trusted(monkeypatch):
    monkeypatch.setattr(own_loop, "PACKAGES", (*own_loop.PACKAGES, Counted.__module__.partition(".")[0]))


def answer(model, optimizer="adamw", trace=None, **options):
    configuration = Model("mlp:x", settings={"widths": [8, 4]}, batch_size=4, optimizer=optimizer, **options)
    found = estimate(lambda: train(configuration, prepared=(model, Task([3, 8, 8], 96))), gpu="H200", trace=trace)
    return found.to_dict() | {"seconds": 0, "timeline": found.timeline, "utilization": repr(found.utilization)}


@pytest.mark.parametrize("optimizer", [*own_loop.OPTIMIZERS, "adamw_fused", "adam_single"])
def test_an_extrapolated_step_equals_the_executed_one(trusted, optimizer):
    foreseen, followed = Counted(), Counted()
    told = answer(foreseen, optimizer)
    assert told == answer(followed, optimizer, trace=Trace())  # a trace has every event of every step
    assert (foreseen.passes.count, followed.passes.count) == (FORESEEN, FOLLOWED)
    assert told["steps"] == 3


@pytest.mark.parametrize("options", [{"gradient_accumulation": 2}, {"precision": "amp_fp16"}])
def test_so_it_is_with_other_options(trusted, options):
    foreseen, followed = Counted(), Counted()
    one, other = answer(foreseen, **options), answer(followed, trace=Trace(), **options)
    if "amp" in options.get("precision", ""):  # casts are freed in the order of their addresses
        del one["timeline"], other["timeline"]
    assert one == other
    assert foreseen.passes.count < followed.passes.count


def grow(model):
    model.seen += 1000


def keep(model):
    model.state.append(0)


def draw(model):
    random.random()


def draw_with_pytorch(model):
    torch.rand(())


def read(model):
    model.layers[-1].weight.argmax().item()


@pytest.mark.parametrize("besides", [grow, keep, draw, draw_with_pytorch, read])
def test_a_model_that_leaves_something_behind_is_followed(trusted, besides):
    model = Counted(besides)
    answer(model)
    assert model.passes.count >= FOLLOWED


def test_a_model_of_an_unknown_package_is_followed():
    model = Counted()
    answer(model)
    assert model.passes.count == FOLLOWED


def test_iterations_that_differ_are_followed(trusted):
    model = Counted(lambda model: model.passes.count == 2 and torch.zeros(1000, device="cuda"))
    answer(model)
    assert model.passes.count > FOLLOWED


def test_a_foreseen_step_runs_out_of_memory_as_a_followed_one(trusted, monkeypatch):
    make = own_loop.OwnLoop._make

    def make_on_a_full_card(loop, step):
        if loop._memory.allocator.capacity < 1 << 40:  # the second run is without limit
            loop._memory.allocator.capacity = 0
            step._entries[0] = 1 << 30
        make(loop, step)

    monkeypatch.setattr(own_loop.OwnLoop, "_make", make_on_a_full_card)
    found = answer(Counted())
    assert "CUDA out of memory" in found["out_of_memory"]
    assert found["peak_reserved"] < 1 << 30
