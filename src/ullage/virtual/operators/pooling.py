"""Pooling, resizing and sampling of images: kernels that need one layout and copy tensors in another. Rules with only
copies are in `regular.py`."""

import torch

from ullage.virtual.call.plan import (
    CUDNN,
    Call,
    New,
    Output,
    Plan,
    Steps,
    bytes_of,
    contiguous,
    copy_size,
    is_contiguous,
    kernel,
    new,
    suggested_format,
)


def _stand_in(output: Output) -> int:
    """Return the bytes of the contiguous tensor that is written instead of an output in another layout."""
    return output.nbytes if isinstance(output, New) and not is_contiguous(output.size, output.stride) else 0


@kernel("aten.adaptive_max_pool2d.default")
def adaptive_max(call: Call) -> Plan:
    """AdaptiveMaxPooling2d.cu: contiguous copies of outputs in another layout, then a contiguous input."""
    outputs = call.infer().outputs
    return Steps().output(0, 1).temporary(*map(_stand_in, outputs)).copies(call.args[0]).plan(*outputs)


@kernel("aten.adaptive_max_pool2d_backward.default")
def adaptive_max_backward(call: Call) -> Plan:
    """AdaptiveMaxPooling2d.cu, adaptive_max_pool2d_backward_out_cuda."""
    grad, _, indices = call.args
    out = call.output
    return Steps().output(0).copies(grad, indices).temporary(_stand_in(out)).plan(out)


@kernel("aten.im2col.default", "aten.col2im.default")
def unfold(call: Call) -> Plan:
    """Im2Col.cu, im2col_cuda; Col2Im.cu: the output begins as large as the input and grows if it must."""
    source, out = call.args[0], call.output
    first, steps = bytes_of(source), Steps()
    if out.nbytes <= first:
        return steps.output(0).copies(source).plan(out._replace(nbytes=first))
    first_output = steps.take(first)
    return steps.copies(source).output(0).free(first_output).plan(out)


# Resizing of images.

_FEWEST_CHANNELS = 4  # the least for kernels on channels-last tensors


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
    if suggested_format(source) is torch.channels_last and source.shape[1] >= _FEWEST_CHANNELS:
        return Steps().output(0).copies(source, layout=torch.channels_last).plan(call.output)
    return contiguous_stand_in(call)


@kernel(
    "aten.upsample_nearest3d.default", "aten._upsample_bilinear2d_aa.default", "aten._upsample_bicubic2d_aa.default"
)
def contiguous_stand_in(call: Call) -> Plan:
    """UpSampleNearest3d.cu, UpSampleBilinear2d.cu (antialiased)."""
    out = call.output
    return Steps().output(0).temporary(_other_layout(out)).copies(call.args[0]).plan(out)


@kernel("aten.upsample_trilinear3d_backward.default")
def trilinear_backward(call: Call) -> Plan:
    """UpSampleTrilinear3d.cu: the gradient is copied first."""
    out = call.output
    return Steps().output(0).copies(call.args[0]).temporary(_other_layout(out)).plan(out)


def _other_layout(out: New) -> int:
    """Return the same as `_stand_in`, except that dimensions of one element count."""
    return 0 if new(out.size, out.dtype).stride == out.stride else out.nbytes


@kernel("aten.cudnn_grid_sampler.default")
def sample_by_grid(call: Call) -> Plan:
    """GridSampler.cpp, cudnn_grid_sampler_forward. A PyTorch without CUDA runs `grid_sampler_2d` in its place."""
    source, grid = call.args[:2]
    out = new((*source.shape[:2], *grid.shape[1:3]), source.dtype)
    return Steps().temporary(_repeated(source)).copies(grid).output(0).plan(out, library=CUDNN)


@kernel("aten.cudnn_grid_sampler_backward.default")
def sample_by_grid_backward(call: Call) -> Plan:
    """GridSampler.cpp, cudnn_grid_sampler_backward: always both gradients."""
    source, grid, grad = call.args[:3]
    steps = Steps().temporary(_repeated(source)).copies(grid).temporary(_repeated(grad)).output(0, 1)
    return steps.plan(contiguous(source), contiguous(grid), library=CUDNN)


def _repeated(tensor: torch.Tensor) -> int:
    """Return the bytes of the copy of a tensor that repeats elements, `contiguousIfZeroInStrides`."""
    return copy_size(tensor) if 0 in tensor.stride() else 0
