"""Small kernels whose outputs come in another order or that take a copy first."""

from __future__ import annotations

import torch

from ullage.virtual.kernels.plan import New, Plan, Steps, new
from ullage.virtual.kernels.registry import Call, kernel


@kernel("aten.native_dropout.default")
def dropout(call: Call) -> Plan:
    """Dropout.cu: the mask, a byte an element, is taken first."""
    source = call.args[0]
    like = torch.empty_like(torch.empty_strided(source.shape, source.stride(), dtype=source.dtype, device="meta"))
    mask = new(tuple(source.shape), torch.bool, like.stride())
    out = New(tuple(source.shape), like.stride(), source.dtype, mask.nbytes * source.element_size())
    return Plan([out, mask], Steps().output(1, 0).steps)


@kernel("aten.roll.default")
def roll(call: Call) -> Plan:
    """TensorTransformations.cu: one dimension at a time, each time into a new tensor."""
    plan = call.infer()
    source = call.args[0]
    dims = call.argument(2, "dims", [])
    size = source.numel() * source.element_size()
    steps = Steps()
    if len(dims) <= 1:
        if not source.is_contiguous():
            steps.temporary(size)
        return Plan(plan.outputs, steps.output(0).steps, single=True)
    for _ in dims[:-1]:
        steps.temporary(size)
    return Plan(plan.outputs, steps.output(0).steps, single=True)


@kernel("aten.pow.Scalar")
def power_of_number(call: Call) -> Plan:
    """Pow.cpp: the base becomes a tensor on the GPU."""
    plan = call.infer()
    return Plan(plan.outputs, Steps().output(0).temporary(8).steps, single=True)


@kernel("aten.unfold_backward.default")
def unfold_backward(call: Call) -> Plan:
    """UnfoldBackward.h: an index along the unfolded dimension."""
    plan = call.infer()
    _, size, dim, *_ = call.args
    return Plan(plan.outputs, Steps().output(0).temporary(size[dim] * 8).steps, single=True)
