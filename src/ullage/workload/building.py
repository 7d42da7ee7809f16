"""From a configuration to a model and what it is trained on."""

from __future__ import annotations

from torch import nn

from ullage.errors import InvalidValue
from ullage.virtual.torchvision_operators import make_torchvision_importable
from ullage.workload.adapting import add_lora, checkpoint_activations, freeze
from ullage.workload.configuration import Configuration
from ullage.workload.own_source import build_own, own_task
from ullage.workload.perceptron import build_perceptron, perceptron_task
from ullage.workload.tasks import Task
from ullage.workload.transformers_source import build_transformers
from ullage.workload.transformers_tasks import TransformersTask
from ullage.workload.vision_sources import build_timm, build_torchvision, timm_task, torchvision_task

_BUILDERS = {
    "torchvision": (build_torchvision, torchvision_task),
    "timm": (build_timm, timm_task),
    "hf": (build_transformers, TransformersTask),
    "mlp": (build_perceptron, perceptron_task),
    "own": (build_own, own_task),
}


def build(configuration: Configuration) -> nn.Module:
    """The model, on the CPU and untrained."""
    return prepare(configuration)[0]


def prepare(configuration: Configuration) -> tuple[nn.Module, Task]:
    """The model as it is trained, on the CPU, and its task."""
    make_torchvision_importable()  # timm and transformers import it too, also outside a virtual GPU
    _check(configuration)
    make_model, make_task = _BUILDERS[configuration.source]
    model = make_model(configuration)
    task = make_task(configuration, model)
    if configuration.ckpt:
        checkpoint_activations(model, configuration)
    if configuration.lora_rank is not None:
        model = add_lora(model, configuration.lora_rank)
    if configuration.freeze:
        freeze(model, configuration.freeze)
    return model, task


def _check(configuration: Configuration) -> None:
    """Options that a source has no use for must not be ignored."""
    model, source = configuration.model, configuration.source
    if configuration.seq is not None and source in ("torchvision", "timm"):
        raise InvalidValue(f"{model} takes images, not sequences: use --input-shape 3,224,224")
    if configuration.attn == "eager" and source not in ("timm", "hf"):
        raise InvalidValue(f"{model} has no eager attention to choose; 'math' is the plain kernel of PyTorch's own")
    if configuration.config_file is not None and source != "hf":
        raise InvalidValue(f"{model} has no config file; that is for hf:CLASS. Use --set key=value for its arguments")
