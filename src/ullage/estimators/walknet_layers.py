"""A layer as a walk through a training step takes it, and how wide its numbers are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

FREED, KEPT, SHARED = 0, 1, 2
# Layers that keep their input for the backward pass, and those that keep their output (PyTorch's derivatives.yaml).
KEEP_INPUT = frozenset((
    "linear", "conv1d", "conv2d", "batch_norm", "layer_norm", "attention", "pooling", "leaky_relu", "elu", "selu",
    "gelu", "silu", "mish", "softplus", "prelu", "hardswish",
))  # fmt: skip
KEEP_OUTPUT = frozenset(("relu", "tanh", "sigmoid", "softmax", "attention", "relu6"))
PRODUCTS = frozenset(("linear", "conv1d", "conv2d"))
# Layers that autocast runs in 32 bits, and those whose 32 bits come from their weights.
IN_32_BITS = frozenset(("layer_norm", "softmax", "softplus", "embedding"))


@dataclass(slots=True)
class Layer:
    """One layer: its name; numbers read and put out by the whole batch; weights; what the backward pass needs.

    `output` is FREED after the next layer, KEPT, or SHARED with a tensor that was there before; `beside` are numbers
    kept beside it and `masks` bytes; `workspaces` are bytes that are taken while the layer runs, and while the gradient
    of its input and that of its weights are made. `width` is the bytes of a number put out, `beside_width` of one kept
    beside, and `cast` whether its input is cast to 16 bits.
    """

    name: str
    inputs: float
    outputs: float
    weights: float
    output: int = KEPT
    beside: float = 0.0
    masks: float = 0.0
    workspaces: tuple[int, int, int] = (0, 0, 0)
    width: int = 4
    beside_width: int = 4
    cast: bool = False


def typed(layers: Sequence[Layer], precision: str) -> None:
    """Say of each layer how wide its numbers are, as autocast or the model's own type make them."""
    low, amp = precision in ("bf16", "fp16"), precision.startswith("amp")
    wide = any(layer.name == "layer_norm" for layer in layers)  # then sums between layers are in 32 bits
    before = source = 4  # the width of what was put out last, and of what the last product read
    for place, layer in enumerate(layers):
        if not amp:
            layer.width = layer.beside_width = 2 if low else 4
            continue
        if layer.name in PRODUCTS:
            source = source if wide and _beside_another(layers, place) else before
            layer.cast = source == 4
        layer.beside_width = 4 if wide and layer.name in ("layer_norm", "linear", "conv1d") else 2
        narrow = layer.name in PRODUCTS or layer.name == "attention"
        before = layer.width = 2 if narrow else 4 if layer.name in IN_32_BITS else before
    if amp:
        _cast(layers)
    for place, layer in enumerate(layers[:-1]):
        reader = _read_by(layers, place)
        if reader is not None:
            _scores(layer, layers[place + 1], reader, amp)


def _beside_another(layers: Sequence[Layer], place: int) -> bool:
    """Whether a product reads what the product before it read: queries, keys and values, each of which casts it."""
    before = layers[place - 1]
    return place > 0 and before.name in PRODUCTS and before.inputs == layers[place].inputs


def _read_by(layers: Sequence[Layer], place: int) -> Layer | None:
    """The product after attention that is made of single operators: it puts out probabilities, and not what the product
    reads; `None` for any other layer."""
    layer, after = layers[place], layers[place + 1]
    if layer.name != "attention" or layer.weights or after.name != "dropout" or after.outputs != layer.outputs:
        return None
    reader = next((one for one in layers[place + 2 :] if one.name in PRODUCTS), None)
    return None if reader is None or reader.inputs == layer.outputs else reader


def _scores(attention: Layer, dropout: Layer, reader: Layer, amp: bool) -> None:
    """Scores beside probabilities on the way; on the way back gradients of both and what softmax multiplies them to.
    Autocast makes probabilities in 32 bits and keeps a copy in 16 of what is dropped out; what is read is in 16."""
    if amp:
        attention.width = dropout.width = 4
        dropout.output, dropout.beside, dropout.beside_width = FREED, dropout.outputs, 2
        reader.beside_width, reader.cast = 2, False
    size = int(attention.outputs * attention.width)
    passes = dropout.output == SHARED  # then the gradient of the probabilities is not made in its turn
    attention.workspaces, dropout.workspaces = (size, 2 * size if passes else size, 0), (0, size, 0)


def _cast(layers: Sequence[Layer]) -> None:
    """Under autocast a layer that casts its input keeps the copy, so what it was copied from need not stay."""
    for layer, after in zip(layers, layers[1:], strict=False):
        if layer.output != KEPT or layer.name in KEEP_OUTPUT:
            continue
        if (layer.width == 4 and after.name in PRODUCTS) or (layer.width == 2 and after.name == "softplus"):
            layer.output = FREED
