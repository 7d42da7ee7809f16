"""PyTorch's checks of a convolution's tensors (aten/src/ATen/native/Convolution.cpp, ConvUtils.h): layouts, the size of
the output, and the backend."""

from collections.abc import Sequence
from typing import Any, NamedTuple, Self

import torch

from ullage.virtual.call.plan import contiguous_strides, is_contiguous

Capability = tuple[int, int]


class Operand(NamedTuple):
    """The layout of a tensor."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        count = self.dtype.itemsize
        for length in self.size:
            count *= length
        return count


class ConvolutionSettings(NamedTuple):
    """The arguments of a convolution that are no tensors, one entry a spatial dimension."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    transposed: bool
    output_padding: tuple[int, ...]
    groups: int

    def viewed_as_2d(self) -> Self:
        """ConvParams::view1d_as_2d."""
        stride, padding, dilation = (1, *self.stride), (0, *self.padding), (1, *self.dilation)
        output_padding = (0, *self.output_padding)
        return self._replace(stride=stride, padding=padding, dilation=dilation, output_padding=output_padding)


def operand(tensor: torch.Tensor) -> Operand:
    return Operand(tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype)


def settings_of(arguments: Sequence[Any], dims: int) -> ConvolutionSettings:
    """Return settings from stride, padding, dilation, transposed, output_padding, groups; single numbers are spread."""
    stride, padding, dilation, transposed, output_padding, groups = arguments

    def spread(values: Sequence[int]) -> tuple[int, ...]:
        return tuple(values) * dims if len(values) == 1 else tuple(values)

    return ConvolutionSettings(
        spread(stride), spread(padding), spread(dilation), bool(transposed), spread(output_padding), groups
    )


def channels_last_strides(size: Sequence[int]) -> tuple[int, ...]:
    order = (0, *range(2, len(size)), 1)
    inner = contiguous_strides([size[dim] for dim in order])
    strides = [0] * len(size)
    for dim, step in zip(order, inner, strict=True):
        strides[dim] = step
    return tuple(strides)


def suggests_channels_last(tensor: Operand) -> bool:
    """c10/core/MemoryFormat.h, is_channels_last_strides_2d and _3d: the test of `suggest_memory_format`."""
    size, stride = tensor.size, tensor.stride
    if len(size) not in (4, 5) or stride[1] == 0:
        return False
    least = 0
    for dim in (1, *reversed(range(2, len(size))), 0):
        if size[dim] == 0 or stride[dim] < least or (dim == 0 and least == stride[1]):
            return False
        least = stride[dim] * max(size[dim], 1)
    return True


def prefers_channels_last(first: Operand, second: Operand) -> bool:
    """ConvUtils.h, cudnn_conv_suggest_memory_format: one of the two suffices, but not in double precision."""
    if torch.float64 in (first.dtype, second.dtype):
        return False
    return suggests_channels_last(first) or suggests_channels_last(second)


def strides_of(size: Sequence[int], channels_last: bool) -> tuple[int, ...]:
    return channels_last_strides(size) if channels_last else contiguous_strides(size)


def copy_bytes(tensor: Operand, channels_last: bool) -> int:
    """Return the bytes that `tensor.contiguous(format)` allocates; 0 if the layout fits."""
    size, stride = tensor.size, tensor.stride
    if channels_last:
        order = (0, *range(2, len(size)), 1)
        size, stride = tuple(size[dim] for dim in order), tuple(stride[dim] for dim in order)
    return 0 if is_contiguous(size, stride) else tensor.nbytes


def laid_out(tensor: Operand, channels_last: bool) -> Operand:
    if copy_bytes(tensor, channels_last) == 0:
        return tensor
    return tensor._replace(stride=strides_of(tensor.size, channels_last))


def output_size(source: Sequence[int], weight: Sequence[int], settings: ConvolutionSettings) -> tuple[int, ...]:
    """ConvUtils.h, conv_output_size and conv_input_size."""
    lengths = []
    for dim, length in enumerate(source[2:]):
        border = 2 * settings.padding[dim] - settings.dilation[dim] * (weight[2 + dim] - 1)
        if settings.transposed:
            lengths.append((length - 1) * settings.stride[dim] - border + settings.output_padding[dim] + 1)
        else:
            lengths.append((length + border - 1) // settings.stride[dim] + 1)
    channels = weight[1] * settings.groups if settings.transposed else weight[0]
    return (source[0], channels, *lengths)


def is_depthwise(source: Operand, weight: Operand, settings: ConvolutionSettings) -> bool:
    """Convolution.cpp, ConvParams::is_depthwise."""
    channels = source.size[1]
    return (
        not settings.transposed
        and len(source.size) in (4, 5)
        and channels == settings.groups > 1
        and weight.size[0] % channels == 0
    )


def cudnn_convolves(dtype: torch.dtype, capability: Capability) -> bool:
    """Convolution.cpp, ConvParams::use_cudnn: bfloat16 only since compute capability 8.0."""
    return bool(torch._C._get_cudnn_enabled()) and (dtype is not torch.bfloat16 or capability >= (8, 0))


def cudnn_runs_depthwise(
    source: Operand, weight: Operand, settings: ConvolutionSettings, capability: Capability
) -> bool:
    """Convolution.cpp, ConvParams::use_cudnn_depthwise: channels last always, else only some half-precision sizes."""
    if prefers_channels_last(source, weight):
        return True
    if capability < (7, 0):
        return False
    size, stride = source.size, settings.stride
    fits = (
        source.dtype is torch.float16
        and weight.dtype is torch.float16
        and len(size) == 4
        and all(step == 1 for step in settings.dilation)
        and (stride[0] == stride[1] or size[2] == 1)
        and size[1] >= 32
    )
    return fits and _cudnn_is_faster(size, stride[1], weight.size)


def _cudnn_is_faster(size: Sequence[int], stride: int, weight: Sequence[int]) -> bool:
    """Convolution.cpp, check_cudnn_depthwise_workload_with_filter."""
    batch, channels, height, width = size
    if height == 1 and stride == 1:
        return True
    filter_width = weight[3]
    if weight[2] != filter_width or filter_width not in (1, 3, 5) or width < 7:
        return False
    if stride != 2:
        return stride == 1
    if batch == 1:
        return filter_width != 1 or width <= 28
    if filter_width == 1:
        return batch <= 16 and channels >= 128 and width <= 7
    return channels >= 512 or (channels >= 256 and width >= 28)


def check_shapes(source: Operand, weight: Operand, settings: ConvolutionSettings) -> None:
    """Convolution.cpp, check_shape_forward: raise PyTorch's errors for wrong channels or an input that is too small."""
    needed = weight.size[0] if settings.transposed else weight.size[1] * settings.groups
    if source.size[1] != needed:
        given = "transposed=1" if settings.transposed else f"groups={settings.groups}"
        raise RuntimeError(
            f"Given {given}, weight of size {list(weight.size)}, expected input{list(source.size)} to have "
            f"{needed} channels, but got {source.size[1]} channels instead"
        )
    if settings.transposed:
        return
    padded = [length + 2 * padding for length, padding in zip(source.size[2:], settings.padding, strict=True)]
    kernel = [dilation * (length - 1) + 1 for length, dilation in zip(weight.size[2:], settings.dilation, strict=True)]
    if any(length < reach for length, reach in zip(padded, kernel, strict=True)):
        raise RuntimeError(
            f"Calculated padded input size per channel: ({' x '.join(map(str, padded))}). "
            f"Kernel size: ({' x '.join(map(str, kernel))}). Kernel size can't be greater than actual input size"
        )
