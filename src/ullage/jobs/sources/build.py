"""Builds the model of a configuration, prepares it for training, and chooses its training task."""

import functools
from fnmatch import fnmatchcase
from typing import Any, cast

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ullage.errors import InvalidValue, MissingPackage, ModelLacks, UnknownName
from ullage.jobs.model import Model
from ullage.jobs.sources.own import build_own, build_perceptron, own_task, perceptron_task
from ullage.jobs.sources.transformers import TransformersTask, build_transformers
from ullage.jobs.sources.vision import build_timm, build_torchvision, timm_task, torchvision_task
from ullage.jobs.tasks import Task, assume
from ullage.virtual.torch_cuda.torchvision import make_torchvision_importable


def freeze(model: nn.Module, patterns: tuple[str, ...]) -> None:
    """Turn off gradients for parameters whose name matches a pattern or begins with it."""
    named = dict(model.named_parameters())
    for pattern in patterns:
        matching = [name for name in named if fnmatchcase(name, pattern) or name.startswith(pattern + ".")]
        if not matching:
            prefixes = {name.rpartition(".")[0] for name in named} | {name.partition(".")[0] for name in named}
            raise UnknownName("layer to freeze", pattern, prefixes - {""})
        for name in matching:
            named[name].requires_grad_(False)
    if not any(parameter.requires_grad for parameter in named.values()):
        raise InvalidValue(f"freezing {', '.join(patterns)} leaves nothing to train; use --inference instead")


def add_lora(model: nn.Module, configuration: Model) -> nn.Module:
    """Add LoRA adapters with peft to the named linear layers, or to all but the last. Freeze the rest."""
    try:
        import peft
    except ImportError:
        raise MissingPackage("peft", "LoRA adapters (--lora)") from None
    rank: Any = configuration.lora
    linear = [name for name, part in model.named_modules() if isinstance(part, nn.Linear)]
    if configuration.lora_targets:
        targets: Any = list(configuration.lora_targets)
        where = ", ".join(targets)
    elif hasattr(model, "get_output_embeddings"):
        targets, where = "all-linear", "every linear layer but the last"
    elif len(linear) > 1:
        targets, where = linear[:-1], "every linear layer but the last"
    else:
        raise InvalidValue("LoRA adapters need linear layers before the last one; the model has none")
    if configuration.quantize is not None:
        assume("prepared by peft's prepare_model_for_kbit_training: weights that are not quantized are in 32 bits")
        model = peft.prepare_model_for_kbit_training(
            model, configuration.checkpointing, gradient_checkpointing_kwargs={"use_reentrant": False}
        )
    assume(f"LoRA of rank {rank}, alpha {2 * rank}, on {where}")
    try:
        adapted: nn.Module = peft.get_peft_model(
            model, peft.LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=targets)
        )
    except ValueError as error:
        if not configuration.lora_targets:
            raise
        ends = {name.rpartition(".")[2] for name in linear}
        unknown = next((name for name in targets if name not in ends), where)
        raise UnknownName(f"layer for LoRA in {configuration.name}", unknown, ends) from error
    return adapted


def checkpoint_activations(model: Any, configuration: Model) -> None:
    """Turn on activation checkpointing, with the model's own method if it has one, else around its blocks."""
    if hasattr(model, "gradient_checkpointing_enable"):
        try:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        except ValueError as error:
            raise ModelLacks(f"{configuration.name} has no activation checkpointing: {error}") from None
    elif hasattr(model, "set_grad_checkpointing"):
        try:
            model.set_grad_checkpointing(True)
        except (AssertionError, NotImplementedError) as error:
            raise ModelLacks(f"{configuration.name} has no activation checkpointing: {error}") from None
    else:
        blocks = list(_blocks(model))
        if not blocks:
            raise ModelLacks(f"{configuration.name} has no blocks in an nn.Sequential to checkpoint; leave it out")
        for block in blocks:
            block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
        assume(f"activation checkpointing over {len(blocks)} blocks of the model, by torch.utils.checkpoint")


def _blocks(model: nn.Module) -> Any:
    for child in model.children():
        in_a_row = isinstance(model, nn.Sequential)
        is_block = not isinstance(child, nn.Sequential) and next(child.children(), None) is not None
        if in_a_row and is_block:
            yield child
        else:
            yield from _blocks(child)


_BUILDERS = {
    "torchvision": (build_torchvision, torchvision_task),
    "timm": (build_timm, timm_task),
    "hf": (build_transformers, TransformersTask),
    "mlp": (build_perceptron, perceptron_task),
    "own": (build_own, own_task),
}


def build(configuration: Model) -> nn.Module:
    return prepare(configuration)[0]


def prepare(configuration: Model) -> tuple[nn.Module, Task]:
    """Return the model as it will be trained, on the CPU, and its task."""
    make_torchvision_importable()  # timm and transformers import it too, also outside a virtual GPU
    _check(configuration)
    make_model, make_task = _BUILDERS[configuration.source]
    model = make_model(configuration)
    task = make_task(configuration, model)
    if configuration.checkpointing:
        checkpoint_activations(model, configuration)
    if configuration.lora is not None:
        if configuration.quantize is None:
            model = model.to(getattr(torch, configuration.types.weights))  # peft keeps adapters in 32 bits
        model = add_lora(model, configuration)
    if configuration.freeze:
        freeze(model, tuple(configuration.freeze))
    if configuration.compiled:
        model = cast(nn.Module, torch.compile(model))
    return model, task


def _check(configuration: Model) -> None:
    """Refuse options that do not apply to this source, instead of ignoring them."""
    model, source = configuration.name, configuration.source
    if configuration.sequence_length is not None and source in ("torchvision", "timm"):
        raise InvalidValue(f"{model} takes images, not sequences: use --input-shape 3,224,224")
    if configuration.attention == "eager" and source not in ("timm", "hf"):
        raise InvalidValue(f"{model} has no eager attention; 'math' is PyTorch's plain kernel")
    if configuration.config is not None and source != "hf":
        raise InvalidValue(f"{model} has no config file; that is for hf:CLASS. Use --set key=value for its arguments")
