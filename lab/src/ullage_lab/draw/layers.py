"""What is measured of convolutions: layers, and tasks.

A task names a layer, a batch size, a type, a layout and a direction. A file of tasks is gzipped JSON:
`{"layers": [...], "tasks": [...]}`; a layer is a list in the order of `ConvolutionLayer`'s fields, a task one in the
order of `ConvolutionTask`'s. `ullage lab draw convolutions` writes such a file on a machine without a GPU,
`ullage lab measure convolutions` measures it on one with a GPU.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ullage.virtual.kernels.cudnn.convolution import backward_plan, forward_plan
from ullage.virtual.kernels.cudnn.formulas import ConvolutionProblem, Workspace
from ullage.virtual.kernels.cudnn.layouts import Operand, settings_of
from ullage.virtual.kernels.plan import OUTPUT, TEMPORARY, New, Output

TYPES = ("f32", "f16", "bf16")
ITEM_BYTES = {"f32": 4, "f16": 2, "bf16": 2}
LAYOUTS = ("c", "cl")
FORWARD, BACKWARD = 0, 1


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
    bias: bool

    def output(self) -> tuple[int, ...]:
        """Channels and space of the output.

        >>> ConvolutionLayer((3, 224, 224), (64, 3, 7, 7), (2, 2), (3, 3), (1, 1), False, (0, 0), 1, False).output()
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

    def depthwise(self) -> bool:
        """Every group has one input channel: PyTorch may then use kernels of its own."""
        return not self.transposed and 1 < self.groups == self.input[0]


class ConvolutionTask(NamedTuple):
    """One call: numbers of the layer, of the type and of the layout; `FORWARD` or `BACKWARD`."""

    layer: int
    batch: int
    type: int
    layout: int
    direction: int


def elements(shape: Sequence[int]) -> int:
    """How many elements a tensor of this shape has."""
    count = 1
    for length in shape:
        count *= length
    return count


def tensor_bytes(layer: ConvolutionLayer, batch: int, kind: str) -> int:
    """Bytes of input, output and filter together."""
    count = batch * (elements(layer.input) + elements(layer.output())) + elements(layer.weight)
    return count * ITEM_BYTES[kind]


def operations(layer: ConvolutionLayer, batch: int) -> int:
    """Multiplications and additions of the forward call."""
    filters = elements(layer.weight[1:])
    space = layer.input if layer.transposed else layer.output()
    return 2 * batch * elements(space) * filters


def write_tasks(path: Path, layers: Sequence[ConvolutionLayer], tasks: Sequence[ConvolutionTask]) -> None:
    """Write a file of tasks; their order is the order of measuring."""
    content = json.dumps({"layers": layers, "tasks": tasks}, separators=(",", ":"))
    with gzip.open(path, "wt") as file:
        file.write(content)


def read_tasks(path: Path) -> tuple[list[ConvolutionLayer], list[ConvolutionTask]]:
    """Read what `write_tasks` wrote."""
    with gzip.open(path, "rt") as file:
        content = json.load(file)
    layers = [ConvolutionLayer._make(tuple(f) if isinstance(f, list) else f for f in row) for row in content["layers"]]
    return layers, [ConvolutionTask(*row) for row in content["tasks"]]


def describe(shape: Sequence[int], strides: Sequence[int], kind: str) -> list[Any]:
    """A tensor as the ground truth names it: shape, type, and `"c"`, `"cl"` or its strides."""
    if tuple(strides) == layout_strides(shape, "c"):
        return [list(shape), kind, "c"]
    return [list(shape), kind, "cl" if tuple(strides) == layout_strides(shape, "cl") else list(strides)]


def layout_strides(shape: Sequence[int], layout: str) -> tuple[int, ...]:
    """Strides of a contiguous or a channels-last tensor; below four dimensions both are contiguous.

    >>> layout_strides((2, 3, 4, 5), "cl")
    (60, 1, 15, 3)
    """
    order = list(range(len(shape)))
    if layout == "cl" and len(shape) >= 4:
        order = [0, *order[2:], 1]
    strides, step = [0] * len(shape), 1
    for dim in reversed(order):
        strides[dim] = step
        step *= max(shape[dim], 1)
    return tuple(strides)


def native(layer: ConvolutionLayer, kind: str, layout: str) -> bool:
    """PyTorch's own depthwise kernels take no workspace (Convolution.cpp, `use_cudnn_depthwise`)."""
    return layer.depthwise() and layout == "c" and kind != "f16"


# Measured convolution calls taken apart: which of the requests of a call are cuDNN's workspaces.
#
# The rule of the virtual GPU says in which order PyTorch asks for outputs and copies, with a gap where cuDNN may ask
# for a workspace; what a measured call asked for is laid beside it.

_DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}


def read_calls(path: Path) -> Iterator[Any]:
    """The lines of a measured file that are convolutions."""
    with gzip.open(path, "rt") as file:
        for line in file:
            if line.startswith('[["aten.convolution'):
                yield json.loads(line)


def workspaces_of(row: Any) -> list[tuple[ConvolutionProblem, int]] | None:
    """The problems that a measured call gave to cuDNN, with the bytes of each workspace; `None` if it does not fit.

    >>> call = ["aten.convolution.default", [[[1, 8, 4, 4], "f32", "c"], [[8, 8, 1, 1], "f32", "c"], None,
    ...         [1, 1], [0, 0], [1, 1], False, [0, 0], 1], {}]
    >>> [size for _, size in workspaces_of([call, [512, 400], [512], 2])]
    [400]
    """
    (name, arguments, _), requests, _, count = row
    asked: list[ConvolutionProblem] = []

    def ask(problem: ConvolutionProblem) -> Workspace:
        asked.append(problem)
        return Workspace(-len(asked), -len(asked))

    if name == "aten.convolution.default":
        source, weight = _operand(arguments[0]), _operand(arguments[1])
        plan = forward_plan(source, weight, settings_of(arguments[3:9], len(source.size) - 2), True, ask)
        template = _template(plan.steps or [], plan.outputs)
        sum_follows = False
    else:
        grad, source, weight = (_operand(value) for value in arguments[:3])
        settings, mask = settings_of(arguments[4:10], len(source.size) - 2), arguments[10]
        outputs, run = backward_plan(grad, source, weight, settings, mask, True, ask)
        template = _template(run.steps.steps, outputs)
        sum_follows = bool(mask[2])
        if sum_follows:
            template.append(grad.size[1] * grad.dtype.itemsize)
    if count != len(requests):
        return None
    sizes = _fit(template, requests, sum_follows)
    return None if sizes is None else [(problem, sizes.get(-place - 1, 0)) for place, problem in enumerate(asked)]


def _operand(described: Any) -> Operand:
    size, kind, layout = described
    strides = layout_strides(size, layout) if isinstance(layout, str) else tuple(layout)
    return Operand(tuple(size), strides, _DTYPES[kind])


def _template(steps: Iterable[tuple[int, int]], outputs: Sequence[Output]) -> list[int]:
    """Sizes in order; negative numbers stand for workspaces."""
    sizes = []
    for step, value in steps:
        if step == OUTPUT:
            output = outputs[value]
            assert isinstance(output, New)
            sizes.append(output.nbytes)
        elif step == TEMPORARY:
            sizes.append(value)
    return [size for size in sizes if size]


def _fit(template: Sequence[int], requests: Sequence[int], more: bool) -> dict[int, int] | None:
    """Sizes of the gaps so that the template is the list of requests; a gap may be nothing."""
    if not template:
        return {} if more or not requests else None
    first = template[0]
    if first >= 0:
        return _fit(template[1:], requests[1:], more) if requests and requests[0] == first else None
    without = _fit(template[1:], requests, more)
    if without is not None or not requests:
        return without
    rest = _fit(template[1:], requests[1:], more)
    return None if rest is None else {first: requests[0], **rest}
