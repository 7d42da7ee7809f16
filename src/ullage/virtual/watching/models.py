"""The models of a run: parameters, types of weights, and the tensors that each layer keeps for the backward pass. A
model, a module that is called from outside any other module, is read at its first call and first optimizer step."""

import math
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from ullage.virtual.memory.allocations import ACTIVATIONS, PARAMETERS
from ullage.virtual.memory.tensors import DeviceMemory

_DEEPEST = 3  # objects inside of objects: a weight's quantization state has one of its own


@dataclass(slots=True)
class Weight:
    """One parameter: its number of values, bytes, type ("float32", "4-bit") and whether it is trained."""

    count: int
    nbytes: int
    kind: str
    trainable: bool


def weight_of(parameter: torch.Tensor) -> Weight:
    """Describe a parameter with all its tensors: packed values, scales and codes of a quantized one."""
    shape = getattr(getattr(parameter, "quant_state", None), "shape", None)  # bitsandbytes packs two in a byte
    count = math.prod(shape) if shape is not None else parameter.numel()
    parts = tensors_of(parameter)
    sizes = [tensor.numel() * tensor.element_size() for tensor in parts]
    converted = hasattr(parameter, "__tensor_flatten__") and any(part.dtype != parameter.dtype for part in parts)
    plain = parameter.dtype.is_floating_point and shape is None and not converted
    kind = (
        str(parameter.dtype).removeprefix("torch.")
        if plain
        else f"{round(8 * max(sizes, default=0) / max(1, count))}-bit"
    )
    return Weight(count, sum(sizes), kind, parameter.requires_grad)


def tensors_of(parameter: torch.Tensor) -> list[torch.Tensor]:
    """Return the tensors that hold a parameter's values: itself, or the parts of a tensor subclass."""
    if hasattr(parameter, "__tensor_flatten__"):
        inner = [getattr(parameter, name) for name in parameter.__tensor_flatten__()[0]]
        return [part for tensor in inner if isinstance(tensor, torch.Tensor) for part in tensors_of(tensor)]
    own = [parameter] if parameter.layout is torch.strided else []
    return [*own, *_carried(vars(parameter), _DEEPEST)]


def _carried(values: Mapping[str, Any], depth: int) -> Iterator[torch.Tensor]:
    for value in list(values.values()):
        if isinstance(value, torch.Tensor):
            if not isinstance(value, torch.nn.Parameter) and value.layout is torch.strided:
                yield value
        elif depth and hasattr(value, "__dict__") and not isinstance(value, torch.nn.Module | type):
            yield from _carried(vars(value), depth - 1)


def parameters_of(module: torch.nn.Module) -> list[torch.nn.Parameter]:
    """Return the module's direct parameters; its class may redefine `parameters`."""
    return [parameter for _, parameter in torch.nn.Module.named_parameters(module, recurse=False)]


def buffers_of(module: torch.nn.Module) -> list[torch.Tensor]:
    return [buffer for _, buffer in torch.nn.Module.named_buffers(module, recurse=False)]


class CalledModel:
    """One model of a run: `known` has the numbers of its modules; `claimed` gets the allocations of its weights."""

    def __init__(
        self, module: torch.nn.Module, known: Mapping[Any, int], memory: DeviceMemory, claimed: set[int]
    ) -> None:
        self.name = type(module).__name__
        self._module = weakref.ref(module)
        self.paths = {known[below]: path for path, below in module.named_modules()}
        self.classes = {known[below]: type(below).__name__ for below in module.modules()}
        self.weights: dict[int, list[Weight]] = {}
        self._known = known
        self.look()
        self._mark(module, memory, claimed)

    def look(self) -> None:
        module = self._module()
        if module is None:
            return
        seen: set[int] = set()
        self.weights = {}
        for below in module.modules():
            own = [one for one in parameters_of(below) if id(one) not in seen and not is_lazy(one)]
            seen.update(map(id, own))
            if own and below in self._known:
                self.weights[self._known[below]] = [weight_of(parameter) for parameter in own]

    def _mark(self, module: torch.nn.Module, memory: DeviceMemory, claimed: set[int]) -> None:
        """Mark weights and buffers as parameters, however they came to the GPU, except copies of another model's."""
        parameters = (one for below in module.modules() for one in parameters_of(below) if not is_lazy(one))
        held = [part for parameter in parameters for part in tensors_of(parameter)]
        buffers = (one for below in module.modules() for one in buffers_of(below) if not is_lazy(one))
        held += [buffer for buffer in buffers if buffer.layout is torch.strided]
        spans = [span for span in map(memory.span_of, held) if span is not None]
        for span in spans:
            if span.kind == ACTIVATIONS and memory.copied_from.get(span.index) not in claimed:
                span.kind = PARAMETERS
        claimed.update(span.index for span in spans)

    def summary(self) -> dict[str, Any]:
        weights = [weight for own in self.weights.values() for weight in own]
        types: dict[str, int] = {}
        for weight in weights:
            types[weight.kind] = types.get(weight.kind, 0) + weight.nbytes
        return {
            "name": self.name,
            "parameters": sum(weight.count for weight in weights),
            "trainable": sum(weight.count for weight in weights if weight.trainable),
            "bytes": sum(weight.nbytes for weight in weights),
            "types": types,
        }

    def layers(self, shapes: Mapping[int, list[int | None]], kept_bytes: Mapping[int, int]) -> list[dict[str, Any]]:
        """Return an entry per module, including all modules below it; see `Estimate.layers`."""
        rows: dict[str, dict[str, Any]] = {}
        for number, path in self.paths.items():
            depth = path.count(".") + 1 if path else 0
            where = {"model": self.name, "path": path, "class": self.classes[number], "depth": depth}
            rows[path] = {**where, "output": shapes.get(number), "parameters": 0, "trainable": 0, "kept": 0}
        for number, path in self.paths.items():
            own = self.weights.get(number, [])
            parts = path.split(".") if path else []
            for length in range(len(parts), -1, -1):  # the module and all above it
                row = rows[".".join(parts[:length])]
                row["parameters"] += sum(weight.count for weight in own)
                row["trainable"] += sum(weight.count for weight in own if weight.trainable)
                row["kept"] += kept_bytes.get(number, 0)
        return list(rows.values())
