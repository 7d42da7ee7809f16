"""Shortcuts on the meta device answer as PyTorch does, and leave to it what is unusual."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from ullage.errors import InvalidValue
from ullage.jobs import Model
from ullage_lab.draw.generated import generate
from ullage_lab.estimators.fast import features as fast_features
from ullage_lab.estimators.fast.features import features
from ullage_lab.estimators.fast.meta_device import no_start, shortcuts


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def described(found: Any) -> list[Any]:
    parts = found if isinstance(found, tuple) else (found,)
    return [(part.shape, part.stride(), part.dtype, part.device) for part in parts]


ATEN: Any = torch.ops.aten
IMAGES = meta(2, 8, 9, 9)
LAST = meta(2, 8, 9, 9).to(memory_format=torch.channels_last)
TURNED = meta(2, 6, 5).transpose(1, 2)
CALLS: dict[str, Any] = {
    "gelu": lambda: functional.gelu(IMAGES),
    "gelu of channels last": lambda: functional.gelu(LAST),
    "relu of a transposed one": lambda: functional.relu(TURNED),
    "relu of whole numbers": lambda: functional.relu(meta(3, dtype=torch.int64)),
    "prelu": lambda: functional.prelu(IMAGES, meta(8)),
    "exp of whole numbers": lambda: meta(3, dtype=torch.int64).exp(),
    "triu": lambda: meta(4, 4, dtype=torch.bool).triu(1),
    "addmm": lambda: torch.addmm(meta(5), meta(2, 3), meta(3, 5)),
    "addmm with a whole matrix": lambda: torch.addmm(meta(2, 5), meta(2, 3), meta(3, 5)),
    "addmm in 16 bits": lambda: torch.addmm(*(meta(*s, dtype=torch.bfloat16) for s in ((5,), (2, 3), (3, 5)))),
    "linear": lambda: functional.linear(meta(2, 3, 4), meta(5, 4), meta(5)),
    "batch norm": lambda: ATEN.native_batch_norm(IMAGES, meta(8), meta(8), meta(8), meta(8), True, 0.1, 1e-5),
    "batch norm, channels last": lambda: ATEN.native_batch_norm(LAST, None, None, None, None, True, 0.1, 1e-5),
    "batch norm in use": lambda: ATEN.native_batch_norm(IMAGES, meta(8), meta(8), meta(8), meta(8), False, 0.1, 1e-5),
    "layer norm": lambda: ATEN.native_layer_norm(meta(2, 3, 4), [3, 4], meta(3, 4), meta(3, 4), 1e-5),
    "softmax": lambda: meta(2, 3).softmax(-1),
    "cross entropy": lambda: functional.cross_entropy(meta(2, 3), meta(2, dtype=torch.int64)),
    "cross entropy apart": lambda: functional.cross_entropy(meta(2, 3), meta(2, dtype=torch.int64), reduction="none"),
    "dropout": lambda: torch.native_dropout(IMAGES, 0.5, True),
    "convolution": lambda: functional.conv2d(IMAGES, meta(4, 8, 3, 3), meta(4), stride=2, padding=1),
    "convolution in groups": lambda: functional.conv2d(IMAGES, meta(8, 1, 3, 3), None, dilation=2, groups=8),
    "convolution, channels last": lambda: functional.conv2d(LAST, meta(4, 8, 3, 3)),
    "convolution backwards": lambda: functional.conv_transpose2d(IMAGES, meta(8, 4, 3, 3), stride=2),
    "convolution of sequences": lambda: functional.conv1d(meta(2, 8, 9), meta(4, 8, 3), padding=1),
    "sum": lambda: IMAGES + meta(2, 8, 9, 9),
    "sum of different layouts": lambda: IMAGES + LAST,
    "sum with broadcasting": lambda: IMAGES + meta(9),
    "a number less a tensor": lambda: 1 - IMAGES,
    "sum with twice the other": lambda: torch.add(meta(3), meta(3), alpha=2),
    "sum with another type": lambda: meta(3) + meta(3, dtype=torch.float64),
    "quotient with a number": lambda: IMAGES / 3,
    "quotient of whole numbers": lambda: meta(3, dtype=torch.int64) / 3,
    "masked": lambda: meta(2, 3, 4, 4).masked_fill(meta(4, 4, dtype=torch.bool), 1.0),
    "masked with broadcasting": lambda: meta(2, 1, 4).masked_fill(meta(2, 3, 1, dtype=torch.bool), 1.0),
    "on the CPU": lambda: functional.gelu(torch.ones(3)),
}


@pytest.mark.parametrize("name", CALLS)
def test_the_answer_is_the_one_that_pytorch_gives(name: str) -> None:
    wanted = described(CALLS[name]())
    with shortcuts():
        assert described(CALLS[name]()) == wanted


@pytest.mark.parametrize(
    "call",
    [
        lambda: torch.addmm(meta(5), meta(2, 3), meta(4, 5)),
        lambda: functional.conv2d(IMAGES, meta(4, 7, 3, 3)),
        lambda: functional.conv2d(meta(2, 8, 2, 2), meta(4, 8, 3, 3)),
        lambda: functional.layer_norm(meta(2, 3), [4]),
        lambda: meta(2, 3) + meta(2, 4),
    ],
)
def test_shapes_that_do_not_fit_fail_as_ever(call: Any) -> None:
    with pytest.raises(RuntimeError), shortcuts():
        call()


def test_weights_elsewhere_start_as_ever() -> None:
    before = nn.init.ones_
    with no_start():
        assert nn.Linear(3, 2, device="meta").weight.is_meta
        assert nn.init.ones_(torch.zeros(2)).tolist() == [1, 1]
    assert nn.init.ones_ is before


@pytest.mark.parametrize("family", ["mlp", "cnn", "transformer"])
def test_generated_models_need_no_virtual_gpu(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any) -> Any:
        raise AssertionError("went to the virtual GPU")

    monkeypatch.setattr(fast_features, "_on_virtual_gpu", refuse)
    for row in generate(family, 15, 4):
        assert features(Model.from_row(row)).parameters == row["parameters"]


def test_a_model_that_does_not_fit_its_input_is_refused() -> None:
    row = {
        "model": "ullage_lab.networks.generated:mlp",
        "batch": 4,
        "input": [5],
        "classes": 2,
        "settings": {"widths": [8, 4]},
    }
    with pytest.raises(InvalidValue, match="does not run"):
        features(Model.from_row(row))
