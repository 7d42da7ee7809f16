"""Variance and standard deviation: a reduction whose partial results are Welford's running values.

aten/src/ATen/native/cuda/ReduceMomentKernel.cu, aten/src/ATen/native/ReduceOps.cpp
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ullage.virtual.kernels.layouts import twin
from ullage.virtual.kernels.plan import New, Plan, Steps
from ullage.virtual.kernels.reductions import Kind, add_buffers
from ullage.virtual.kernels.registry import Call, kernel

_VALUES = 2  # values that a thread reads at a time; ReduceMomentKernel.cu, std_var_kernel_impl


def welford_kind(dtype: torch.dtype) -> Kind:
    """SharedReduceOps.h, WelfordData: mean, squares, a 32-bit count and the count as a floating-point number."""
    return Kind(dtype.itemsize, 32 if dtype is torch.float64 else 16, _VALUES, _VALUES)


def add_moments(steps: Steps, call: Call, source: torch.Tensor, dims: Sequence[int], out: torch.dtype) -> None:
    """Add what `var_mean` takes for two results of type `out`: a cast first, except from half to single precision."""
    copy = None
    if source.dtype is not out and not (source.dtype is torch.float16 and out is torch.float32):
        copy = steps.take(source.numel() * out.itemsize)
        source = torch.empty_like(twin(source), dtype=out)
    add_buffers(steps, call, source, dims, welford_kind(source.dtype), out.itemsize)
    if copy is not None:
        steps.free(copy)


def _dims(call: Call) -> list[int]:
    dims = call.argument(1, "dim")
    return [] if dims is None else [dims] if isinstance(dims, int) else list(dims)


@kernel("aten.var.correction", "aten.std.correction")
def variance(call: Call) -> Plan:
    """ReduceOps.cpp, std_var_out."""
    plan = call.infer()
    source, out = call.args[0], plan.outputs[0]
    assert isinstance(out, New)
    steps = Steps().output(0)
    add_buffers(steps, call, source, _dims(call), welford_kind(source.dtype), out.dtype.itemsize)
    return Plan(plan.outputs, steps.steps, single=True)


@kernel("aten.var_mean.correction", "aten.std_mean.correction")
def variance_and_mean(call: Call) -> Plan:
    """ReduceOps.cpp, std_var_mean_out."""
    plan = call.infer()
    source, out = call.args[0], plan.outputs[0]
    assert isinstance(out, New)
    steps = Steps().output(0, 1)
    add_moments(steps, call, source, _dims(call), out.dtype)
    return Plan(plan.outputs, steps.steps)
