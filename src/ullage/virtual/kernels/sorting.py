"""Sorting along a dimension, and running sums.

aten/src/ATen/native/cuda/Sort.cpp, SortStable.cu, Sorting.cpp, ScanKernels.cpp
"""

from __future__ import annotations

import math

import torch

from ullage.virtual.kernels import cub
from ullage.virtual.kernels.layouts import ceil_div, copy_size, twin
from ullage.virtual.kernels.plan import New, Plan, Steps, is_dense
from ullage.virtual.kernels.registry import Call, kernel

_SMALL = 4096  # Sort.cpp, should_use_small_sort: up to so many elements are sorted in place by one block
_INDEX = 8  # bytes of an index
_FEW_SEGMENTS, _LONG_SEGMENT = 128, 1_000_000  # SortStable.cu, launch_stable_sort_kernel


@kernel("aten.sort.default", "aten.sort.stable")
def sort(call: Call) -> Plan:
    """Sort.cpp, sort_cuda_kernel."""
    plan = call.infer()
    source = call.args[0]
    dim = call.argument(2 if call.func._overloadname == "stable" else 1, "dim", -1)
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
    if not (is_dense(source.shape, source.stride()) and source.stride(dim) == 1):
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


# TensorTopK.cu: rows and their lengths from which several blocks share a row; threads of a block; registers of a
# thread, which limit the blocks of a multiprocessor; bounds of the items that a thread reads; radix digits.
_SHARED_ROWS = ((20, 20000), (40, 10000), (80, 8000), (199, 5000), (799, 3000), (4000, 800))
_SHARED_ROWS_BEYOND = 400
_THREADS, _REGISTERS, _FEWEST_ITEMS, _MOST_ITEMS, _DIGITS = 256, 40, 4, 64, 256
_REGISTERS_A_MULTIPROCESSOR = 65536


@kernel("aten.topk.default")
def topk(call: Call) -> Plan:
    """TensorTopK.cu, and Sorting.cpp, topk_out_cuda: found, then sorted if asked for."""
    plan = call.infer()
    source, values = call.args[0], plan.outputs[0]
    assert isinstance(values, New)
    dim = call.argument(2, "dim", -1)
    steps = Steps().output(0, 1)
    if source.dim() == 0 or source.numel() == 0:
        return plan
    copy = steps.take(copy_size(source))
    length = source.shape[dim]
    rows = source.numel() // length
    if _shares_rows(rows, length):
        _add_shared_search(steps, call, source, rows, length)
    if call.argument(4, "sorted", True) and values.size[dim] > _SMALL:
        count, itemsize = values.nbytes // values.dtype.itemsize, values.dtype.itemsize
        sorted_places, sorted_values = steps.take(count * _INDEX), steps.take(count * itemsize)
        add_sort(steps, call, torch.empty(values.size, dtype=values.dtype, device="meta"), dim)
        steps.temporary(count * _INDEX).free(-1, sorted_values, sorted_places)
    return Plan(plan.outputs, steps.free(copy).steps)


def _shares_rows(rows: int, length: int) -> bool:
    for most_rows, least_length in _SHARED_ROWS:
        if rows <= most_rows:
            return length >= least_length
    return length >= _SHARED_ROWS_BEYOND


def _add_shared_search(steps: Steps, call: Call, source: torch.Tensor, rows: int, length: int) -> None:
    """TensorTopK.cu, mbtopk::launch: what the blocks of a row count together."""
    blocks_at_once = _REGISTERS_A_MULTIPROCESSOR // (_REGISTERS * _THREADS) * (call.gpu.spec.sms or 1)
    items = min(max(ceil_div(length * rows, blocks_at_once * _THREADS), _FEWEST_ITEMS), _MOST_ITEMS)
    blocks = rows * ceil_div(length, items * _THREADS)
    taken = (
        rows * source.element_size(),
        2 * rows * 4,
        2 * rows * max(4, source.element_size()),
        blocks * _DIGITS * 2,
        rows * _DIGITS * 4,
        blocks * 4,
        blocks * 4,
    )
    steps.temporary(*taken)
    for _ in range(2):
        steps.temporary(cub.scan_by_key(blocks, 4, call.gpu)).free(-1)
    steps.free(*range(-3, -3 - len(taken), -1))


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
