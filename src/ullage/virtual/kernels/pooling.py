"""Pooling, resizing and sampling of images: kernels that want one layout and copy tensors that have another.

aten/src/ATen/native/cuda/AveragePool2d.cu, AveragePool3d.cu, DilatedMaxPool2d.cu, AdaptiveMaxPooling2d.cu,
AdaptiveMaxPooling3d.cu, AdaptiveAveragePooling3d.cu, UpSampleNearest2d.cu, UpSampleBilinear2d.cu, UpSampleBicubic2d.cu,
UpSampleNearest3d.cu, UpSampleTrilinear3d.cu, and aten/src/ATen/native/cudnn/GridSampler.cpp
"""

from __future__ import annotations

from typing import Any

import torch

from ullage.virtual.kernels.plan import (
    CUDNN,
    Call,
    New,
    Output,
    Plan,
    Steps,
    contiguous_strides,
    copy_size,
    kernel,
    new,
    suggested_format,
)


def outputs_then_copies(
    call: Call, *tensors: Any, memory_format: torch.memory_format = torch.contiguous_format
) -> Plan:
    """Outputs in order, then a copy of each of these tensors that is not in the wanted layout."""
    plan = call.infer()
    made = [place for place, output in enumerate(plan.outputs) if isinstance(output, New)]
    steps = Steps().output(*made)
    steps.temporary(*[size for tensor in tensors if (size := copy_size(tensor, memory_format))])
    return Plan(plan.outputs, steps.steps, single=plan.single)


@kernel("aten.avg_pool2d.default", "aten.max_pool2d_with_indices.default", "aten.max_pool3d_with_indices.default")
def pool(call: Call) -> Plan:
    """AveragePool2d.cu, DilatedMaxPool2d.cu: the input in the layout that its strides suggest."""
    source = call.args[0]
    return outputs_then_copies(call, source, memory_format=suggested_format(source))


@kernel("aten.avg_pool2d_backward.default")
def average_backward(call: Call) -> Plan:
    """AveragePool2d.cu, avg_pool2d_backward_out_cuda: input and gradient in the input's layout."""
    grad, source = call.args[:2]
    return outputs_then_copies(call, source, grad, memory_format=suggested_format(source))


@kernel("aten.max_pool2d_with_indices_backward.default", "aten.max_pool3d_with_indices_backward.default")
def max_backward(call: Call) -> Plan:
    """DilatedMaxPool2d.cu, max_pool2d_with_indices_backward_out_cuda."""
    grad, source = call.args[:2]
    return outputs_then_copies(call, source, grad, call.args[-1], memory_format=suggested_format(source))


@kernel("aten.avg_pool3d.default", "aten.reflection_pad2d.default")
def contiguous_input(call: Call) -> Plan:
    """AveragePool3d.cu, ReflectionPad.cu: a contiguous input."""
    return outputs_then_copies(call, call.args[0])


@kernel("aten.avg_pool3d_backward.default")
def contiguous_gradient(call: Call) -> Plan:
    """AveragePool3d.cu, avg_pool3d_backward_out_cuda: a contiguous gradient."""
    return outputs_then_copies(call, call.args[0])


@kernel("aten._adaptive_avg_pool3d.default")
def adaptive_average_3d(call: Call) -> Plan:
    """AdaptiveAveragePooling3d.cu: the input is copied before the output is made."""
    plan = call.infer()
    copy = copy_size(call.args[0])
    return Plan(plan.outputs, Steps().temporary(copy).output(0).steps if copy else None, single=True)


@kernel("aten.adaptive_max_pool2d.default")
def adaptive_max(call: Call) -> Plan:
    """AdaptiveMaxPooling2d.cu: contiguous stand-ins for outputs in another layout, then a contiguous input."""
    plan = call.infer()
    steps = Steps().output(0, 1)
    for output in plan.outputs:
        if not _is_contiguous(output):
            steps.temporary(output.nbytes)  # type: ignore[union-attr]
    if copy_size(call.args[0]):
        steps.temporary(copy_size(call.args[0]))
    return Plan(plan.outputs, steps.steps)


@kernel("aten.adaptive_max_pool2d_backward.default")
def adaptive_max_backward(call: Call) -> Plan:
    """AdaptiveMaxPooling2d.cu, adaptive_max_pool2d_backward_out_cuda."""
    plan = call.infer()
    grad, _, indices = call.args
    steps = Steps().output(0)
    steps.temporary(*[size for tensor in (grad, indices) if (size := copy_size(tensor))])
    if not _is_contiguous(plan.outputs[0]):
        steps.temporary(plan.outputs[0].nbytes)  # type: ignore[union-attr]
    return Plan(plan.outputs, steps.steps, single=True)


@kernel("aten.adaptive_max_pool3d.default")
def adaptive_max_3d(call: Call) -> Plan:
    """AdaptiveMaxPooling3d.cu: a contiguous input."""
    return outputs_then_copies(call, call.args[0])


def _is_contiguous(output: Output) -> bool:
    if not isinstance(output, New):
        return True
    usual = contiguous_strides(output.size)
    pairs = zip(output.size, output.stride, usual, strict=True)
    return all(length == 1 or step == wanted for length, step, wanted in pairs)


@kernel("aten.im2col.default")
def unfold(call: Call) -> Plan:
    """Im2Col.cu, im2col_cuda: the output begins as large as the input and grows if it must."""
    plan = call.infer()
    source, out = call.args[0], plan.outputs[0]
    assert isinstance(out, New)
    first = source.numel() * source.element_size()
    copy = copy_size(source)
    if out.nbytes <= first:
        steps = Steps().output(0)
        return Plan([out._replace(nbytes=first)], steps.temporary(copy).steps if copy else None, single=True)
    steps = Steps()
    kept = steps.take(first)
    if copy:
        steps.temporary(copy)
    return Plan([out], steps.output(0).free(kept).steps, single=True)


@kernel("aten.col2im.default")
def fold(call: Call) -> Plan:
    """Col2Im.cu, col2im_cuda: as im2col, the other way round."""
    return unfold(call)


# Resizing of images.

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
def contiguous_resampling_gradient(call: Call) -> Plan:
    """UpSampleBicubic2d.cu, UpSampleNearest3d.cu: a contiguous gradient."""
    return outputs_then_copies(call, call.args[0])


@kernel("aten.fractional_max_pool3d_backward.default")
def fractional_backward(call: Call) -> Plan:
    """FractionalMaxPool3d.cu: as large as the input, and contiguous."""
    source = call.args[1]
    return Plan([new(tuple(source.shape), source.dtype)], single=True)


@kernel("aten.cudnn_grid_sampler.default")
def sample_by_grid(call: Call) -> Plan:
    """GridSampler.cpp, cudnn_grid_sampler_forward. A PyTorch without CUDA runs `grid_sampler_2d` in its place."""
    source, grid = call.args[:2]
    out = new((*source.shape[:2], *grid.shape[1:3]), source.dtype)
    steps = Steps().temporary(*filter(None, (_repeated(source), copy_size(grid)))).output(0)
    return Plan([out], steps.steps, single=True, library=CUDNN)


@kernel("aten.cudnn_grid_sampler_backward.default")
def sample_by_grid_backward(call: Call) -> Plan:
    """GridSampler.cpp, cudnn_grid_sampler_backward: always both gradients."""
    source, grid, grad = call.args[:3]
    outputs: list[Output] = [new(tuple(tensor.shape), tensor.dtype) for tensor in (source, grid)]
    steps = Steps().temporary(*filter(None, (_repeated(source), copy_size(grid), _repeated(grad)))).output(0, 1)
    return Plan(outputs, steps.steps, library=CUDNN)


def _repeated(tensor: torch.Tensor) -> int:
    """Bytes of the copy of a tensor that repeats elements, `contiguousIfZeroInStrides`."""
    return copy_size(tensor) if 0 in tensor.stride() else 0
