"""Layers of convolutional networks, and the problems that PyTorch passes to cuDNN for them."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from ullage.virtual.cudnn.convolution import backward_plan, forward_plan
from ullage.virtual.cudnn.formulas import ConvolutionProblem, Workspace
from ullage.virtual.cudnn.layouts import Operand, settings_of

TYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
LAYOUTS = ("c", "cl")


class ConvolutionLayer(NamedTuple):
    """A convolution without its batch size: `input` is channels and space, `weight` the whole filter."""

    input: tuple[int, ...]
    weight: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    transposed: bool
    output_padding: tuple[int, ...]
    groups: int

    def output(self) -> tuple[int, ...]:
        """Return channels and space of the output.

        >>> ConvolutionLayer((3, 224, 224), (64, 3, 7, 7), (2, 2), (3, 3), (1, 1), False, (0, 0), 1).output()
        (64, 112, 112)
        """
        lengths = []
        for dim, length in enumerate(self.input[1:]):
            reach = self.dilation[dim] * (self.weight[2 + dim] - 1)
            border = 2 * self.padding[dim] - reach
            if self.transposed:
                lengths.append((length - 1) * self.stride[dim] - border + self.output_padding[dim] + 1)
            else:
                lengths.append((length + border - 1) // self.stride[dim] + 1)
        channels = self.weight[1] * self.groups if self.transposed else self.weight[0]
        return (channels, *lengths)


class Configuration(NamedTuple):
    """A layer with a batch size, a type and a layout."""

    layer: ConvolutionLayer
    batch: int
    kind: str
    layout: str


def tensor_bytes(layer: ConvolutionLayer, batch: int, kind: str) -> int:
    """Return the bytes of input, output and filter together."""
    count = batch * (math.prod(layer.input) + math.prod(layer.output())) + math.prod(layer.weight)
    return count * TYPES[kind].itemsize


def operations(layer: ConvolutionLayer, batch: int) -> int:
    """Return the multiplications and additions of the forward call."""
    space = layer.input if layer.transposed else layer.output()
    return 2 * batch * math.prod(space) * math.prod(layer.weight[1:])


def layout_strides(shape: Sequence[int], layout: str) -> tuple[int, ...]:
    """Return the strides of a contiguous or channels-last tensor; below four dimensions both are contiguous.

    >>> layout_strides((2, 3, 4, 5), "cl")
    (60, 1, 15, 3)
    """
    last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(len(shape)) if layout == "cl" else None
    return torch.empty(tuple(shape), device="meta", memory_format=last or torch.contiguous_format).stride()


def native(layer: ConvolutionLayer, kind: str, layout: str) -> bool:
    """Whether PyTorch's own depthwise kernels run, which take no workspace (Convolution.cpp, `use_cudnn_depthwise`)."""
    depthwise = not layer.transposed and 1 < layer.groups == layer.input[0]
    return depthwise and layout == "c" and kind != "f16"


def problems_of(layer: ConvolutionLayer, batch: int, kind: str, layout: str) -> list[ConvolutionProblem]:
    problems: list[ConvolutionProblem] = []

    def ask(problem: ConvolutionProblem) -> Workspace:
        problems.append(problem)
        return Workspace(0, 0)

    def operand(size: tuple[int, ...]) -> Operand:
        return Operand(size, layout_strides(size, layout), TYPES[kind])

    source, weight, out = map(operand, ((batch, *layer.input), layer.weight, (batch, *layer.output())))
    settings = settings_of(layer[2:8], len(layer.input) - 1)
    forward_plan(source, weight, settings, True, ask)
    backward_plan(out, source, weight, settings, [True, True, False], True, ask)
    return problems
