"""Names and choices that the learned estimators share: kinds of layers, optimizers, precisions, widths."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

COUNTS = (
    "count_linear", "count_conv1d", "count_conv2d", "count_batch_norm", "count_layer_norm", "count_dropout",
    "count_embedding", "count_attention", "count_pooling",
)  # fmt: skip
PRECISIONS = ("fp32", "tf32", "amp_fp16", "amp_bf16", "bf16", "fp16")
OPTIMIZERS = ("sgd", "sgdm", "adam", "adamw", "rmsprop", "adagrad", "adafactor")
# Copies of the weights that an optimizer keeps, and those that its foreach form makes while it steps (torch.optim).
STATES = {"sgd": 0, "sgdm": 1, "adam": 2, "adamw": 2, "rmsprop": 1, "adagrad": 1, "adafactor": 0, "nadam": 2}
TEMPORARIES = {"sgd": 0, "sgdm": 0, "adam": 1, "adamw": 1, "rmsprop": 1, "adagrad": 2, "nadam": 2}
ONE_BY_ONE = "adafactor"  # makes the temporaries of one weight after the other
# Activation functions by what they keep for the backward pass: nothing of their own, their output, or their input.
FUNCTIONS = (
    "none",
    "relu",
    "leaky_relu",
    "elu",
    "selu",
    "tanh",
    "sigmoid",
    "gelu",
    "silu",
    "mish",
    "softplus",
    "prelu",
)
KINDS = ("linear", "conv1d", "conv2d", "batch_norm", "layer_norm", "dropout", "embedding", "attention", "pooling",
         "activation", "softmax", "other")  # fmt: skip
_SPELLINGS = {
    "batch_normalization": "batch_norm", "batchnorm1d": "batch_norm", "batchnorm2d": "batch_norm",
    "layernorm": "layer_norm", "adaptiveavgpool2d": "pooling", "maxpool2d": "pooling", "avgpool2d": "pooling",
    "multiheadattention": "attention", "logsoftmax": "softmax",
    "leakyrelu": "leaky_relu", "identity": "none", "swish": "silu", "gelu_new": "gelu",
}  # fmt: skip
_IS_FUNCTION = {*FUNCTIONS, "hardswish", "relu6", "hardsigmoid", "quickgelu", "celu", "glu"}


def kind_of(layer: str) -> str:
    """The kind of a layer, whoever wrote its name.

    >>> kind_of("BatchNorm2d"), kind_of("LeakyReLU"), kind_of("Fold")
    ('batch_norm', 'activation', 'other')
    """
    name = spelled(layer)
    return name if name in KINDS else "activation" if name in _IS_FUNCTION else "other"


def spelled(name: str) -> str:
    """A layer's or activation function's name as it is written here.

    >>> spelled("LeakyReLU"), spelled("batch_normalization"), spelled("Identity")
    ('leaky_relu', 'batch_norm', 'none')
    """
    plain = name.strip().casefold()
    return _SPELLINGS.get(plain, plain)


def named(layer: str) -> str:
    """A layer's name as the walk knows it: its kind, or the name of an activation function.

    >>> named("Conv2d"), named("MaxPool2d"), named("LeakyReLU")
    ('conv2d', 'pooling', 'leaky_relu')
    """
    kind, name = kind_of(layer), spelled(layer)
    return name if kind in ("activation", "other") else kind


def weight_bytes(precision: str) -> int:
    """Bytes of one weight: autocast keeps weights in 32 bits."""
    return 2 if precision in ("bf16", "fp16") else 4


def optimizer_of(row: Mapping[str, Any]) -> tuple[str, bool]:
    """The optimizer's name without its form, and whether it is the fused form."""
    name = str(row.get("optimizer") or "adam").casefold()
    plain = name.removesuffix("_fused").removesuffix("_foreach").removesuffix("_single")
    return plain, name.endswith("_fused") or name.endswith("_single")
