"""The layers of a row of a data set as a walk takes them, and what the walks of a job come to."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ullage.estimators.walknet_layers import FREED, KEEP_INPUT, KEEP_OUTPUT, KEPT, SHARED, Layer, typed
from ullage.estimators.walknet_names import (
    ONE_BY_ONE,
    STATES,
    TEMPORARIES,
    named,
    optimizer_of,
    weight_bytes,
)
from ullage.estimators.walknet_walk import Walk, Ways
from ullage.virtual.kernels.reductions import Kind, buffer_sizes, iterate

_SMS = 132  # multiprocessors of an H200


def chain(row: Mapping[str, Any]) -> list[Layer]:
    """The layers of a row as a walk takes them.

    A row that has only the three numbers of each layer is taken for a chain: what the backward pass needs then follows
    from the kind of a layer and of the one after it.
    """
    batch = int(row["batch_size"])
    given = row.get("layers") or ()
    tensors = row.get("tensors") or _guessed(row)
    found = []
    for layer, facts in zip(given, tensors, strict=True):
        found.append(
            Layer(
                name=named(str(layer["type"])),
                inputs=int(facts["inputs"]) * batch,
                outputs=int(layer["activations"]) * batch,
                weights=int(layer["parameters"]),
                output=int(facts["output"]),
                beside=int(facts["beside"]) * batch,
                masks=int(facts["beside_bytes"]) * batch,
                workspaces=(int(facts["forward"]), int(facts["data"]), int(facts["filter"])),
            )
        )
    typed(found, str(row.get("precision") or "fp32"))
    for layer in found:
        if layer.name in ("linear", "conv1d"):
            layer.workspaces = (*layer.workspaces[:2], bias_buffer(layer))
    return found


def bias_buffer(layer: Layer) -> int:
    """Bytes of partial sums that the gradient of a bias takes, a sum over all rows of a batch, on an H200.

    How many numbers a row has follows from the numbers read, put out and learned.

    >>> bias_buffer(Layer("linear", 32768 * 192, 32768 * 432, 192 * 432 + 432)) >> 20
    108
    """
    if not layer.weights or not layer.inputs or not layer.outputs:
        return 0
    share = layer.inputs / layer.outputs
    width = round((math.sqrt(1 + 4 * share * layer.weights) - 1) / (2 * share))
    if width < 1 or width + round(share * width) * width != layer.weights or layer.outputs % width:
        return 0  # no bias
    summed = iterate((int(layer.outputs // width), width), (width, 1), (0,), layer.width, layer.width)
    found = buffer_sizes(summed, Kind(layer.width, 4), _SMS)
    return sum(found) if found else 0


def _guessed(row: Mapping[str, Any]) -> list[dict[str, int]]:
    """How tensors live in a chain of layers of which only the three numbers are known."""
    given = row.get("layers") or ()
    names = [named(str(layer["type"])) for layer in given]
    before, found = int(row.get("input_elements") or 0), []
    for name, after, layer in zip(names, [*names[1:], "softmax"], given, strict=False):
        outputs = int(layer["activations"])
        kept = name in KEEP_OUTPUT or after in KEEP_INPUT
        state = SHARED if name in ("none", "flatten") else KEPT if kept else FREED
        masks = outputs if name == "dropout" else 0
        facts = {"inputs": before, "output": state, "beside": 0, "beside_bytes": masks}
        found.append(facts | {"forward": 0, "data": 0, "filter": 0})
        before = outputs
    return found


@dataclass(frozen=True)
class Walked:
    """What three walks reserve in bytes, and what is allocated at most in the first.

    How much cuDNN takes while a convolution runs is looked up; where its shape is an odd one that is a guess. `bare` is
    a walk without any of it, `copied` one in which every filter's gradient takes copies of what it reads.
    """

    reserved: float
    peak: float
    bare: float
    copied: float


def walks(row: Mapping[str, Any], layers: list[Layer], entry: float) -> Walked:
    """Walk through the step, three times where there are convolutions."""
    reserved, peak = walked(row, layers, entry)
    convolutions = [layer for layer in layers if layer.name == "conv2d"]
    if not convolutions:
        return Walked(reserved, peak, reserved, reserved)
    looked_up = [layer.workspaces for layer in convolutions]
    for layer in convolutions:
        layer.workspaces = (0, 0, 0)
    bare, _ = walked(row, layers, entry)
    for layer, (forward, data, filter_) in zip(convolutions, looked_up, strict=True):
        copies = int((layer.inputs + layer.outputs) * layer.width)
        layer.workspaces = (forward, data, max(filter_, copies))
    copied, _ = walked(row, layers, entry)
    for layer, found in zip(convolutions, looked_up, strict=True):
        layer.workspaces = found
    return Walked(reserved, peak, bare, copied)


def walked(row: Mapping[str, Any], layers: list[Layer], entry: float) -> tuple[float, float]:
    """What the allocator reserves and what is allocated at most in a walk through the step, in bytes."""
    if not layers:
        return 0.0, 0.0
    name, fused = optimizer_of(row)
    precision = str(row.get("precision") or "fp32")
    temporaries = 0 if fused else None if name == ONE_BY_ONE else TEMPORARIES.get(name, 1)
    ways = Ways(weight_bytes(precision), entry, STATES.get(name, 2), temporaries, precision.startswith("amp"))
    others = max(float(row["parameters"]) - sum(layer.weights for layer in layers), 0.0)
    walk = Walk(layers, others, ways)
    return float(walk.run()), float(walk.allocator.peak_allocated)


def entry_bytes(row: Mapping[str, Any]) -> float:
    """The size of the input batch: ids of words have 8 bytes, other inputs the width of the model's type."""
    numbers = float(row.get("input_elements") or 0) * int(row["batch_size"])
    width = 8 if row.get("sequence_length") else weight_bytes(str(row.get("precision") or "fp32"))
    return numbers * width
