"""A model summary: each layer with the size of its output and its number of parameters.

It comes from a forward pass on a virtual GPU, or from the text that torchsummary or torchinfo printed.
"""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map_only

from ullage.errors import InvalidValue, UllageError
from ullage.hardware import GPU
from ullage.jobs.model import Model
from ullage.jobs.sources.build import prepare
from ullage.sandbox.protocol import error_text
from ullage.virtual import VirtualGPU

_NUMBER = re.compile(r"-?\d+")
_TORCHSUMMARY = re.compile(r"^\s*([A-Za-z_]\w*)-\d+\s+(\[.*\])\s+([\d,]+)\s*$")
_TORCHINFO = re.compile(r"^([\s│├└─|+]*)([A-Za-z_]\w*)(?: \([^)]*\))?(?:: [\d-]+)?\s+(\[[^\]]*\]|--)\s+(.+?)\s*$")
_TOTAL = re.compile(r"^\s*Total params:\s*([\d,]+)", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class SummaryLayer:
    """A layer: its class, the number of output values for one sample, and its own parameters."""

    kind: str
    outputs: int
    parameters: int


@dataclass(frozen=True, slots=True)
class LayerSummary:
    """The layers of a model, the number of all parameters, and the batch size if the text has it."""

    layers: tuple[SummaryLayer, ...]
    parameters: int
    batch: int | None = None


def summarize(configuration: Model, gpu: GPU) -> LayerSummary:
    """Summarize a model: every layer without layers inside, in the order of the forward pass."""
    layers: list[SummaryLayer] = []

    def note(module: nn.Module, inputs: Any, output: Any) -> None:
        tensors = tensors_in(output)
        own = sum(parameter.numel() for parameter in module.parameters(recurse=False))
        outputs = sum(tensor.numel() for tensor in tensors) // configuration.batch_size
        layers.append(SummaryLayer(type(module).__name__, outputs, own))

    with VirtualGPU(gpu, limited=False):
        model = run_forward(configuration, note)
        parameters = sum(parameter.numel() for parameter in model.parameters())
    return LayerSummary(tuple(layers), parameters, configuration.batch_size)


def run_forward(configuration: Model, note: Callable[[nn.Module, Any, Any], None] | None = None) -> nn.Module:
    """Build a model and run its forward pass in training mode on the current virtual GPU; `note` gets each layer."""
    try:
        model, task = prepare(configuration)
        model = model.to("cuda").train()
        for module in model.modules() if note is not None else ():
            if not any(True for _ in module.children()):
                module.register_forward_hook(note)  # type: ignore[arg-type]
        with torch.no_grad():
            task.forward(model, *moved(task.batch(configuration.batch_size)))
    except (UllageError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise InvalidValue(f"{configuration.name} does not run: {error_text(error)}") from error
    return model


def moved(batch: Any) -> Any:
    """Return a batch with every tensor in it on "cuda"."""
    return tree_map_only(torch.Tensor, lambda tensor: tensor.to("cuda"), batch)


def read_summary(text: str) -> LayerSummary:
    """Read the text that torchsummary or torchinfo printed."""
    lines = [row for row in map(_TORCHSUMMARY.match, text.splitlines()) if row]
    rows = [(row[1], _first_shape(row[2]), _whole(row[3])) for row in lines] or _torchinfo_rows(text)
    if not rows:
        raise InvalidValue(
            "a summary must be the text that torchsummary or torchinfo print, with the columns layer, output shape "
            "and parameters; no layers found"
        )
    total = _TOTAL.search(text)
    parameters = _whole(total[1]) if total else sum(own for _, _, own in rows)
    batches = {shape[0] for _, shape, _ in rows if shape and shape[0] > 0}
    layers = tuple(SummaryLayer(kind, math.prod(shape[1:]), own) for kind, shape, own in rows)
    return LayerSummary(layers, parameters, batches.pop() if len(batches) == 1 else None)


def _torchinfo_rows(text: str) -> list[tuple[str, list[int], int]]:
    """Read the rows, except those of modules that contain others (deeper rows follow)."""
    matches = [row for row in map(_TORCHINFO.match, text.splitlines()) if row]
    depths = [len(row[1]) for row in matches] + [0]
    rows = []
    for place, row in enumerate(matches):
        if depths[place + 1] <= depths[place] and row[3] != "--":
            rows.append((row[2], _first_shape(row[3]), _whole(row[4].split()[0])))
    return rows


def _first_shape(text: str) -> list[int]:
    """Return the first shape, if a layer has several outputs."""
    return [int(number) for number in _NUMBER.findall(text.split("]")[0])]


def _whole(text: str) -> int:
    digits = text.replace(",", "")
    return int(digits) if digits.isdigit() else 0


def tensors_in(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]
