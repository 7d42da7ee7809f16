"""Shapes that do not go together raise PyTorch's own errors; after check_shape_forward in ATen's Convolution.cpp."""

from __future__ import annotations

from ullage.virtual.kernels.convolution_layouts import Operand, Settings


def check_shapes(source: Operand, weight: Operand, settings: Settings) -> None:
    """Raise `RuntimeError` for an input with the wrong number of channels, or one smaller than the kernel."""
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
