"""Reductions other than sums: largest, smallest, where they are, all, any, products, counts.

aten/src/ATen/native/cuda/ReduceMaxValuesKernel.cu, ReduceArgMaxKernel.cu, ReduceAMinMaxKernel.cu,
ReduceLogicKernel.cu, ReduceSumProdKernel.cu; aten/src/ATen/native/ReduceOps.cpp
"""

from __future__ import annotations

from typing import Any

import torch

from ullage.virtual.kernels.layouts import like, twin
from ullage.virtual.kernels.plan import New, Plan, Steps
from ullage.virtual.kernels.reductions import Kind, add_buffers, partial_size
from ullage.virtual.kernels.registry import Call, kernel

_VALUE_AND_PLACE = 16  # bytes of a value and a 64-bit place


def _as_list(dims: Any) -> list[int]:
    if dims is None:
        return []
    return [dims] if isinstance(dims, int) else list(dims)


def _reduction(call: Call, dims: Any, partial: int) -> Plan:
    """Outputs in order, then the buffers of one reduction whose partial results have so many bytes."""
    plan = call.infer()
    source = call.args[0]
    outputs = [output for output in plan.outputs if isinstance(output, New)]
    steps = Steps().output(*range(len(outputs)))
    kind = Kind(source.dtype.itemsize, partial)
    add_buffers(steps, call, source, _as_list(dims), kind, outputs[0].dtype.itemsize)
    return Plan(plan.outputs, steps.steps, single=plan.single)


@kernel("aten.max.default", "aten.min.default")
def extreme(call: Call) -> Plan:
    """ReduceMaxValuesKernel.cu: one number."""
    return _reduction(call, None, call.args[0].element_size())


@kernel("aten.amax.default", "aten.amin.default")
def extreme_along(call: Call) -> Plan:
    """ReduceMaxValuesKernel.cu, along dimensions."""
    return _reduction(call, call.argument(1, "dim"), call.args[0].element_size())


@kernel("aten.aminmax.default")
def both_extremes(call: Call) -> Plan:
    """ReduceAMinMaxKernel.cu: a pair of values."""
    return _reduction(call, call.argument(1, "dim"), 2 * call.args[0].element_size())


@kernel("aten.max.dim", "aten.min.dim", "aten.argmax.default", "aten.argmin.default")
def place_of_extreme(call: Call) -> Plan:
    """ReduceArgMaxKernel.cu: a value and where it is."""
    return _reduction(call, call.argument(1, "dim"), _VALUE_AND_PLACE)


@kernel("aten.all.default", "aten.any.default")
def logic(call: Call) -> Plan:
    """ReduceLogicKernel.cu: partial results have the type of the input."""
    return _reduction(call, None, call.args[0].element_size())


@kernel("aten.all.dim", "aten.any.dim", "aten.all.dims", "aten.any.dims")
def logic_along(call: Call) -> Plan:
    """ReduceLogicKernel.cu, along dimensions."""
    return _reduction(call, call.argument(1, "dim"), call.args[0].element_size())


@kernel("aten.prod.default", "aten.prod.dim_int", "aten.nansum.default")
def product(call: Call) -> Plan:
    """ReduceOps.cpp: as a sum; integers are cast to 64 bits first."""
    along = call.func._overloadname == "dim_int" or call.func._schema.name == "aten::nansum"
    return _sum(call, call.args[0], _as_list(call.argument(1, "dim")) if along else [])


def _sum(call: Call, source: torch.Tensor, dims: list[int], before: Steps | None = None) -> Plan:
    plan = call.infer()
    out = plan.outputs[0]
    assert isinstance(out, New)
    steps = (before or Steps()).output(0)
    add_sum(steps, call, source, dims, out.dtype)
    return Plan(plan.outputs, steps.steps, single=True)


def add_sum(steps: Steps, call: Call, source: torch.Tensor, dims: list[int], dtype: torch.dtype) -> None:
    """Add what a sum takes beside its output: a cast first, except from half to single precision."""
    half_to_single = source.dtype in (torch.float16, torch.bfloat16) and dtype is torch.float32
    copy = None
    if source.dtype is not dtype and not half_to_single:
        copy = steps.take(source.numel() * dtype.itemsize)
        source = torch.empty_like(twin(source), dtype=dtype)
    kind = Kind(source.dtype.itemsize, partial_size(source.dtype))
    add_buffers(steps, call, source, dims, kind, dtype.itemsize)
    if copy is not None:
        steps.free(copy)


@kernel("aten.count_nonzero.default", "aten.count_nonzero.dim_IntList")
def count_nonzero(call: Call) -> Plan:
    """TensorAdvancedIndexing.cpp, count_nonzero_cuda: the sum of a comparison."""
    source = call.args[0]
    dims = _as_list(call.args[1]) if call.func._overloadname == "dim_IntList" else []
    steps = Steps()
    if source.dtype is not torch.bool:
        steps.temporary(source.numel())
        source = torch.empty_like(twin(source), dtype=torch.bool)
    return _sum(call, source, dims, steps)


@kernel("aten.logsumexp.default")
def logsumexp(call: Call) -> Plan:
    """ReduceOps.cpp, logsumexp_out_impl: largest values, a mask of infinities, the sum of differences."""
    plan = call.infer()
    source, dims = call.args[0], _as_list(call.args[1])
    out = plan.outputs[0]
    assert isinstance(out, New)
    if not source.dtype.is_floating_point or source.numel() == 0:
        return plan
    itemsize = source.element_size()
    count = out.nbytes // out.dtype.itemsize
    steps = Steps()
    largest = steps.take(count * itemsize)
    add_buffers(steps, call, source, dims, Kind(itemsize, itemsize), itemsize)
    steps.temporary(count * itemsize, count).free(-1, -2)
    differences = like(source)
    inner = steps.take(differences.nbytes)
    steps.output(0)
    add_sum(steps, call, torch.empty_like(twin(source)), dims, out.dtype)
    return Plan(plan.outputs, steps.free(inner, largest).steps, single=True)
