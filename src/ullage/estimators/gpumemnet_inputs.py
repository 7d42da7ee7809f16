"""What GPUMemNet's networks and `fast` read of a job: totals, the parts of a closed formula, and the layer sequence.

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

from ullage.estimators.gpumemnet_walk import FREED, KEEP_INPUT, KEEP_OUTPUT, KEPT, SHARED, Layer, Walk, Ways, typed
from ullage.units import MIB

Array = npt.NDArray[np.float32]

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

PARTS = (
    "walked_reserved", "walked_peak", "weights", "gradients", "state", "temporaries", "casts", "inputs", "kept",
    "widest", "second_widest", "widest_inputs", "workspace", "largest_weight",
    *(f"activations_{kind}" for kind in KINDS), "fixed",
)  # fmt: skip
# The sum that the networks begin with: what the allocator reserves in a walk through the step, and the context.
STARTS = {"walked_reserved": 1.0, "fixed": 1.0}
FIXED = 760 * MIB  # what a process takes outside of the allocator on an H200, with cuBLAS and cuDNN loaded
TOKEN_FEATURES = len(KINDS) + 6


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


def weight_bytes(precision: str) -> int:
    """Bytes of one weight: autocast keeps weights in 32 bits."""
    return 2 if precision in ("bf16", "fp16") else 4


def activation_bytes(precision: str, kind: str) -> float:
    """Bytes of one number that a layer puts out; under autocast it depends on the layer.

    >>> activation_bytes("fp32", "linear"), activation_bytes("amp_bf16", "linear"), activation_bytes("bf16", "dropout")
    (4.0, 2.0, 3.0)
    """
    narrow = precision in ("bf16", "fp16") or (precision.startswith("amp") and kind not in ("layer_norm", "softmax"))
    return (2.0 if narrow else 4.0) + (1.0 if kind == "dropout" else 0.0)  # dropout keeps a mask of bytes


def optimizer_of(row: Mapping[str, Any]) -> tuple[str, bool]:
    """The optimizer's name without its form, and whether it is the fused form."""
    name = str(row.get("optimizer") or "adam").casefold()
    plain = name.removesuffix("_fused").removesuffix("_foreach").removesuffix("_single")
    return plain, name.endswith("_fused") or name.endswith("_single")


def _tokens(layers: list[Folded], row: Mapping[str, Any]) -> tuple[Array, Array]:
    """A line a token: its kind, size, parameters, place and count; and the bytes that one such layer puts out."""
    precision, batch = str(row.get("precision") or "fp32"), int(row["batch_size"])
    tokens = np.zeros((max(len(layers), 1), TOKEN_FEATURES), dtype=np.float32)
    sizes = np.zeros(max(len(layers), 1), dtype=np.float32)
    for place, (layer, activations, parameters, count, first, last) in enumerate(layers):
        kind = kind_of(layer)
        sizes[place] = activations * batch * activation_bytes(precision, kind)
        tokens[place, KINDS.index(kind)] = 1.0
        keeps = FUNCTIONS.index(spelled(layer)) / len(FUNCTIONS) if spelled(layer) in FUNCTIONS else 0.0
        facts = (math.log1p(sizes[place]) / 10, math.log1p(parameters) / 10, math.log1p(count), first, last, keeps)
        tokens[place, len(KINDS) :] = facts
    return tokens, sizes


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
    return found


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


def named(layer: str) -> str:
    """A layer's name as the walk knows it: its kind, or the name of an activation function.

    >>> named("Conv2d"), named("MaxPool2d"), named("LeakyReLU")
    ('conv2d', 'pooling', 'leaky_relu')
    """
    kind, name = kind_of(layer), spelled(layer)
    return name if kind in ("activation", "other") else kind


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


def _parts(layers: list[Folded], sizes: Array, row: Mapping[str, Any]) -> Array:
    """Bytes of every part that the networks weigh, in the order of PARTS."""
    precision, (name, fused) = str(row.get("precision") or "fp32"), optimizer_of(row)
    along, entry = chain(row), entry_bytes(row)
    reserved, peak = walked(row, along, entry)
    weights = float(row["parameters"]) * weight_bytes(precision)
    heaviest = max((layer[2] for layer in layers), default=0) * weight_bytes(precision)
    by_kind = dict.fromkeys(KINDS, 0.0)
    for size, layer in zip(sizes.tolist(), layers, strict=False):
        by_kind[kind_of(layer[0])] += size * layer[3]
    if not layers:  # a row without its layers: all that it puts out, of no known kind
        by_kind["other"] = float(row.get("activations") or 0) * int(row["batch_size"]) * 4
    widest = sorted((layer.outputs * layer.width for layer in along), reverse=True)[:2] + [0.0, 0.0]
    parts = [
        reserved,
        peak,
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
        *by_kind.values(),
        FIXED,
    ]
    return np.array(parts, dtype=np.float32)


def _kept(layer: Layer) -> float:
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
        put_out[kind_of(str(layer["type"]))] += max(int(layer["activations"]), 1)
    images = put_out["conv2d"] + put_out["pooling"] + (put_out["batch_norm"] if put_out["conv2d"] else 0)
    sequences = sum(put_out[kind] for kind in ("layer_norm", "embedding", "attention", "conv1d"))
    if not images and not sequences:
        return "mlp"
    return "cnn" if images > sequences else "transformer"
