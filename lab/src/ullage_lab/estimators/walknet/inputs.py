"""What walknet's networks and `fast` read of a job: totals, the parts of a closed formula, and the layer sequence.

Everything comes from one row of a data set (`ullage dataset`) or the same facts of a model by name; nothing is
measured. Sizes enter on a logarithmic scale, because memory grows by factors and the data spans five decades.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ullage.errors import InvalidValue, UllageError
from ullage.jobs.model import Model
from ullage.units import MIB
from ullage.virtual.kernels.reductions import Kind, buffer_sizes, iterate
from ullage_lab.estimators.walknet.features import (
    COUNTS,
    FUNCTIONS,
    KINDS,
    ONE_BY_ONE,
    OPTIMIZERS,
    PRECISIONS,
    STATES,
    TEMPORARIES,
    Detail,
    Features,
    features,
    kind_of_layer_name,
    named,
    optimizer_of,
    spelled,
    weight_bytes,
)
from ullage_lab.estimators.walknet.walk import (
    FREED,
    KEEP_INPUT,
    KEEP_OUTPUT,
    KEPT,
    SHARED,
    AllocatorWalk,
    WalkedLayer,
    Ways,
    typed,
)

# The layers of a row of a data set as a walk takes them, and what the walks of a job come to.

_SMS = 132  # multiprocessors of an H200


def chain(row: Mapping[str, Any]) -> list[WalkedLayer]:
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
            WalkedLayer(
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


def bias_buffer(layer: WalkedLayer) -> int:
    """Bytes of partial sums that the gradient of a bias takes, a sum over all rows of a batch, on an H200.

    How many numbers a row has follows from the numbers read, put out and learned.

    >>> bias_buffer(WalkedLayer("linear", 32768 * 192, 32768 * 432, 192 * 432 + 432)) >> 20
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


def walks(row: Mapping[str, Any], layers: list[WalkedLayer], entry: float) -> Walked:
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


def walked(row: Mapping[str, Any], layers: list[WalkedLayer], entry: float) -> tuple[float, float]:
    """What the allocator reserves and what is allocated at most in a walk through the step, in bytes."""
    if not layers:
        return 0.0, 0.0
    name, fused = optimizer_of(row)
    precision = str(row.get("precision") or "fp32")
    temporaries = 0 if fused else None if name == ONE_BY_ONE else TEMPORARIES.get(name, 1)
    ways = Ways(weight_bytes(precision), entry, STATES.get(name, 2), temporaries, precision.startswith("amp"))
    others = max(float(row["parameters"]) - sum(layer.weights for layer in layers), 0.0)
    walk = AllocatorWalk(layers, others, ways)
    return float(walk.run()), float(walk.allocator.peak_allocated)


def entry_bytes(row: Mapping[str, Any]) -> float:
    """The size of the input batch: ids of words have 8 bytes, other inputs the width of the model's type."""
    numbers = float(row.get("input_elements") or 0) * int(row["batch_size"])
    width = 8 if row.get("sequence_length") else weight_bytes(str(row.get("precision") or "fp32"))
    return numbers * width


Array = npt.NDArray[np.float32]

PARTS = (
    "walked_reserved", "walked_peak", "weights", "gradients", "state", "temporaries", "casts", "inputs", "kept",
    "widest", "second_widest", "widest_inputs", "workspace", "largest_weight",
    "walked_bare", "walked_copied",
    *(f"activations_{kind}" for kind in KINDS), "fixed",
)  # fmt: skip
# The sum that the networks begin with: what the allocator reserves in a walk through the step, and the context.
STARTS = {"walked_reserved": 1.0, "fixed": 1.0}
FIXED = 760 * MIB  # what a process takes outside of the allocator on an H200, with cuBLAS and cuDNN loaded
WALKS = tuple(PARTS.index(name) for name in ("walked_reserved", "walked_bare", "walked_copied"))
TOKEN_FEATURES = len(KINDS) + 6


@dataclass(frozen=True, slots=True)
class Inputs:
    """One job as the networks take it.

    `totals` are logarithms and flags, `parts` bytes of the closed formula's terms, `tokens` the layers (equal ones
    together), `sizes` the bytes that a token's outputs take and `repeats` how many layers it stands for.
    """

    totals: Array
    parts: Array
    tokens: Array
    sizes: Array
    repeats: Array


def inputs_of(row: Mapping[str, Any]) -> Inputs:
    """The inputs of a row of a data set, or of any mapping with the same keys.

    >>> layers = [{"type": "linear", "activations": 10, "parameters": 7850}]
    >>> row = {"batch_size": 32, "parameters": 7850, "activations": 10, "input_elements": 784, "layers": layers}
    >>> inputs_of(row | {"optimizer": "adam", "precision": "fp32"}).parts[2:5].tolist()
    [31400.0, 31400.0, 62800.0]
    """
    layers = folded(row.get("layers") or ())
    tokens, sizes = _tokens(layers, row)
    parts = _parts(layers, sizes, row)
    repeats = np.array([layer[3] for layer in layers] or [1], dtype=np.float32)
    return Inputs(_totals(row, parts), parts, tokens, sizes, repeats)


Folded = tuple[str, int, int, int, float, float]  # type, activations, parameters, how many, where first, where last


def folded(layers: Sequence[Mapping[str, Any]]) -> list[Folded]:
    """The layers with equal ones put together, in the order of their first appearance.

    A network of 24 equal blocks becomes one block, with 24 as the count: attention over it costs 500 times less.

    >>> [layer[:4] for layer in folded([{"type": "linear", "activations": 4, "parameters": 8}] * 3)]
    [('linear', 4, 8, 3)]
    """
    found: dict[tuple[str, int, int], list[int]] = {}
    for place, layer in enumerate(layers):
        key = (str(layer["type"]), int(layer["activations"]), int(layer["parameters"]))
        found.setdefault(key, []).append(place)
    scale = max(len(layers) - 1, 1)
    return [(*key, len(places), places[0] / scale, places[-1] / scale) for key, places in found.items()]


def activation_bytes(precision: str, kind: str) -> float:
    """Bytes of one number that a layer puts out; under autocast it depends on the layer.

    >>> activation_bytes("fp32", "linear"), activation_bytes("amp_bf16", "linear"), activation_bytes("bf16", "dropout")
    (4.0, 2.0, 3.0)
    """
    narrow = precision in ("bf16", "fp16") or (precision.startswith("amp") and kind not in ("layer_norm", "softmax"))
    return (2.0 if narrow else 4.0) + (1.0 if kind == "dropout" else 0.0)  # dropout keeps a mask of bytes


def _tokens(layers: list[Folded], row: Mapping[str, Any]) -> tuple[Array, Array]:
    """A line a token: its kind, size, parameters, place and count; and the bytes that one such layer puts out."""
    precision, batch = str(row.get("precision") or "fp32"), int(row["batch_size"])
    tokens = np.zeros((max(len(layers), 1), TOKEN_FEATURES), dtype=np.float32)
    sizes = np.zeros(max(len(layers), 1), dtype=np.float32)
    for place, (layer, activations, parameters, count, first, last) in enumerate(layers):
        kind = kind_of_layer_name(layer)
        sizes[place] = activations * batch * activation_bytes(precision, kind)
        tokens[place, KINDS.index(kind)] = 1.0
        keeps = FUNCTIONS.index(spelled(layer)) / len(FUNCTIONS) if spelled(layer) in FUNCTIONS else 0.0
        facts = (math.log1p(sizes[place]) / 10, math.log1p(parameters) / 10, math.log1p(count), first, last, keeps)
        tokens[place, len(KINDS) :] = facts
    return tokens, sizes


def _parts(layers: list[Folded], sizes: Array, row: Mapping[str, Any]) -> Array:
    """Bytes of every part that the networks weigh, in the order of PARTS."""
    precision, (name, fused) = str(row.get("precision") or "fp32"), optimizer_of(row)
    along, entry = chain(row), entry_bytes(row)
    steps = walks(row, along, entry)
    weights = float(row["parameters"]) * weight_bytes(precision)
    heaviest = max((layer[2] for layer in layers), default=0) * weight_bytes(precision)
    by_kind = dict.fromkeys(KINDS, 0.0)
    for size, layer in zip(sizes.tolist(), layers, strict=False):
        by_kind[kind_of_layer_name(layer[0])] += size * layer[3]
    if not layers:  # a row without its layers: all that it puts out, of no known kind
        by_kind["other"] = float(row.get("activations") or 0) * int(row["batch_size"]) * 4
    widest = sorted((layer.outputs * layer.width for layer in along), reverse=True)[:2] + [0.0, 0.0]
    parts = [
        steps.reserved,
        steps.peak,
        weights,
        weights,
        weights * STATES.get(name, 2),
        0.0 if fused else float(heaviest) if name == ONE_BY_ONE else weights * TEMPORARIES.get(name, 1),
        float(row["parameters"]) * 2 if precision.startswith("amp") else 0.0,
        entry,
        sum(_kept(layer) for layer in along),
        widest[0],
        widest[1],
        max((layer.inputs * layer.width for layer in along), default=0.0),
        float(max((max(layer.workspaces) for layer in along), default=0)),
        float(heaviest),
        steps.bare,
        steps.copied,
        *by_kind.values(),
        FIXED,
    ]
    return np.array(parts, dtype=np.float32)


def _kept(layer: WalkedLayer) -> float:
    own = layer.outputs * layer.width if layer.output == KEPT else 0.0
    return own + layer.beside * layer.beside_width + layer.masks


def _totals(row: Mapping[str, Any], parts: Array) -> Array:
    """Logarithms of sizes, counts and one-hot choices: what the paper names, and optimizer, precision, sequence."""
    name, fused = optimizer_of(row)
    precision, function = str(row.get("precision") or "fp32"), spelled(str(row.get("activation_function") or "none"))
    batch, activations = int(row["batch_size"]), float(row.get("activations") or 0)
    plain = (batch, row["parameters"], activations, activations * batch, row.get("input_elements") or 0,
             row.get("sequence_length") or 0, row.get("depth") or 0)  # fmt: skip
    values = [math.log1p(float(value)) for value in plain]
    values += [math.log1p(float(row.get(count) or 0)) for count in COUNTS]
    values += [math.log1p(float(part)) for part in parts[:-1]]
    values.append(math.log(closed_sum(parts)))
    values += (parts[1:-1] / (parts[0] + 1.0)).tolist()  # which part leads
    values += [float(name == known) for known in OPTIMIZERS] + [float(fused)]
    values += [float(precision == known) for known in PRECISIONS]
    values += [float(function == known) for known in FUNCTIONS]
    return np.array(values, dtype=np.float32)


TOTALS = (
    "batch_size", "parameters", "activations", "activations_batch", "input_elements", "sequence_length", "depth",
    *COUNTS, *(f"bytes_{part}" for part in PARTS[:-1]), "closed_formula", *(f"share_{part}" for part in PARTS[1:-1]),
    *(f"optimizer_{name}" for name in OPTIMIZERS), "optimizer_fused",
    *(f"precision_{name}" for name in PRECISIONS), *(f"function_{name}" for name in FUNCTIONS),
)  # fmt: skip


def closed_sum(parts: Array) -> float:
    """The closed formula in bytes: weights, state, what does not grow, and the higher of two peaks.

    One peak is the end of the forward pass with all that is kept, the other the optimizer's step with its temporaries.

    >>> parts = np.zeros(len(PARTS), dtype=np.float32)
    >>> parts[2:6], parts[8:10], parts[-1] = (4, 4, 8, 2), (5, 3), 1
    >>> closed_sum(parts)
    21.0
    """
    weights, gradients, state, temporaries, casts = (float(part) for part in parts[2:7])
    return weights + state + casts + float(parts[-1]) + max(float(parts[8] + parts[9]), gradients + temporaries)


def family_of(row: Mapping[str, Any]) -> str:
    """The family that a job belongs to, told from its layers.

    Convolutional where convolutions, their norms and pooling put out most, an MLP without norms over features,
    embeddings, attention or convolutions, a transformer else.

    >>> family_of({"layers": [{"type": "linear", "activations": 4, "parameters": 8}]})
    'mlp'
    """
    put_out = dict.fromkeys(KINDS, 0)
    for layer in row.get("layers") or ():
        put_out[kind_of_layer_name(str(layer["type"]))] += max(int(layer["activations"]), 1)
    images = put_out["conv2d"] + put_out["pooling"] + (put_out["batch_norm"] if put_out["conv2d"] else 0)
    sequences = sum(put_out[kind] for kind in ("layer_norm", "embedding", "attention", "conv1d"))
    if not images and not sequences:
        return "mlp"
    return "cnn" if images > sequences else "transformer"


# The facts of a job by name in the form of a data set's row, as `ullage lab data clean` writes them.


def row_of(configuration: Model) -> dict[str, Any]:
    """The row of a configuration, without anything measured.

    >>> row = row_of(Model("mlp:x", settings={"widths": [8, 4, 2]}, batch_size=16, optimizer="adam"))
    >>> row["parameters"], row["count_linear"], row["layers"][0]["activations"]
    (46, 2, 4)
    """
    try:
        return from_features(features(configuration))
    except UllageError:
        raise
    except Exception as error:
        lines = [line for line in str(error).splitlines() if line.strip()] or [""]
        raise InvalidValue(f"{configuration.short_name} does not run: {type(error).__name__}: {lines[0]}") from error


def from_features(found: Features) -> dict[str, Any]:
    """The row of features."""
    return {
        "batch_size": found.batch_size,
        "input_elements": found.input_elements,
        "sequence_length": found.sequence_length,
        "parameters": found.parameters,
        "activations": found.activations,
        "activations_batch": found.activations * found.batch_size,
        "depth": found.depth,
        **{f"count_{kind}": count for kind, count in found.counts.items()},
        "activation_function": found.activation_function,
        "optimizer": found.optimizer,
        "precision": found.precision,
        "trainable": found.trainable,
        "kept_numbers": found.kept_numbers,
        "kept_bytes": found.kept_bytes,
        "norm_numbers": found.norm_numbers,
        "output_elements": found.output_elements,
        "layers": [{"type": kind, "activations": out, "parameters": own} for kind, out, own in found.layers],
        "tensors": [_tensors(detail) for detail in found.details],
    }


def _tensors(detail: Detail) -> dict[str, int]:
    facts = {name: getattr(detail, name) for name in ("inputs", "output", "beside", "beside_bytes")}
    return facts | dict(zip(("forward", "data", "filter"), detail.workspaces, strict=True))
