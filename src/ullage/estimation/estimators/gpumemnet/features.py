"""The inputs of GPUMemNet for a training run: totals of a model summary, and the sequence of its layers.

As published (Yousefzadeh-Asl-Miandoab et al., arXiv 2602.17817, section 4.3, and chapter 5 of the dissertation): batch
size, parameters, activations of one sample, activations times batch size, and how many layers there are of the types
that matter to a family; for MLPs and CNNs the activation function as the sine and cosine of its place in a list. The
Transformer also reads a tuple for every layer: its type, activations and parameters. Numbers enter as they are.

Neither the optimizer nor the precision is among them, and nothing is known of allocators or kernels.
"""

import dataclasses
import functools
import math
from collections import Counter
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

from ullage.errors import InvalidValue, UllageError
from ullage.estimation.estimators.printed_summary import FUNCTION, LAYERS, ModelSummary, SummaryLayer
from ullage.jobs.model import Model
from ullage.sandbox.protocol import error_text

FAMILIES = ("mlp", "cnn", "transformer")
COUNTED = {
    "mlp": ("linear", "batch_norm", "dropout"),
    "cnn": ("depth", "conv2d", "batch_norm", "dropout"),
    "transformer": ("depth", "linear", "layer_norm", "dropout"),
}
# In the order of the published lists, whose places are encoded; transformers have no such feature.
FUNCTIONS: dict[str, tuple[str, ...]] = {
    "mlp": ("elu", "gelu", "identity", "leakyrelu", "mish", "prelu", "relu", "selu", "silu", "softplus", "tanh"),
    "cnn": ("elu", "gelu", "leakyrelu", "mish", "prelu", "relu", "selu", "silu", "softplus", "tanh"),
    "transformer": (),
}
# The codes of a layer's type in the published tuples. Other types are "other", or not in the sequence.
TYPES: dict[str, dict[str, tuple[float, ...]]] = {
    "mlp": {"linear": (0, 1), "other": (1, 0)},
    "cnn": {"conv2d": (0, 1), "linear": (1, 1), "dropout": (0, 0), "batch_norm": (0, 0), "other": (1, 0)},
    "transformer": {
        "layer_norm": (1, 0, 0, 0),
        "embedding": (0, 1, 0, 0),
        "linear": (0, 0, 1, 0),
        "dropout": (0, 0, 0, 1),
    },
}
LONGEST = {"mlp": 46, "cnn": 119, "transformer": 314}  # tuples that the published networks read; the rest is cut off
_WEIGHTED = ("linear", "conv1d", "conv2d", "recurrent")  # these make up the depth
_KINDS: tuple[tuple[str, tuple[type[nn.Module], ...]], ...] = (
    ("linear", (nn.Linear, nn.MultiheadAttention)),  # a summary prints the projection inside
    ("conv1d", (nn.Conv1d, nn.ConvTranspose1d)),
    ("conv2d", (nn.Conv2d, nn.ConvTranspose2d, nn.Conv3d)),
    ("batch_norm", (nn.modules.batchnorm._BatchNorm,)),
    ("layer_norm", (nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)),
    ("dropout", (nn.modules.dropout._DropoutNd,)),
    ("embedding", (nn.Embedding, nn.EmbeddingBag)),
    ("recurrent", (nn.RNNBase,)),
)
_SPELLINGS = {
    "batch_normalization": "batch_norm",
    "batchnorm1d": "batch_norm",
    "batchnorm2d": "batch_norm",
    "batchnormact2d": "batch_norm",
    "layernorm": "layer_norm",
    "leaky_relu": "leakyrelu",
    "geluactivation": "gelu",
    "newgeluactivation": "gelu",
    "siluactivation": "silu",
    "none": "identity",
}


def count(summary: ModelSummary, kind: str) -> int:
    """Return the number of layers of a type; the depth counts layers with weights, without norms."""
    kinds = Counter(type_of(layer.kind) for layer in summary.layers)
    return sum(kinds[one] for one in _WEIGHTED) if kind == "depth" else kinds[kind]


def totals_of(summary: ModelSummary, family: str) -> list[float]:
    """Return the features of a run, in the order of `names_of`."""
    batch_size, activations = summary.batch_size or 1, sum(layer.outputs for layer in summary.layers)
    totals = [batch_size, summary.parameters, activations, activations * batch_size]
    totals += [count(summary, kind) for kind in COUNTED[family]]
    return [*map(float, totals), *_encoded(_function(summary), FUNCTIONS[family])]


def names_of(family: str) -> list[str]:
    names = ["batch_size", "parameters", "activations", "activations_batch", *COUNTED[family]]
    return names + (["function_sin", "function_cos"] if FUNCTIONS[family] else [])


def _encoded(function: str | None, known: tuple[str, ...]) -> list[float]:
    """Return the sine and cosine of a function's place on half a circle; zeros for an unknown function."""
    if not known:
        return []
    name = spelled(function or "identity")
    if name not in known:
        return [0.0, 0.0]
    angle = math.pi * known.index(name) / len(known)
    return [math.sin(angle), math.cos(angle)]


def tuples_of(summary: ModelSummary, family: str) -> list[list[float]]:
    """Return the sequence of layers: the code of the type, activations, parameters."""
    codes = TYPES[family]
    tuples = [
        [*codes.get(kind, codes.get("other", ())), outputs, own]
        for kind, outputs, own in ((type_of(layer.kind), *layer[1:]) for layer in summary.layers)
        if kind in codes or "other" in codes
    ]
    return tuples[: LONGEST[family]]


def family_of(summary: ModelSummary) -> str:
    """Return the family whose networks read a model, by its most frequent layers."""
    norms = count(summary, "layer_norm") + count(summary, "embedding")
    if count(summary, "conv2d") > norms:
        return "cnn"
    return "transformer" if norms else "mlp"


def spelled(name: str) -> str:
    """Return the name of a layer or a function as the paper spells it."""
    plain = name.strip().casefold()
    return _SPELLINGS.get(plain, plain)


def _function(summary: ModelSummary) -> str | None:
    """Return the activation function of a summary: the most frequent one among its layers."""
    functions = Counter(layer.kind.lower() for layer in summary.layers if FUNCTION.fullmatch(layer.kind))
    return summary.activation_function or (functions.most_common(1)[0][0] if functions else None)


def summary_of(configuration: Model) -> ModelSummary:
    """Return the summary of a model by name, from one forward pass on PyTorch's meta device.

    A model that needs values runs on the CPU instead, with two samples, as in torchsummary.
    """
    try:
        return _summarized(configuration, configuration, "meta")
    except UllageError:
        raise
    except Exception:
        pass
    try:
        return _summarized(configuration, dataclasses.replace(configuration, batch_size=2), "cpu")
    except UllageError:
        raise
    except Exception as error:
        raise InvalidValue(f"{configuration.name} does not run: {error_text(error)}") from error


def _summarized(configuration: Model, run: Model, device: str) -> ModelSummary:
    from ullage.jobs.sources.build import prepare

    layers: list[SummaryLayer] = []
    counted: set[int] = set()

    def note(part: nn.Module, inputs: Any, output: Any) -> None:
        output_tensor = next((leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)), None)
        own = 0 if id(part) in counted else sum(tensor.numel() for tensor in part.parameters())
        counted.add(id(part))
        outputs = 0 if output_tensor is None else output_tensor.numel() // run.batch_size
        layers.append(SummaryLayer(_class_name(type(part)), outputs, own))

    with torch.device(device):
        model, task = prepare(run)
        for part in model.modules():
            if _is_layer(part):
                part.register_forward_hook(note)
        model.train()
        batch = tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), task.batch(run.batch_size))
        with torch.no_grad(), _Ones():
            task.forward(model, *batch)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return ModelSummary(tuple(layers), parameters, configuration.batch_size)


def _is_layer(part: nn.Module) -> bool:
    """Return whether a module is a layer: it has no modules inside, or is of a known type and has its own weights
    (timm's norms with act)."""
    if not any(True for _ in part.children()):
        return True
    return any(isinstance(part, classes) for _, classes in _KINDS) and any(True for _ in part.parameters(recurse=False))


def _class_name(layer: type) -> str:
    """Return the name of a class of layers, or of PyTorch's class that it extends (timm's norms with act)."""
    known = tuple(each for _, classes in _KINDS for each in classes)
    names = (base.__name__ for base in layer.__mro__ if issubclass(base, known) and base.__name__ in LAYERS)
    return next(names, layer.__name__)


@functools.cache
def type_of(name: str) -> str:
    """Return the type of a class of layers by its name: "linear", "conv2d", ..., or the name in lower case."""
    layer = LAYERS.get(name, object)
    return next((kind for kind, classes in _KINDS if issubclass(layer, classes)), spelled(name))


class _Ones(TorchFunctionMode):
    """Answers 1 to a model that reads a value on the meta device: "is this mask full?" is answered with yes."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _ASKING and args[0].is_meta:
            return _ASKING[func](1)
        return func(*args, **(kwargs or {}))


_ASKING: dict[Any, Any] = {
    torch.Tensor.item: int,
    torch.Tensor.__bool__: bool,
    torch.Tensor.__int__: int,
    torch.Tensor.__float__: float,
}
