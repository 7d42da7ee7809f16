"""What is done to a model before it is trained: layers frozen, low-rank adapters added, activations recomputed."""

from __future__ import annotations

import functools
from fnmatch import fnmatchcase
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

from ullage.errors import InvalidValue, MissingPackage, UnknownName
from ullage.workload.assumptions import assume
from ullage.workload.configuration import Configuration


def freeze(model: nn.Module, patterns: tuple[str, ...]) -> None:
    """Parameters whose name matches a pattern, or begins with it, need no gradient.

    >>> model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    >>> freeze(model, ("0",))
    >>> [parameter.requires_grad for parameter in model.parameters()]
    [False, False, True, True]
    """
    named = dict(model.named_parameters())
    for pattern in patterns:
        found = [name for name in named if fnmatchcase(name, pattern) or name.startswith(pattern + ".")]
        if not found:
            prefixes = {name.rpartition(".")[0] for name in named} | {name.partition(".")[0] for name in named}
            raise UnknownName("layer to freeze", pattern, prefixes - {""})
        for name in found:
            named[name].requires_grad_(False)
    if not any(parameter.requires_grad for parameter in named.values()):
        raise InvalidValue(f"freezing {', '.join(patterns)} leaves nothing to train; use --inference for that")


def add_lora(model: nn.Module, rank: int) -> nn.Module:
    """Adapters of low rank beside every linear layer but the last, by peft; all else is frozen."""
    try:
        import peft
    except ImportError:
        raise MissingPackage("peft", "LoRA adapters (--lora-rank)") from None
    linear = [name for name, part in model.named_modules() if isinstance(part, nn.Linear)]
    if hasattr(model, "get_output_embeddings"):
        targets: Any = "all-linear"
    elif len(linear) > 1:
        targets = linear[:-1]
    else:
        raise InvalidValue("LoRA adapters need a model with linear layers before its last one; found none")
    assume(f"LoRA of rank {rank}, alpha {2 * rank}, beside every linear layer but the last")
    adapted: nn.Module = peft.get_peft_model(
        model,
        peft.LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=targets),
    )
    return adapted


def checkpoint_activations(model: Any, configuration: Configuration) -> None:
    """Keep only the inputs of blocks and compute the rest again in the backward pass, by the model's own means."""
    if hasattr(model, "gradient_checkpointing_enable"):
        try:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        except ValueError as error:
            raise InvalidValue(f"{configuration.model} has no activation checkpointing: {error}") from None
    elif hasattr(model, "set_grad_checkpointing"):
        try:
            model.set_grad_checkpointing(True)
        except (AssertionError, NotImplementedError) as error:
            raise InvalidValue(f"{configuration.model} has no activation checkpointing: {error}") from None
    else:
        _checkpoint_blocks(model, configuration)


def _checkpoint_blocks(model: nn.Module, configuration: Configuration) -> None:
    """For models without means of their own: every block of several layers that stands in a row of blocks."""
    blocks = list(_blocks(model))
    if not blocks:
        raise InvalidValue(f"{configuration.model} has no blocks in an nn.Sequential to checkpoint; leave it out")
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
