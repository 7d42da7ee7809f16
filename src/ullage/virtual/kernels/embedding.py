"""Embeddings and their gradients: indices are sorted, equal ones are summed in parts.

aten/src/ATen/native/cuda/Embedding.cu, EmbeddingBackwardKernel.cu; aten/src/ATen/native/Embedding.cpp
"""

from __future__ import annotations

from typing import Any

import torch

from ullage.virtual.kernels import cub
from ullage.virtual.kernels.layouts import accumulate_type, ceil_div, copy_size
from ullage.virtual.kernels.plan import New, Output, Plan, Steps, new
from ullage.virtual.kernels.registry import Call, kernel

_FEW_INDICES = 3072  # Embedding.cu, embedding_dense_backward_cuda: up to so many, one kernel without sorting
# EmbeddingBackwardKernel.cu: rows that one thread sums, threads of a block, blocks a multiprocessor below which the
# sums are added atomically.
_ROWS_A_THREAD, _BLOCK, _ATOMIC_BLOCKS = 10, 1024, 4


@kernel("aten.embedding.default")
def embedding(call: Call) -> Plan:
    """Embedding.cpp, embedding_symint: indices are made contiguous to be looked up in one go."""
    plan = call.infer()
    indices = call.args[1]
    steps = Steps()
    if indices.dim() > 1 and copy_size(indices):
        steps.temporary(copy_size(indices))
    return Plan(plan.outputs, steps.output(0).steps, single=True)


@kernel("aten.embedding_dense_backward.default")
def embedding_backward(call: Call) -> Plan:
    """Embedding.cu, embedding_dense_backward_cuda."""
    grad, indices, weights, _, by_frequency = call.args
    out = new((weights, grad.shape[-1]), grad.dtype)
    steps = Steps()
    if copy_size(grad):
        steps.temporary(copy_size(grad))
    count = indices.numel()
    if count <= _FEW_INDICES and not by_frequency:
        if copy_size(indices):
            steps.temporary(copy_size(indices))
        return Plan([out], steps.output(0).steps, single=True)
    _add_sorted_indices(steps, call, indices, by_frequency)
    add_segment_sums(steps, call, out, grad.dtype, indices, count)
    return Plan([out], steps.steps, single=True)


def add_segment_sums(
    steps: Steps, call: Call, out: New, dtype: torch.dtype, indices: Any, count: int, bags: bool = False
) -> None:
    """EmbeddingBackwardKernel.cu, embedding_backward_cuda_kernel: the gradient, and everything beside it."""
    width, (weights, columns) = indices.element_size(), out.size
    steps.output(0)
    steps.temporary(count * width, 8)
    steps.temporary(count * width, cub.unique_by_key(count, width, call.gpu)).free(-1, -2)
    segments = min(count, weights)
    steps.temporary(segments * width, segments * width, cub.scan(segments, width)).free(-1)
    parts = count // _ROWS_A_THREAD + segments
    steps.temporary(8, parts * width)
    accumulated = accumulate_type(dtype)
    if not bags and _adds_atomically(call, segments, parts, columns):
        steps.temporary(parts * width)
        if accumulated is not dtype:
            steps.temporary(weights * columns * accumulated.itemsize)
    else:
        steps.temporary(parts * columns * accumulated.itemsize)


def _adds_atomically(call: Call, segments: int, parts: int, columns: int) -> bool:
    warped = ceil_div(columns, 32) * 32
    blocks = ceil_div(segments * warped, min(warped, _BLOCK))
    few = blocks < (call.gpu.spec.sms or 1) * _ATOMIC_BLOCKS
    return few and parts > 4 * blocks and not torch._C._get_deterministic_algorithms()


_MAX = 2  # embedding_bag's modes: sum, mean, max


@kernel("aten._embedding_bag.default", "aten._embedding_bag_forward_only.default")
def embedding_bag(call: Call) -> Plan:
    """EmbeddingBag.cu, _embedding_bag_cuda: sizes of the bags and the bag of every index before the output."""
    weight, indices, offsets = call.args[:3]
    bags = offsets.shape[0] - (1 if call.argument(7, "include_last_offset", False) else 0)
    out = new((bags, weight.shape[1]), weight.dtype)
    places = new((bags, weight.shape[1]) if call.argument(4, "mode", 0) == _MAX else (0,), indices.dtype)
    outputs: list[Output] = [out, new(tuple(indices.shape), indices.dtype), new((bags,), indices.dtype), places]
    return Plan(outputs, Steps().output(2, 1, 0, 3).steps)


@kernel("aten._embedding_bag_dense_backward.default", "aten._embedding_bag_backward.default")
def embedding_bag_backward(call: Call) -> Plan:
    """EmbeddingBag.cu, _embedding_bag_dense_backward_cuda: sums as for an embedding, over bags."""
    is_front = call.func._schema.name.endswith("bag_backward")  # it has the offsets too, and whether it is sparse
    grad, indices = call.args[:2]
    weights, by_frequency, mode = call.args[6:9] if is_front else call.args[5:8]
    out = new((weights, grad.shape[1]), grad.dtype)
    steps = Steps()
    if copy_size(grad):
        steps.temporary(copy_size(grad))
    count = indices.numel()
    if mode == _MAX or count == 0:
        return Plan([out], steps.output(0).steps, single=True)
    _add_sorted_indices(steps, call, indices, by_frequency)
    add_segment_sums(steps, call, out, grad.dtype, indices, count, bags=True)
    return Plan([out], steps.steps, single=True)


def _add_sorted_indices(steps: Steps, call: Call, indices: torch.Tensor, by_frequency: bool) -> None:
    """Indices sorted together with their places, and how often each occurs where gradients are scaled by that."""
    count, width = indices.numel(), indices.element_size()
    steps.temporary(count * width, count * width)
    steps.temporary(count * width, cub.radix_sort(count, width, width, 8 * width, call.gpu)).free(-1, -2)
    if by_frequency:
        steps.temporary(count * width)
        for _ in range(2):
            steps.temporary(cub.scan_by_key(count, width, call.gpu)).free(-1)
