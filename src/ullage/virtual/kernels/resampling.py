"""Making images larger and smaller.

aten/src/ATen/native/cuda/UpSampleNearest2d.cu, UpSampleBilinear2d.cu, UpSampleBicubic2d.cu, UpSampleNearest3d.cu,
UpSampleTrilinear3d.cu
"""

from __future__ import annotations

import torch

from ullage.virtual.kernels.layouts import copy_size, suggested_format
from ullage.virtual.kernels.plan import New, Plan, Steps, new
from ullage.virtual.kernels.pooling import outputs_then_copies
from ullage.virtual.kernels.registry import Call, kernel

_FEWEST_CHANNELS = 4  # kernels for channels-last tensors want at least so many


def _works_on_channels_last(tensor: torch.Tensor) -> bool:
    return suggested_format(tensor) is torch.channels_last and tensor.shape[1] >= _FEWEST_CHANNELS


def _through_contiguous(call: Call, tensor: torch.Tensor, copy_first: bool = False) -> Plan:
    """A contiguous stand-in for an output in another layout, and a contiguous copy of the argument."""
    plan = call.infer()
    out = plan.outputs[0]
    assert isinstance(out, New)
    is_contiguous = new(out.size, out.dtype).stride == out.stride
    sizes = [0 if is_contiguous else out.nbytes, copy_size(tensor)]
    if copy_first:
        sizes.reverse()
    return Plan(plan.outputs, Steps().output(0).temporary(*[size for size in sizes if size]).steps, single=True)


@kernel(
    "aten.upsample_nearest2d.default",
    "aten.upsample_nearest2d_backward.default",
    "aten._upsample_nearest_exact2d.default",
    "aten._upsample_nearest_exact2d_backward.default",
    "aten.upsample_bilinear2d_backward.default",
)
def channels_last_or_contiguous(call: Call) -> Plan:
    """UpSampleNearest2d.cu, UpSampleBilinear2d.cu: channels last as they are, everything else contiguous."""
    source = call.args[0]
    if _works_on_channels_last(source):
        return outputs_then_copies(call, source, memory_format=torch.channels_last)
    return _through_contiguous(call, source)


@kernel(
    "aten.upsample_nearest3d.default", "aten._upsample_bilinear2d_aa.default", "aten._upsample_bicubic2d_aa.default"
)
def contiguous_stand_in(call: Call) -> Plan:
    """UpSampleNearest3d.cu, UpSampleBilinear2d.cu (antialiased)."""
    return _through_contiguous(call, call.args[0])


@kernel("aten.upsample_trilinear3d_backward.default")
def trilinear_backward(call: Call) -> Plan:
    """UpSampleTrilinear3d.cu: the gradient is copied first."""
    return _through_contiguous(call, call.args[0], copy_first=True)


@kernel(
    "aten.upsample_bicubic2d_backward.default",
    "aten.upsample_nearest3d_backward.default",
    "aten._upsample_bilinear2d_aa_backward.default",
    "aten._upsample_bicubic2d_aa_backward.default",
)
def contiguous_gradient(call: Call) -> Plan:
    """UpSampleBicubic2d.cu, UpSampleNearest3d.cu: a contiguous gradient."""
    return outputs_then_copies(call, call.args[0])
