"""Convolutions: PyTorch's part. Which backend runs, which copies it makes, and in which order it asks for memory.

aten/src/ATen/native/Convolution.cpp chooses the backend, aten/src/ATen/native/ConvUtils.h the memory format,
aten/src/ATen/native/cudnn/ConvShared.cpp makes the copies and outputs, aten/src/ATen/native/cuda/DepthwiseConv2d.cu
and DepthwiseConv3d.cu are PyTorch's own depthwise kernels. How large cuDNN's workspace is, `cudnn_choice.py` says.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ullage.virtual.kernels.convolution_checks import check_shapes
from ullage.virtual.kernels.convolution_layouts import (
    Operand,
    Settings,
    copy_bytes,
    cudnn_runs_depthwise,
    is_depthwise,
    laid_out,
    operand,
    output_size,
    prefers_channels_last,
    settings_of,
    strides_of,
    suggests_channels_last,
)
from ullage.virtual.kernels.cudnn_choice import workspace
from ullage.virtual.kernels.cudnn_workspaces import DATA, FILTER, FORWARD, Problem, Workspace
from ullage.virtual.kernels.plan import CONVOLUTION, Output, Plan, Steps, new
from ullage.virtual.kernels.reductions import Kind, add_buffers, partial_size
from ullage.virtual.kernels.registry import Call, kernel

Ask = Callable[[Problem], Workspace]

_KINDS = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16", torch.float64: "f64"}


def _problem(
    direction: str, source: Sequence[int], weight: Operand, out: Sequence[int], settings: Settings, channels_last: bool
) -> Problem:
    return Problem(
        direction,
        tuple(source),
        weight.size,
        tuple(out),
        settings.stride,
        settings.padding,
        settings.dilation,
        settings.groups,
        _KINDS.get(weight.dtype, ""),
        channels_last,
    )


class _Run:
    """The steps of one call, and the workspaces that it takes on the way."""

    def __init__(self, ask: Ask) -> None:
        self.steps, self.ask = Steps(), ask
        self.workspaces: list[Workspace] = []

    def copy(self, tensor: Operand, channels_last: bool) -> tuple[Operand, int | None]:
        """`tensor.contiguous(format)`, and the number of its temporary for `drop`."""
        size = copy_bytes(tensor, channels_last)
        place = self.steps.take(size) if size else None
        return laid_out(tensor, channels_last), place

    def drop(self, *places: int | None) -> None:
        """Give copies back, the last one first."""
        for place in reversed(places):
            if place is not None:
                self.steps.free(place)

    def workspace(self, problem: Problem) -> None:
        """cuDNN's workspace lives as long as the kernel."""
        found = self.ask(problem)
        self.workspaces.append(found)
        if found.larger > found.size:
            self.steps.doubt(found.larger)
        if found.size:
            self.steps.temporary(found.size).free(-1)

    def plan(self, outputs: list[Output], single: bool = False) -> Plan:
        """The call as a whole."""
        return Plan(
            outputs,
            self.steps.steps,
            single=single,
            library=CONVOLUTION if self.workspaces else "",
            guessed=any(found.guessed for found in self.workspaces),
            uncertain=max((found.larger - found.size for found in self.workspaces), default=0),
            surprise=max((found.surprise for found in self.workspaces), default=0),
        )

    def convolve(self, place: int, source: Operand, weight: Operand, out: Sequence[int], settings: Settings) -> Output:
        """ConvShared.cpp, cudnn_convolution_forward, as which a transposed convolution's input gradient runs too."""
        channels_last = prefers_channels_last(source, weight)
        self.steps.output(place)
        weight_copy = self.copy(weight, channels_last)[1]
        source_copy = self.copy(source, channels_last)[1]
        self.workspace(_problem(FORWARD, source.size, weight, out, settings, channels_last))
        self.drop(weight_copy, source_copy)
        return new(out, source.dtype, strides_of(out, channels_last))

    def convolve_back(
        self, place: int, grad: Operand, weight: Operand, size: Sequence[int], settings: Settings
    ) -> Output:
        """ConvShared.cpp, cudnn_convolution_backward_input, as which a transposed convolution runs too."""
        channels_last = prefers_channels_last(grad, weight)
        self.steps.output(place)
        weight_copy = self.copy(weight, channels_last)[1]
        grad_copy = self.copy(grad, channels_last)[1]
        self.workspace(_problem(DATA, size, weight, grad.size, settings, channels_last))
        self.drop(weight_copy, grad_copy)
        return new(size, grad.dtype, strides_of(size, channels_last))

    def filter_gradient(
        self, place: int, grad: Operand, source: Operand, weight: Operand, settings: Settings
    ) -> Output:
        """ConvShared.cpp, cudnn_convolution_backward_weight."""
        channels_last = prefers_channels_last(source, grad)
        grad_copy = self.copy(grad, channels_last)[1]
        source_copy = self.copy(source, channels_last)[1]
        self.steps.output(place)
        self.workspace(_problem(FILTER, source.size, weight, grad.size, settings, channels_last))
        self.drop(grad_copy, source_copy)
        return new(weight.size, grad.dtype, strides_of(weight.size, channels_last))


def _as_2d(tensor: Operand) -> Operand:
    """`tensor.unsqueeze(2)`: one-dimensional convolutions run as two-dimensional ones."""
    size, stride = tensor.size, tensor.stride
    return Operand((*size[:2], 1, size[2]), (*stride[:2], size[2] * stride[2], stride[2]), tensor.dtype)


def _as_1d(output: Output) -> Output:
    if output is None:
        return None
    size = (*output.size[:2], output.size[3])  # type: ignore[union-attr]
    return new(size, output.dtype)  # type: ignore[union-attr]


def forward_plan(source: Operand, weight: Operand, settings: Settings, cudnn: bool, ask: Ask) -> Plan:
    """Convolution.cpp, _convolution. The bias is added in place afterwards and takes nothing."""
    run = _Run(ask)
    flat = len(source.size) == 3
    if flat:
        source = _as_2d(run.copy(source, False)[0])
        weight, settings = _as_2d(weight), settings.viewed_as_2d()
    out = output_size(source.size, weight.size, settings)
    result: Output
    if 0 in source.size:
        result = new(out, source.dtype)
        run.steps.output(0)
    elif is_depthwise(source, weight, settings) and not (cudnn and cudnn_runs_depthwise(source, weight, settings)):
        run.copy(source, False)
        run.steps.output(0)
        run.copy(weight, False)
        result = new(out, source.dtype)
    elif not cudnn:
        result = _columns(run, source, weight, out, settings)
    else:
        source = run.copy(source, prefers_channels_last(source, weight))[0]
        run_it = run.convolve_back if settings.transposed else run.convolve
        result = run_it(0, source, weight, out, settings)
    outputs = [_as_1d(result) if flat else result]
    return run.plan(outputs, single=True)


def _columns(run: _Run, source: Operand, weight: Operand, out: Sequence[int], settings: Settings) -> Output:
    """Without cuDNN, im2col for one sample at a time (ConvolutionMM2d.cu, NaiveConvolutionTranspose2d.cu)."""
    run.copy(source, False)
    run.steps.output(0)
    space = 1
    for length in (source.size if settings.transposed else out)[2:]:
        space *= length
    taps = weight.size[1]
    for length in weight.size[2:]:
        taps *= length
    run.steps.temporary(taps * space * source.dtype.itemsize)
    return new(out, source.dtype)


def backward_plan(
    grad: Operand, source: Operand, weight: Operand, settings: Settings, mask: Sequence[bool], cudnn: bool, ask: Ask
) -> tuple[list[Output], _Run]:
    """Convolution.cpp, convolution_backward, without the bias; the outputs are gradients of input and filter."""
    run = _Run(ask)
    flat = len(source.size) == 3
    if flat:
        source = _as_2d(run.copy(source, False)[0])
        grad, weight, settings = _as_2d(grad), _as_2d(weight), settings.viewed_as_2d()
    if 0 in source.size:
        outputs: list[Output] = [new(tensor.size, tensor.dtype) for tensor in (source, weight)]
        run.steps.output(*(place for place in range(2) if mask[place]))
    elif is_depthwise(source, weight, settings) and not (cudnn and cudnn_runs_depthwise(source, weight, settings)):
        outputs = _depthwise_back(run, grad, source, weight, mask)
    else:
        outputs = _cudnn_back(run, grad, source, weight, settings, mask)
    outputs = [output if mask[place] else None for place, output in enumerate(outputs)]
    return [_as_1d(output) if flat else output for output in outputs], run


def _depthwise_back(run: _Run, grad: Operand, source: Operand, weight: Operand, mask: Sequence[bool]) -> list[Output]:
    """DepthwiseConv2d.cu takes the gradient of the filter first, DepthwiseConv3d.cu that of the input."""
    run.copy(grad, False)
    places = (1, 0) if len(source.size) == 4 else (0, 1)
    for place in places:
        if mask[place]:
            run.copy((weight, source)[place], False)
            run.steps.output(place)
    return [new(source.size, source.dtype), new(weight.size, weight.dtype)]


def _cudnn_back(
    run: _Run, grad: Operand, source: Operand, weight: Operand, settings: Settings, mask: Sequence[bool]
) -> list[Output]:
    """ConvShared.cpp, cudnn_convolution_backward and cudnn_convolution_transpose_backward."""
    kept: list[int | None] = []
    if mask[1]:
        source, place = run.copy(source, prefers_channels_last(source, weight))
        kept.append(place)
    wanted = suggests_channels_last(source)
    if suggests_channels_last(grad) is not wanted:  # Tensor.to(memory_format) goes by what the strides suggest
        grad = grad._replace(stride=strides_of(grad.size, wanted))
        kept.append(run.steps.take(grad.nbytes))
    outputs: list[Output] = [None, None]
    if mask[0]:
        if settings.transposed:
            outputs[0] = run.convolve(0, grad, weight, source.size, settings)
        else:
            outputs[0] = run.convolve_back(0, grad, weight, source.size, settings)
    if mask[1]:
        first, second = (source, grad) if settings.transposed else (grad, source)
        outputs[1] = run.filter_gradient(1, first, second, weight, settings)
    run.drop(*kept)
    return outputs


def _asker(call: Call) -> Ask:
    spec = call.gpu.spec
    return lambda problem: workspace(problem, spec.compute_capability, spec.sms)


@kernel("aten.convolution.default")
def convolution(call: Call) -> Plan:
    """Convolution.cpp, convolution"""
    source, weight = operand(call.args[0]), operand(call.args[1])
    settings = settings_of(call.args[3:9], len(source.size) - 2)
    check_shapes(source, weight, settings)
    return forward_plan(source, weight, settings, bool(call.gpu.settings()[0]), _asker(call))


@kernel("aten.convolution_backward.default")
def convolution_backward(call: Call) -> Plan:
    """Convolution.cpp, convolution_backward: the bias gradient is a sum over all but the channels."""
    grad, source, weight = (operand(tensor) for tensor in call.args[:3])
    settings = settings_of(call.args[4:10], len(source.size) - 2)
    mask = call.args[10]
    outputs, run = backward_plan(grad, source, weight, settings, mask, bool(call.gpu.settings()[0]), _asker(call))
    outputs.append(None)
    if mask[2]:
        outputs[2] = new((grad.size[1],), grad.dtype)
        run.steps.output(2)
        dims = [dim for dim in range(len(grad.size)) if dim != 1]
        itemsize = grad.dtype.itemsize
        add_buffers(run.steps, call, call.args[0], dims, Kind(itemsize, partial_size(grad.dtype)), itemsize)
    return run.plan(outputs)
