"""A model summary from a forward pass on a virtual GPU."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map_only

from ullage.errors import InvalidValue, UllageError
from ullage.estimation.estimators.printed_summary import LayerSummary, SummaryLayer
from ullage.hardware import GPU
from ullage.jobs.model import Model
from ullage.jobs.sources.build import prepare
from ullage.sandbox.protocol import error_text
from ullage.virtual import VirtualGPU


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


def tensors_in(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]
