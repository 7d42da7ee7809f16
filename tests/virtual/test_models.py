"""The models of a run: parameters, copies of weights, quantized weights, and what each layer keeps."""

import copy
import io

import pytest
import torch
from rich.console import Console
from torch import nn

import ullage
from ullage.estimation.tables import print_layers

WEIGHTS = 2 * 1024 * 1024 * 4  # bytes of `Net`


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(1024, 1024, bias=False)
        self.inner = nn.Sequential(nn.ReLU(), nn.Linear(1024, 1024, bias=False))

    def forward(self, x):
        return self.inner(self.first(x))


def training(make, prepare=lambda model: None, after=lambda model, kept: None, call=None, batch=64):
    def train():
        model = make().cuda()
        kept = prepare(model)
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
        for _ in range(4):
            optimizer.zero_grad()
            (call or model.__call__)(torch.randn(batch, 1024, device="cuda")).sum().backward()
            optimizer.step()
            after(model, kept)

    return train


def average(model, kept):
    with torch.no_grad():
        for old, new in zip(kept.parameters(), model.parameters(), strict=True):
            old.lerp_(new, 0.1)


COPIES = {
    "deepcopy": (copy.deepcopy, average),
    "AveragedModel": (torch.optim.swa_utils.AveragedModel, lambda model, kept: kept.update_parameters(model)),
    "a list of clones": (lambda model: [p.clone().detach() for p in model.parameters()], lambda model, kept: None),
    "copied into": (lambda model: [torch.zeros_like(p).copy_(p) for p in model.parameters()], lambda *_: None),
    "one that is evaluated": (copy.deepcopy, lambda model, kept: kept.eval()(torch.ones(4, 1024, device="cuda"))),
}


@pytest.mark.parametrize("name", COPIES)
def test_copies_of_the_weights_are_no_activations(name):
    plain = ullage.estimate(training(Net), gpu="H200")
    e = ullage.estimate(training(Net, *COPIES[name]), gpu="H200")
    assert e.breakdown["parameters"] == plain.breakdown["parameters"] == WEIGHTS and "copies" not in plain.breakdown
    assert WEIGHTS <= e.breakdown["copies"] <= WEIGHTS + 512  # AveragedModel counts its updates
    assert sum(e.breakdown.values()) == e.process_memory
    assert "copies of the weights" in str(e) and "copies" not in str(plain)


def test_layers_that_are_built_by_copying_are_weights():
    def forward():
        layer = nn.TransformerEncoderLayer(64, 4, device="cuda", batch_first=True)
        encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False).eval()
        with torch.no_grad():
            encoder(torch.randn(2, 8, 64, device="cuda"))

    e = ullage.estimate(forward, gpu="H200")
    assert "copies" not in e.breakdown and e.breakdown["parameters"] >= e.models[0]["bytes"]


class State:
    """As bitsandbytes keeps it: scales, and a state of their own."""

    def __init__(self, shape, nested):
        self.shape = shape
        self.absmax = torch.empty(shape.numel() // 64, dtype=torch.uint8, device="cuda")
        self.state2 = nested


class Packed(nn.Parameter):
    pass


class Quantized(Net):
    def forward(self, x):
        weight = torch.empty(1024, 1024, device="cuda")  # unpacked
        return super().forward(nn.functional.linear(x, weight))


def test_quantized_weights_are_parameters_of_so_many_bits():
    def make():
        model = Quantized().cuda()
        shape = torch.Size([1024, 1024])
        packed = Packed(torch.empty(shape.numel() // 2, 1, dtype=torch.uint8, device="cuda"), requires_grad=False)
        packed.quant_state = State(shape, None)
        model.register_parameter("packed", packed)
        return model

    e = ullage.estimate(training(make), gpu="H200")
    four_bit = 1024 * 1024 // 2 + 1024 * 1024 // 64
    (model,) = e.models
    assert model["parameters"] == 3 * 1024 * 1024 and model["trainable"] == 2 * 1024 * 1024
    assert model["types"] == {"4-bit": four_bit, "float32": WEIGHTS}
    assert e.breakdown["parameters"] == WEIGHTS + four_bit
    assert "weights: 4-bit and float32" in str(e) and "3,145,728 parameters, 2,097,152 trainable" in str(e)


def test_weights_frozen_after_the_first_call():
    def freeze(model):
        model(torch.ones(2, 1024, device="cuda"))
        model.first.requires_grad_(False)

    (model,) = ullage.estimate(training(Net, freeze), gpu="H200").models
    assert (model["parameters"], model["trainable"]) == (2 * 1024 * 1024, 1024 * 1024)


def test_a_part_called_directly_has_its_full_path():
    e = ullage.estimate(training(lambda: Whole(Net())), gpu="H200")
    assert e.peak_module in ("net.first", "net.inner.1") and e.peak_class == "Linear"
    assert f"{e.peak_module} (Linear)" in e.peak_words
    assert [row["path"] for row in e.layers][:3] == ["", "net", "net.first"]


class Whole(nn.Module):
    """Never called itself, as in frameworks with a training_step."""

    def __init__(self, net):
        super().__init__()
        self.net = net

    def __call__(self, x):
        return self.net(x)


def test_layers_say_their_outputs_parameters_and_what_they_keep():
    e = ullage.estimate(training(Net, batch=256), gpu="H200")
    rows = {row["path"]: row for row in e.layers}
    output = 256 * 1024 * 4
    assert list(rows) == ["", "first", "inner", "inner.0", "inner.1"]
    assert rows["first"] == {
        "model": "Net",
        "path": "first",
        "class": "Linear",
        "depth": 1,
        "output": [256, 1024],
        "parameters": 1024 * 1024,
        "trainable": 1024 * 1024,
        "kept": 0,
    }
    assert rows["inner.0"]["kept"] == output  # the input of the second layer; that of the first is not the model's
    assert rows[""]["kept"] == rows["inner"]["kept"] == 2 * output  # with the result, which the loss still holds
    assert rows[""]["parameters"] == 2 * 1024 * 1024
    assert "layers" not in e.to_dict(layers=False)
    out = io.StringIO()
    print_layers(e, Console(file=out, width=80, color_system=None), depth=1)
    assert max(map(len, out.getvalue().splitlines())) <= 80
    text = " ".join(out.getvalue().split())
    assert "256×1024" in text and "1,048,576" in text and "ReLU" not in text and "--depth 2 shows all" in text


def test_the_largest_of_each_part_is_kept_and_variation_noted():
    e = ullage.estimate(training(Net, batch=8192), gpu="H200")
    assert e.breakdown["gradients"] < e.largest["gradients"] == WEIGHTS
    assert e.largest["activations"] >= e.breakdown["activations"]
    text = str(e)
    assert f"At the peak (backward pass, step {e.peak_step})" in text


class AllAlike(nn.Module):
    """As metrics of torchmetrics: `==` makes a new module of both."""

    def __init__(self, *parts):
        super().__init__()
        self.parts = nn.ModuleList(parts)
        for index, part in enumerate(parts):
            setattr(self, f"part{index}", part)

    def __hash__(self):
        return 1

    def __eq__(self, other):
        return AllAlike(self, other)

    def forward(self, x):
        return x


class OwnParameters(Net):
    """With a method of its own in the place of PyTorch's."""

    def __init__(self):
        super().__init__()
        self.metrics = AllAlike(AllAlike(), AllAlike())

    def parameters(self):
        return [self.first.weight, self.inner[1].weight]

    def forward(self, x):
        return self.metrics.part1(super().forward(x))


def test_classes_with_methods_of_their_own_are_followed():
    e = ullage.estimate(training(OwnParameters), gpu="H200")
    assert e.breakdown["parameters"] == WEIGHTS
