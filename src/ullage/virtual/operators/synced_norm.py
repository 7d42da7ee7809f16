"""Operators of `torch.nn.SyncBatchNorm` (ATen/native/cuda/Normalization.cu): PyTorch infers no shapes for them."""

from __future__ import annotations

from typing import Any

import torch

from ullage.virtual.call.registry import handler
from ullage.virtual.state import GPUState


@handler("aten.batch_norm_stats.default", "aten.batch_norm_gather_stats_with_counts.default")
def statistics(gpu: GPUState, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The mean and the inverse deviation by channel, in the type that sums are made in."""
    dtype = torch.float64 if args[0].dtype is torch.float64 else torch.float32
    with gpu.counting():
        return tuple(args[0].new_empty(args[0].shape[1], dtype=dtype) for _ in range(2))


@handler("aten.batch_norm_elemt.default", "aten.batch_norm_backward_elemt.default")
def elementwise(gpu: GPUState, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The normalized input, or its gradient."""
    with gpu.counting():
        return torch.empty_like(args[0])


@handler("aten.batch_norm_backward_reduce.default")
def backward_sums(gpu: GPUState, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Sums of gradients by channel; the gradients of the weights only where they are wanted."""
    mean, weight, (inputs, weights, biases) = args[2], args[4], args[5:8]
    like = mean if weight is None else weight
    with gpu.counting():
        made = [(mean, inputs), (mean, inputs), (like, weights), (like, biases)]
        return tuple(torch.empty_like(each) if wanted else None for each, wanted in made)
