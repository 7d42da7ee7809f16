"""Sorting along a dimension, and running sums.

aten/src/ATen/native/cuda/Sort.cpp, SortStable.cu, Sorting.cpp, ScanKernels.cpp
"""

from __future__ import annotations

import math

import torch

from ullage.virtual.kernels import cub
from ullage.virtual.kernels.layouts import copy_size, is_dense, twin
from ullage.virtual.kernels.plan import New, Plan, Steps
from ullage.virtual.kernels.registry import Call, kernel

_SMALL = 4096  # Sort.cpp, should_use_small_sort: up to so many elements are sorted in place by one block
_INDEX = 8  # bytes of an index
_FEW_SEGMENTS, _LONG_SEGMENT = 128, 1_000_000  # SortStable.cu, launch_stable_sort_kernel


@kernel("aten.sort.default", "aten.sort.stable")
def sort(call: Call) -> Plan:
    """Sort.cpp, sort_cuda_kernel."""
    plan = call.infer()
    source = call.args[0]
    if call.func._overloadname == "stable":
        dim = call.argument(2, "dim", -1)
    else:
        dim = call.argument(1, "dim", -1)
    steps = Steps().output(0, 1)
    add_sort(steps, call, source, dim)
    return Plan(plan.outputs, steps.steps)


def add_sort(steps: Steps, call: Call, source: torch.Tensor, dim: int) -> None:
    """Add what sorting takes beside its two outputs."""
    if source.dim() == 0 or source.numel() == 0:
        return
    length = source.shape[dim]
    if length <= _SMALL:
        steps.temporary(length * _INDEX).free(-1)
        return
    copies = []
    if not (is_dense(source) and source.stride(dim) == 1):
        size = source.numel() * source.element_size()
        copies = [steps.take(size), steps.take(size), steps.take(source.numel() * _INDEX)]
    _add_large_sort(steps, call, source, length)
    steps.free(*reversed(copies))


def _add_large_sort(steps: Steps, call: Call, source: torch.Tensor, length: int) -> None:
    """SortStable.cu, launch_stable_sort_kernel: one segment after another, all at once by two sorts, or segmented."""
    key, count = source.element_size(), source.numel()
    segments = count // length
    if segments == 1 or length >= _LONG_SEGMENT:
        steps.temporary(length * _INDEX)
        for _ in range(segments):
            steps.temporary(cub.radix_sort(length, key, _INDEX, 8 * key, call.gpu)).free(-1)
        steps.free(-1 - segments)
    elif segments < _FEW_SEGMENTS:
        first, second = steps.take(count * _INDEX), steps.take(count * _INDEX)
        steps.temporary(count * key, cub.radix_sort(count, key, _INDEX, 8 * key, call.gpu)).free(-1, -2)
        bits = max(1, math.ceil(math.log2(segments)))
        steps.temporary(cub.radix_sort(count, _INDEX, 0, bits, call.gpu)).free(-1, second, first)
    else:
        steps.temporary(count * _INDEX, cub.segmented_radix_sort(count, key, _INDEX)).free(-1, -2)


@kernel("aten.cumsum.default", "aten.cumprod.default", "aten.logcumsumexp.default")
def running_sum(call: Call) -> Plan:
    """ScanKernels.cpp, scan_dim: a cast or a contiguous copy first; one row alone is scanned by CUB."""
    plan = call.infer()
    source, out = call.args[0], plan.outputs[0]
    assert isinstance(out, New)
    steps = Steps().output(0)
    if source.dtype is not out.dtype:
        steps.temporary(source.numel() * out.dtype.itemsize)
        source = torch.empty_like(twin(source), dtype=out.dtype)
    length = source.shape[call.args[1]] if source.dim() else 1
    if source.numel() == length and source.numel() > 0 and source.dim():
        plain = source.dtype not in (torch.float16, torch.bfloat16)
        steps.temporary(cub.scan(source.numel(), source.element_size(), plain))
    elif copy_size(source):
        steps.temporary(copy_size(source))
    return Plan(plan.outputs, steps.steps, single=True)
