"""Features of a training run that are known before it runs: layers, sizes, optimizer, precision.

One forward pass on the meta device, which computes nothing: tens of milliseconds, whatever the model's size. A model
that reads values runs on a virtual GPU instead. `layers` is a sequence of (type, activations per sample, parameters).
The tensors that autograd keeps for the backward pass are also counted, because they make up most memory.
"""

import re
import weakref
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from ullage.errors import InvalidValue, UllageError
from ullage.estimation.estimators.summary import tensors_in
from ullage.jobs.model import Model
from ullage.jobs.sources.build import prepare
from ullage.jobs.tasks import Task
from ullage.sandbox.protocol import error_text
from ullage_lab.estimators.fast.meta_device import cheap_kernels, no_start, shortcuts

# Names and choices that the learned estimators share: kinds of layers, optimizers, precisions, widths.

COUNTED = ("linear", "conv1d", "conv2d", "batch_norm", "layer_norm", "dropout", "embedding", "attention", "pooling")
COUNTS = tuple(f"count_{kind}" for kind in COUNTED)
PRECISIONS = ("fp32", "tf32", "amp_fp16", "amp_bf16", "bf16", "fp16")
OPTIMIZERS = ("sgd", "sgdm", "adam", "adamw", "rmsprop", "adagrad", "adafactor")
# Copies of the weights that an optimizer keeps, and those that its foreach form makes while it steps (torch.optim).
STATES = {"sgd": 0, "sgdm": 1, "adam": 2, "adamw": 2, "rmsprop": 1, "adagrad": 1, "adafactor": 0, "nadam": 2}
TEMPORARIES = {"sgd": 0, "sgdm": 0, "adam": 1, "adamw": 1, "rmsprop": 1, "adagrad": 2, "nadam": 2}
ONE_BY_ONE = "adafactor"  # makes the temporaries of one weight after the other
# In this order; the first match with a class's name counts.
_KINDS = (
    ("attention", r"MultiheadAttention"),
    ("conv1d", r"(Lazy)?Conv(Transpose)?1[dD]"),
    ("conv2d", r".*Conv(Transpose)?[23][dD].*|Conv2dSame|ConvNormAct2d"),
    ("batch_norm", r".*(BatchNorm|InstanceNorm).*"),
    ("layer_norm", r".*(LayerNorm|RMSNorm|GroupNorm).*|LayerScale.*"),
    ("linear", r".*Linear"),
    ("dropout", r".*Dropout.*|DropPath|StochasticDepth"),
    ("embedding", r".*Embedding.*"),
    ("pooling", r".*Pool.*"),
    ("recurrent", r"LSTM|GRU|RNN"),
)
_ACTIVATION = re.compile(r".*(ReLU|ELU|GELU|SiLU|Swish|Mish|Tanh|Sigmoid|Softplus|Hardswish).*")


def optimizer_of(row: Mapping[str, Any]) -> tuple[str, bool]:
    """Return the optimizer's name without its form, and whether it is the fused form."""
    name = str(row.get("optimizer") or "adam").casefold()
    plain = name.removesuffix("_fused").removesuffix("_foreach").removesuffix("_single")
    return plain, name.endswith("_fused") or name.endswith("_single")


@dataclass(frozen=True, kw_only=True)
class Features:
    """A training run as the estimators see it. Activations and `kept_*` are for one sample; `kept_numbers` are numbers
    that autograd keeps, at the precision of the arithmetic, `kept_bytes` what it keeps in other types (masks, indices);
    `norm_numbers` are what layer norms put out, `output_elements` what the model does.
    """

    batch_size: int
    input_elements: int
    sequence_length: int | None
    parameters: int
    trainable: int
    activations: int
    kept_numbers: int
    kept_bytes: int
    norm_numbers: int
    output_elements: int
    depth: int
    counts: dict[str, int]
    activation_function: str | None
    optimizer: str
    precision: str
    inference: bool = False
    layers: tuple[tuple[str, int, int], ...] = field(repr=False, default=())


@dataclass
class _Seen:
    layers: list[tuple[str, int, int]] = field(default_factory=list)
    counted: set[int] = field(default_factory=set)
    storages: dict[int, torch.Tensor] = field(default_factory=dict)
    output: int = 0

    def keep(self, tensor: torch.Tensor) -> torch.Tensor:
        """Note a tensor that autograd keeps, and keep it alive, so that its address is not reused."""
        self.storages.setdefault(tensor.untyped_storage()._cdata, tensor)
        return tensor


def features(configuration: Model) -> Features:
    """Return the features of a run by its configuration.

    >>> found = features(Model("mlp:x", settings={"widths": [8, 4, 2]}, batch_size=16, optimizer="adam"))
    >>> found.layers, found.parameters, found.counts["linear"]
    ((('linear', 4, 36), ('relu', 4, 0), ('linear', 2, 10)), 46, 2)
    """
    seen = _Seen()
    configuration = replace(configuration, compiled=False)  # its layers are the same
    try:
        with torch.device("meta"):
            with no_start():
                model, task = prepare(configuration)
            with shortcuts():
                inputs = _observe(configuration, model, task, seen, "meta")
    except Exception as error:  # the model reads values; errors of the model itself appear below
        if isinstance(error, UllageError):
            raise
        seen = _Seen()
        model, inputs = _on_virtual_gpu(configuration, seen)
    return _summed(configuration, model, inputs, seen)


def _on_virtual_gpu(configuration: Model, seen: _Seen) -> tuple[nn.Module, list[torch.Tensor]]:
    from ullage.hardware import gpu
    from ullage.virtual import VirtualGPU

    try:
        with VirtualGPU(gpu("H200"), limited=False):
            model, task = prepare(configuration)
            model = model.to("cuda")
            return model, _observe(configuration, model, task, seen, "cuda")
    except UllageError:
        raise
    except Exception as error:
        raise InvalidValue(f"{configuration.short_name} does not run: {error_text(error)}") from error


def _observe(configuration: Model, model: nn.Module, task: Task, seen: _Seen, device: str) -> list[torch.Tensor]:
    """Run the forward pass and the loss; return the inputs."""
    hooks = [
        part.register_forward_hook(_noting(configuration.batch_size, seen))
        for part in model.modules()
        if _is_layer(part)
    ]
    batch = configuration.batch_size
    own = {tensor.untyped_storage()._cdata for tensor in (*model.parameters(), *model.buffers())}
    model.train(not configuration.inference)
    try:
        inputs, targets = _moved(task.batch(batch), device)
        with (
            cheap_kernels(lambda out: seen.layers.append(("attention", out.numel() // batch, 0))),
            torch.set_grad_enabled(not configuration.inference),
            torch.autograd.graph.saved_tensors_hooks(_keeping(seen), lambda nothing: nothing),
        ):
            if configuration.inference:
                task.predict(model, inputs, targets)
            else:
                out = task.forward(model, inputs, targets)
                loss = task.loss(out, targets)
                seen.output = sum(tensor.numel() for tensor in tensors_in(out)) // batch
                for tensor in (*tensors_in(out), *tensors_in(inputs), loss):  # alive through the backward pass
                    seen.keep(tensor)
    finally:
        for hook in hooks:
            hook.remove()
    for place in own:
        seen.storages.pop(place, None)
    return tensors_in(inputs)


def _keeping(seen: _Seen) -> Any:
    """For autograd, which is given nothing to keep instead: there is no backward pass. Its nodes hold on to this
    function, the tensors in `seen` to the nodes: a circle through C++, which Python's collector would not see."""
    held = weakref.ref(seen)

    def note(tensor: torch.Tensor) -> None:
        alive = held()
        if alive is not None:
            alive.keep(tensor)

    return note


def _is_layer(part: nn.Module) -> bool:
    """Whether a module has no inner modules, or is of a known kind with its own weights (timm's norms with act)."""
    if all(inside is None for inside in part._modules.values()):
        return True
    return kind_of(part) != type(part).__name__.lower() and any(True for _ in part.parameters(recurse=False))


def _own(part: nn.Module) -> Iterator[nn.Parameter]:
    """Yield the parameters of a layer, with a shortcut for the many without inner modules."""
    if part._modules:
        yield from part.parameters()
    else:
        yield from {id(own): own for own in part._parameters.values() if own is not None}.values()


def _noting(batch: int, seen: _Seen) -> Any:
    def note(part: nn.Module, inputs: Any, output: Any) -> None:
        parameters = 0
        if id(part) not in seen.counted:
            seen.counted.add(id(part))
            parameters = sum(tensor.numel() for tensor in _own(part))
        if isinstance(part, nn.MultiheadAttention) and seen.layers and seen.layers[-1][0] == "attention":
            seen.layers.pop()  # the same attention, recorded without its parameters
        outputs = tensors_in(output)
        seen.layers.append((kind_of(part), outputs[0].numel() // batch if outputs else 0, parameters))

    return note


def kind_of(part: nn.Module) -> str:
    """Return the type of a layer in the sequence: "linear", "conv2d", ..., or its class name in lower case.

    >>> kind_of(nn.Conv2d(1, 1, 1)), kind_of(nn.SiLU())
    ('conv2d', 'silu')
    """
    return _kind_named(type(part).__name__)


@lru_cache(maxsize=1024)
def _kind_named(name: str) -> str:
    for kind, pattern in _KINDS:
        if re.fullmatch(pattern, name):
            return kind
    return name.lower()


def _summed(configuration: Model, model: nn.Module, inputs: list[torch.Tensor], seen: _Seen) -> Features:
    batch = configuration.batch_size
    kinds = Counter(kind for kind, _, _ in seen.layers)
    tensors = list(seen.storages.values())
    numbers = sum(tensor.untyped_storage().nbytes() // tensor.element_size() for tensor in tensors if _floats(tensor))
    others = sum(tensor.untyped_storage().nbytes() for tensor in tensors if not _floats(tensor))
    acts = Counter(
        type(part).__name__.lower().removesuffix("activation")
        for part in model.modules()
        if next(part.children(), None) is None and _ACTIVATION.fullmatch(type(part).__name__)
    )
    ids = next((tensor for tensor in inputs if not tensor.is_floating_point() and tensor.dim() == 2), None)
    parameters = list(model.parameters())
    return Features(
        batch_size=batch,
        input_elements=sum(tensor.numel() for tensor in inputs) // batch,
        sequence_length=ids.shape[1] if ids is not None else configuration.sequence_length,
        parameters=sum(parameter.numel() for parameter in parameters),
        trainable=sum(parameter.numel() for parameter in parameters if parameter.requires_grad),
        activations=sum(outputs for _, outputs, _ in seen.layers),
        kept_numbers=numbers // batch,
        kept_bytes=others // batch,
        norm_numbers=sum(outputs for kind, outputs, _ in seen.layers if kind == "layer_norm"),
        output_elements=seen.output,
        depth=sum(kinds[kind] for kind in ("linear", "conv1d", "conv2d", "recurrent")),
        counts={kind: kinds[kind] for kind in COUNTED},
        activation_function=acts.most_common(1)[0][0] if acts else None,
        optimizer=configuration.optimizer,
        precision=configuration.precision or "fp32",
        inference=configuration.inference,
        layers=tuple(seen.layers),
    )


def _floats(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _moved(batch: Any, device: str) -> Any:
    return tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), batch)
