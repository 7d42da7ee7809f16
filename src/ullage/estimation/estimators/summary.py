"""A model summary from a forward pass on a virtual GPU."""

from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map_only

from ullage.errors import InvalidValue, UllageError
from ullage.estimation.estimators.printed_summary import ModelSummary, SummaryLayer
from ullage.hardware import GPU
from ullage.jobs.model import Model
from ullage.jobs.sources.build import prepare
from ullage.sandbox.protocol import error_text
from ullage.virtual import VirtualGPU


def summarize(configuration: Model, gpu: GPU) -> ModelSummary:
    """Summarize a model: every layer without layers inside, in the order of the forward pass in training mode."""
    layers: list[SummaryLayer] = []

    def note(module: nn.Module, inputs: Any, output: Any) -> None:
        own = sum(parameter.numel() for parameter in module.parameters(recurse=False))
        outputs = sum(tensor.numel() for tensor in tensors_in(output)) // configuration.batch_size
        layers.append(SummaryLayer(type(module).__name__, outputs, own))

    try:
        with VirtualGPU(gpu, limited=False), torch.no_grad():
            model, task = prepare(configuration)
            model = model.to("cuda").train()
            for module in model.modules():
                if not any(True for _ in module.children()):
                    module.register_forward_hook(note)
            task.forward(model, *moved(task.batch(configuration.batch_size)))
    except (UllageError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise InvalidValue(f"{configuration.name} does not run: {error_text(error)}") from error
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return ModelSummary(tuple(layers), parameters, configuration.batch_size)


def moved(batch: Any) -> Any:
    """Return a batch with every tensor in it on "cuda"."""
    return tree_map_only(torch.Tensor, lambda tensor: tensor.to("cuda"), batch)


def tensors_in(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]
