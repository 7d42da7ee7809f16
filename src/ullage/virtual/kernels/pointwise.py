"""Small kernels whose outputs come in another order or that take a copy first."""

from __future__ import annotations

import torch

from ullage.virtual.kernels.plan import New, Plan, Steps, new
from ullage.virtual.kernels.registry import Call, kernel
from ullage.virtual.kernels.softmax import contiguous_copy


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


@kernel("aten.cumsum.default", "aten.cumprod.default")
def cumulative_sum(call: Call) -> Plan:
    """ScanKernels.cpp: a cast first; one row alone is scanned by CUB, which takes a buffer."""
    plan = call.infer()
    source, out = call.args[0], plan.outputs[0]
    assert isinstance(out, New)
    steps = Steps().output(0)
    if source.dtype is not out.dtype:
        steps.temporary(source.numel() * out.dtype.itemsize)
    if source.numel() == (source.shape[call.args[1]] if source.dim() else 1) and source.numel() > 0:
        steps.temporary(1023 if source.numel() <= 4096 else 1023 + source.numel() // 128)
    return Plan(plan.outputs, steps.steps, single=True)


@kernel("aten.avg_pool2d.default", "aten.im2col.default", "aten.embedding.default")
def copies_input(call: Call) -> Plan:
    """Kernels that want their input contiguous."""
    plan = call.infer()
    return Plan(plan.outputs, Steps().output(0).temporary(contiguous_copy(call.args[0])).steps, single=True)
