"""Who asked for memory: operator, module, pass and step of the peak, and of every block of a trace."""

import gc
import weakref

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import ullage
from ullage.estimation.asking import estimate
from ullage.estimation.timeline.trace import Trace


class Net(nn.Module):
    def __init__(self, wide):
        super().__init__()
        self.first = nn.Linear(64, 64)
        self.inner = nn.Sequential(nn.Linear(64, wide), nn.Linear(wide, 64))

    def forward(self, x):
        return self.inner(self.first(x))


def training(make, steps=3, batch=512):
    def train():
        model = make().cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for _ in range(steps):
            optimizer.zero_grad()
            model(torch.randn(batch, 64, device="cuda")).sum().backward()
            optimizer.step()

    return train


def test_the_peak_names_module_operator_pass_and_step():
    e = estimate(training(lambda: Net(20000)), gpu="H200")
    assert (e.peak_module, e.peak_pass, e.peak_operator) == ("inner.1", "backward", "aten.mm.default")
    assert e.peak_step == 2  # the momentum is there from the end of the first step on
    assert e.peak_words == "in the backward pass of inner.1 (Linear), step 2 (mm)"
    assert e.peak_words in str(e)


def test_a_peak_in_the_optimizer_and_one_outside_of_the_model():
    def first():
        model = nn.Linear(4096, 4096).cuda()
        optimizer = torch.optim.Adam(model.parameters())
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(1, 4096, device="cuda")).sum().backward()
            optimizer.step()

    e = estimate(first, gpu="H200")
    assert (e.peak_module, e.peak_pass) == ("Adam.step()", "optimizer")
    e = estimate(lambda: torch.zeros(1 << 20, device="cuda"), gpu="H200")
    assert (e.peak_module, e.peak_pass, e.peak_step) == (None, "outside", None)
    assert "outside of the model" in e.peak_words


def test_recomputation_in_the_backward_pass_is_the_modules_own():
    class Checkpointed(Net):
        def forward(self, x):
            return checkpoint(self.inner, self.first(x), use_reentrant=False)

    trace = Trace()
    estimate(training(lambda: Checkpointed(512)), gpu="H200", trace=trace)
    seen = {(trace.modules[trace.places[p][1]], trace.passes[trace.places[p][2]]) for p in set(trace.place.tolist())}
    assert {("inner.0", "forward"), ("inner.0", "backward"), ("inner.1", "backward")} <= seen


def test_the_backward_pass_belongs_to_the_module_of_its_node():
    trace = Trace()
    estimate(training(lambda: Net(512)), gpu="H200", trace=trace)
    sizes = {}
    for size, number in zip(trace.size.tolist(), trace.place.tolist(), strict=True):
        key = trace.modules[trace.places[number][1]], trace.passes[trace.places[number][2]]
        sizes.setdefault(key, set()).add(size)
    weight = 512 * 64 * 4
    assert weight in sizes["inner.0", "backward"] and weight in sizes["inner.1", "backward"]
    assert 64 * 64 * 4 in sizes["first", "backward"]


def test_several_models_and_lone_modules_are_named():
    class Other(Net):
        pass

    with ullage.virtual_gpu("H200") as gpu:
        Net(64).cuda()(torch.randn(8, 64, device="cuda"))
        assert gpu.origins.module_names()[:3] == [None, "Net", "first"]
        Other(64).cuda()(torch.randn(8, 64, device="cuda"))
        assert {"Net.first", "Other.inner.1"} <= set(gpu.origins.module_names())


def test_weights_gradients_and_states_belong_to_their_module():
    trace = Trace()
    estimate(training(lambda: Net(1000)), gpu="H200", trace=trace)
    number = trace.modules.index("inner.0")
    weight = (1000 * 64 * 4 + 511) // 512 * 512
    kinds = [
        trace.kinds[k]
        for k, o, s in zip(trace.kind, trace.owner, trace.size, strict=True)
        if (o, s) == (number, weight)
    ]
    assert kinds.count("parameters") == 1 and kinds.count("optimizer") == 1 and "gradients" in kinds


def test_no_module_is_kept_alive_and_errors_leave_no_trace():
    class Broken(nn.Module):
        def forward(self, x):
            raise KeyError("broken")

    with ullage.virtual_gpu("H200") as gpu:
        model = Net(64).cuda()
        model(torch.randn(8, 64, device="cuda"))
        gone = weakref.ref(model)
        del model
        gc.collect()
        assert gone() is None
        with pytest.raises(KeyError):
            nn.Sequential(nn.Linear(4, 4), Broken()).cuda()(torch.randn(2, 4, device="cuda"))
        torch.zeros(1 << 22, device="cuda")
        assert gpu.peak_place.part == "outside"
    assert not torch.nn.modules.module._global_forward_pre_hooks
