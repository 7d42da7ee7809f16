"""Advanced indexing, and adding into it: `tensor[indices]` and its gradient.

aten/src/ATen/native/TensorAdvancedIndexing.cpp, aten/src/ATen/native/cuda/Indexing.cu
"""

from __future__ import annotations

from typing import Any

import torch

from ullage.virtual.kernels import cub
from ullage.virtual.kernels.layouts import copy_size, elements, like, twin
from ullage.virtual.kernels.plan import Output, Plan, Same, Steps
from ullage.virtual.kernels.reductions import Kind, add_buffers
from ullage.virtual.kernels.registry import Call, kernel

_INDEX = 8  # bytes of a 64-bit index


def _expanded(indices: Any) -> list[Any]:
    """ExpandUtils.h, expand_outplace: all indices get one size. Masks have become indices before (see `special`)."""
    size = torch.broadcast_shapes(*[index.shape for index in indices if index is not None])
    return [None if index is None else twin(index).expand(size) for index in indices]


@kernel("aten.index.Tensor", "aten._unsafe_index.Tensor")
def index(call: Call) -> Plan:
    """TensorAdvancedIndexing.cpp, make_info and AdvancedIndex: indices of different strides are made contiguous."""
    plan = call.infer()
    steps = Steps()
    _add_index_copies(steps, [index for index in _expanded(call.args[1]) if index is not None])
    return Plan(plan.outputs, steps.output(0).steps, single=True)


def _add_index_copies(steps: Steps, indices: list[torch.Tensor]) -> None:
    widened = []
    for index in indices:
        if index.dtype is torch.int32:
            steps.temporary(index.numel() * _INDEX)
            index = torch.empty_like(index, dtype=torch.int64)
        widened.append(index)
    if any(index.stride() != widened[0].stride() for index in widened):
        steps.temporary(*[size for index in widened if (size := copy_size(index))])


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
    outputs: list[Output] = [Same(0)]
    if not call.func._schema.name.endswith("_"):
        outputs = [like(target)]
        steps.output(0)
    accumulates = call.argument(3, "accumulate", False) or torch._C._get_deterministic_algorithms()
    if not values.is_cuda:
        steps.temporary(values.element_size())
    if accumulates and target.numel():
        add_sorted_put(steps, call, target, indices, values)
    else:
        _add_index_copies(steps, [index for index in _expanded(indices) if index is not None])
    return Plan(outputs, steps.steps, single=True)


def add_sorted_put(steps: Steps, call: Call, target: torch.Tensor, indices: Any, values: torch.Tensor) -> None:
    """Indexing.cu, index_put_with_sort_kernel: one linear index, sorted, so that equal ones are added in order."""
    if copy_size(target):
        steps.temporary(copy_size(target))
    expanded = _expanded(indices)
    used = [(dim, index) for dim, index in enumerate(expanded) if index is not None]
    count = used[0][1].numel()
    if count == 0:
        return
    for place, (_, index) in enumerate(used):
        if not call.argument(4, "unsafe", False):  # index_backward knows that its indices are in range
            _add_range_check(steps, call, index)
        steps.temporary(count * _INDEX, count * _INDEX).free(-2)
        if place > 0:  # it was added to the first
            steps.free(-1)
    columns, slice_size = _slice(target, expanded, used)
    if not values.is_contiguous() or values.numel() < count * columns * slice_size:
        steps.temporary(count * columns * slice_size * values.element_size())
    if _are_apart(expanded):
        steps.temporary(target.numel() * target.element_size())
    largest = (target.numel() - 1) // max(1, slice_size)
    steps.temporary(count * _INDEX, count * _INDEX, count * _INDEX)
    steps.temporary(cub.radix_sort(count, _INDEX, _INDEX, cub.bits_of(largest), call.gpu))
    steps.free(-1, -2, -3, -4)


def _add_range_check(steps: Steps, call: Call, index: torch.Tensor) -> None:
    """wrapIndexOnce: the largest and the smallest index are compared with the size."""
    for _ in range(2):
        extreme = steps.take(_INDEX)
        add_buffers(steps, call, index, [], Kind(_INDEX, _INDEX), _INDEX)
        steps.temporary(1).free(-1, extreme)


def _slice(target: torch.Tensor, expanded: list[Any], used: list[tuple[int, Any]]) -> tuple[int, int]:
    """Elements before the indexed dimensions and after them."""
    first, last = used[0][0], used[-1][0]
    if _are_apart(expanded):
        indexed = {dim for dim, _ in used}
        return 1, elements([size for dim, size in enumerate(target.shape) if dim not in indexed])
    return elements(target.shape[:first]), elements(target.shape[last + 1 :])


def _are_apart(expanded: list[Any]) -> bool:
    used = [dim for dim, index in enumerate(expanded) if index is not None]
    return used[-1] - used[0] + 1 != len(used)
