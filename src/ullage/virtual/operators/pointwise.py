"""Small kernels with temporaries that depend on more than sizes."""

from __future__ import annotations

import torch

from ullage.virtual.call.plan import Call, Output, Plan, Steps, bytes_of, kernel, like


@kernel("aten.roll.default")
def roll(call: Call) -> Plan:
    """TensorTransformations.cu: one dimension at a time, each time from a contiguous tensor into a new one."""
    source, steps = call.args[0], Steps().copies(call.args[0])
    before = 0
    for _ in range(len(call.argument(2, "dims", [])) - 1):
        after = steps.take(bytes_of(source))
        steps.free(before)
        before = after
    return steps.output(0).plan(call.output)


@kernel("aten.abs.default")
def magnitude(call: Call) -> Plan:
    """UnaryOps.cpp, unary_op_impl_with_complex_to_float_out: complex results first, of which the real part is kept."""
    source = call.args[0]
    return Steps().output(0).temporary(bytes_of(source)).plan(call.output) if source.is_complex() else call.infer()


@kernel("aten.scatter_reduce.two")
def scatter_reduce(call: Call) -> Plan:
    """TensorAdvancedIndexing.cpp, scatter_reduce_two: for a mean, how many values went to each place."""
    source, size = call.args[0], bytes_of(call.args[0])
    if call.args[4] != "mean":
        return call.infer()
    return Steps().output(0).temporary(size, size, source.numel()).plan(call.output)


_CHECKED = 4  # bytes of a number that a check of the zero points is written to


@kernel("aten.fake_quantize_per_channel_affine_cachemask.default")
def fake_quantize_channels(call: Call) -> Plan:
    """FakeQuantPerChannelAffine.cpp: the zero points are checked first."""
    steps = Steps().temporary(_CHECKED, _CHECKED).free(-1, -2).output(0, 1)
    return steps.plan(like(call.args[0]), like(call.args[0], torch.bool))


@kernel(
    "aten._fake_quantize_learnable_per_tensor_affine_backward.default",
    "aten._fake_quantize_learnable_per_channel_affine_backward.default",
)
def fake_quantize_learned_backward(call: Call) -> Plan:
    """FakeQuantPerTensorAffine.cpp: the gradients of scale and zero point for each number, then summed."""
    outputs: list[Output] = [like(tensor) for tensor in call.args[1:4]]
    size = bytes_of(call.args[1])
    return Steps().output(0).temporary(size, size).output(1, 2).plan(*outputs)
