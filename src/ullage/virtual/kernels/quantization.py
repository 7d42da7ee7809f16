"""Numbers rounded as if they were quantized, for training that knows of it.

aten/src/ATen/native/quantized/FakeQuantPerTensorAffine.cpp, FakeQuantPerChannelAffine.cpp
"""

from __future__ import annotations

import torch

from ullage.virtual.kernels.plan import Call, Output, Plan, Steps, kernel, like

_CHECKED = 4  # bytes of a number that a check of the zero points is written to


@kernel(
    "aten.fake_quantize_per_tensor_affine_cachemask.default",
    "aten._fake_quantize_per_tensor_affine_cachemask_tensor_qparams.default",
)
def fake_quantize(call: Call) -> Plan:
    """The rounded numbers, and which of them were in range."""
    return Plan([like(call.args[0]), like(call.args[0], torch.bool)])


@kernel("aten.fake_quantize_per_channel_affine_cachemask.default")
def fake_quantize_channels(call: Call) -> Plan:
    """The same with a scale for each channel; the zero points are checked first."""
    outputs: list[Output] = [like(call.args[0]), like(call.args[0], torch.bool)]
    return Plan(outputs, Steps().temporary(_CHECKED, _CHECKED).free(-1, -2).output(0, 1).steps)


@kernel(
    "aten._fake_quantize_learnable_per_tensor_affine.default",
    "aten._fake_quantize_learnable_per_channel_affine.default",
)
def fake_quantize_learned(call: Call) -> Plan:
    """A scale that is learned: which numbers were in range is found out and forgotten."""
    source = call.args[0]
    return Plan([like(source)], Steps().output(0).temporary(source.numel()).steps, single=True)


@kernel(
    "aten._fake_quantize_learnable_per_tensor_affine_backward.default",
    "aten._fake_quantize_learnable_per_channel_affine_backward.default",
)
def fake_quantize_learned_backward(call: Call) -> Plan:
    """The gradients of scale and zero point for each number, then summed."""
    source, scale, zero_point = call.args[1:4]
    outputs: list[Output] = [like(source), like(scale), like(zero_point)]
    size = source.numel() * source.element_size()
    return Plan(outputs, Steps().output(0).temporary(size, size).output(1, 2).steps)
