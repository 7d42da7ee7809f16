"""Advanced indexing, embeddings, and their gradients.

aten/src/ATen/native/TensorAdvancedIndexing.cpp, aten/src/ATen/native/cuda/Indexing.cu, Embedding.cu,
EmbeddingBackwardKernel.cu, aten/src/ATen/native/Embedding.cpp
"""

import math
from typing import Any

import torch

from ullage.units import ceil_div, round_up
from ullage.virtual.call.plan import (
    Call,
    New,
    Output,
    Plan,
    Same,
    Steps,
    accumulate_type,
    bytes_of,
    contiguous,
    kernel,
    like,
    new,
    twin,
)
from ullage.virtual.operators import sorting
from ullage.virtual.operators.reductions import Kind, add_buffers

_INDEX = 8  # bytes of a 64-bit index


def _expanded(indices: Any) -> list[Any]:
    """ExpandUtils.h, expand_outplace: all indices get one size. Masks have become indices before (see `special`)."""
    size = torch.broadcast_shapes(*[index.shape for index in indices if index is not None])
    return [None if index is None else twin(index).expand(size) for index in indices]


@kernel("aten.index.Tensor", "aten._unsafe_index.Tensor")
def index(call: Call) -> Plan:
    """TensorAdvancedIndexing.cpp, make_info and AdvancedIndex: indices of different strides are made contiguous."""
    steps = Steps()
    _add_index_copies(steps, call.args[1])
    return steps.output(0).plan(call.output)


def _add_index_copies(steps: Steps, indices: Any) -> None:
    widened = []
    for index in filter(lambda index: index is not None, _expanded(indices)):
        if index.dtype is torch.int32:
            steps.temporary(index.numel() * _INDEX)
            index = torch.empty_like(index, dtype=torch.int64)
        widened.append(index)
    if any(index.stride() != widened[0].stride() for index in widened):
        steps.copies(*widened)


@kernel(
    "aten.index_put.default",
    "aten.index_put_.default",
    "aten._index_put_impl_.default",
    "aten._unsafe_index_put.default",
)
def index_put(call: Call) -> Plan:
    """TensorAdvancedIndexing.cpp, index_put and _index_put_impl_."""
    target, indices, values = call.args[:3]
    steps = Steps()
    out: Output = Same(0)
    if not call.func._schema.name.endswith("_"):
        out = like(target)
        steps.output(0)
    accumulates = call.argument(3, "accumulate", False) or torch._C._get_deterministic_algorithms()
    if not values.is_cuda:
        steps.temporary(values.element_size())
    if accumulates and target.numel():
        add_sorted_put(steps, call, target, indices, values)
    else:
        _add_index_copies(steps, indices)
    return steps.plan(out)


def add_sorted_put(steps: Steps, call: Call, target: torch.Tensor, indices: Any, values: torch.Tensor) -> None:
    """Indexing.cu, index_put_with_sort_kernel: one linear index, sorted, so that equal ones are added in order."""
    steps.copies(target)
    expanded = _expanded(indices)
    used = [(dim, index) for dim, index in enumerate(expanded) if index is not None]
    count = used[0][1].numel()
    if count == 0:
        return
    for place, (_, index) in enumerate(used):
        if not call.argument(4, "unsafe", False):  # index_backward knows that its indices are in range
            _add_range_check(steps, call, index)
        steps.temporary(count * _INDEX, count * _INDEX).free(-2)
        if place > 0:  # this index was added to the first
            steps.free(-1)
    columns, slice_size = _slice(target, expanded, used)
    if not values.is_contiguous() or values.numel() < count * columns * slice_size:
        steps.temporary(count * columns * slice_size * values.element_size())
    if _are_apart(expanded):
        steps.temporary(bytes_of(target))
    largest = (target.numel() - 1) // max(1, slice_size)
    steps.temporary(count * _INDEX, count * _INDEX, count * _INDEX)
    steps.temporary(sorting.radix_sort(count, _INDEX, _INDEX, max(1, largest.bit_length()), call.gpu))
    steps.free(-1, -2, -3, -4)


def _add_range_check(steps: Steps, call: Call, index: torch.Tensor) -> None:
    """wrapIndexOnce: the largest and the smallest index are compared with the size."""
    for _ in range(2):
        extreme = steps.take(_INDEX)
        add_buffers(steps, call, index, [], Kind(_INDEX, _INDEX), _INDEX)
        steps.temporary(1).free(-1, extreme)


def _slice(target: torch.Tensor, expanded: list[Any], used: list[tuple[int, Any]]) -> tuple[int, int]:
    """Return the numbers of elements before the indexed dimensions and after them."""
    first, last = used[0][0], used[-1][0]
    if _are_apart(expanded):
        indexed = {dim for dim, _ in used}
        return 1, math.prod([size for dim, size in enumerate(target.shape) if dim not in indexed])
    return math.prod(target.shape[:first]), math.prod(target.shape[last + 1 :])


def _are_apart(expanded: list[Any]) -> bool:
    used = [dim for dim, index in enumerate(expanded) if index is not None]
    return used[-1] - used[0] + 1 != len(used)


@kernel("aten.masked_scatter_.default")
def masked_scatter(call: Call) -> Plan:
    """IndexKernel.cpp, masked_scatter__cuda: the number of flags set before each place."""
    target = call.args[0]
    count = target.numel()
    steps = Steps()
    if count:
        steps.temporary(count * _INDEX, sorting.scan(count, _INDEX)).free(-1)
    return steps.plan(Same(0))


# Gradients of embeddings: indices are sorted, and equal ones are summed in parts.

_FEW_INDICES = 3072  # Embedding.cu, embedding_dense_backward_cuda: up to this number, one kernel without sorting
# EmbeddingBackwardKernel.cu: rows that one thread sums, threads of a block, blocks a multiprocessor below which the
# sums are added atomically.
_ROWS_A_THREAD, _BLOCK, _ATOMIC_BLOCKS = 10, 1024, 4


@kernel("aten.embedding.default")
def embedding(call: Call) -> Plan:
    """Embedding.cpp, embedding_symint: indices are made contiguous for a single lookup."""
    indices, steps = call.args[1], Steps()
    if indices.dim() > 1:
        steps.copies(indices)
    return steps.output(0).plan(call.output)


@kernel("aten.embedding_dense_backward.default")
def embedding_backward(call: Call) -> Plan:
    """Embedding.cu, embedding_dense_backward_cuda."""
    grad, indices, weights, _, by_frequency = call.args
    out = new((weights, grad.shape[-1]), grad.dtype)
    steps = Steps().copies(grad)
    count = indices.numel()
    if count <= _FEW_INDICES and not by_frequency:
        return steps.copies(indices).output(0).plan(out)
    _add_sorted_indices(steps, call, indices, by_frequency)
    add_segment_sums(steps, call, out, grad.dtype, indices, count)
    return steps.plan(out)


def add_segment_sums(
    steps: Steps, call: Call, out: New, dtype: torch.dtype, indices: Any, count: int, bags: bool = False
) -> None:
    """EmbeddingBackwardKernel.cu, embedding_backward_cuda_kernel: the gradient and its temporaries."""
    width, (weights, columns) = indices.element_size(), out.size
    steps.output(0)
    steps.temporary(count * width, 8)
    steps.temporary(count * width, sorting.unique_by_key(count, width, call.gpu)).free(-1, -2)
    segments = min(count, weights)
    steps.temporary(segments * width, segments * width, sorting.scan(segments, width)).free(-1)
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
    warped = round_up(columns, 32)
    blocks = ceil_div(segments * warped, min(warped, _BLOCK))
    few = blocks < call.gpu.multiprocessors * _ATOMIC_BLOCKS
    return few and parts > 4 * blocks and not torch._C._get_deterministic_algorithms()


_MAX = 2  # embedding_bag's modes: sum, mean, max


@kernel("aten._embedding_bag.default", "aten._embedding_bag_forward_only.default")
def embedding_bag(call: Call) -> Plan:
    """EmbeddingBag.cu, _embedding_bag_cuda: sizes of the bags and the bag of every index before the output."""
    weight, indices, offsets = call.args[:3]
    bags = offsets.shape[0] - (1 if call.argument(7, "include_last_offset", False) else 0)
    out = new((bags, weight.shape[1]), weight.dtype)
    places = new((bags, weight.shape[1]) if call.argument(4, "mode", 0) == _MAX else (0,), indices.dtype)
    return Steps().output(2, 1, 0, 3).plan(out, contiguous(indices), new((bags,), indices.dtype), places)


@kernel("aten._embedding_bag_dense_backward.default", "aten._embedding_bag_backward.default")
def embedding_bag_backward(call: Call) -> Plan:
    """EmbeddingBag.cu, _embedding_bag_dense_backward_cuda: sums as for an embedding, over bags."""
    is_front = call.func._schema.name.endswith("bag_backward")  # it has the offsets too, and whether it is sparse
    grad, indices = call.args[:2]
    weights, by_frequency, mode = call.args[6:9] if is_front else call.args[5:8]
    out = new((weights, grad.shape[1]), grad.dtype)
    steps = Steps().copies(grad)
    count = indices.numel()
    if mode == _MAX or count == 0:
        return steps.output(0).plan(out)
    _add_sorted_indices(steps, call, indices, by_frequency)
    add_segment_sums(steps, call, out, grad.dtype, indices, count, bags=True)
    return steps.plan(out)


def _add_sorted_indices(steps: Steps, call: Call, indices: torch.Tensor, by_frequency: bool) -> None:
    """Sort indices together with their places, and count each index if gradients are scaled by frequency."""
    count, width = indices.numel(), indices.element_size()
    steps.temporary(count * width, count * width)
    steps.temporary(count * width, sorting.radix_sort(count, width, width, 8 * width, call.gpu)).free(-1, -2)
    if by_frequency:
        steps.temporary(count * width)
        for _ in range(2):
            steps.temporary(sorting.scan_by_key(count, width, call.gpu)).free(-1)
