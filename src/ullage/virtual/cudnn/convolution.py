"""Convolutions, PyTorch's part: the backend (aten/src/ATen/native/Convolution.cpp), the memory format (ConvUtils.h),
the copies and outputs (cudnn/ConvShared.cpp, cuda/DepthwiseConv2d.cu, DepthwiseConv3d.cu), and the order of
requests."""

import math
from collections.abc import Callable, Sequence

import torch

from ullage.hardware.specification import MEASURED_CAPABILITY
from ullage.virtual.call.plan import CONVOLUTION, CUBLAS, Call, Output, Plan, Steps, kernel, new, tf32_for_convolutions
from ullage.virtual.cudnn import cudnn_query
from ullage.virtual.cudnn.formulas import DATA, FILTER, FORWARD, ConvolutionProblem, Trial, Workspace
from ullage.virtual.cudnn.layouts import (
    Capability,
    ConvolutionSettings,
    Operand,
    check_shapes,
    copy_bytes,
    cudnn_convolves,
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
from ullage.virtual.cudnn.workspaces import measured, trial, workspace
from ullage.virtual.operators.reductions import add_buffers, sum_kind
from ullage.virtual.releases import MEASURED_CUDNN

Ask = Callable[[ConvolutionProblem], Workspace | Trial]

_KINDS = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16", torch.float64: "f64"}


def _problem(
    direction: str,
    source: Sequence[int],
    weight: Operand,
    out: Sequence[int],
    settings: ConvolutionSettings,
    channels_last: bool,
) -> ConvolutionProblem:
    sizes, kind = (tuple(source), weight.size, tuple(out)), _KINDS.get(weight.dtype, "")
    return ConvolutionProblem(direction, *sizes, *settings[:3], settings.groups, kind, channels_last)


class _Run:
    """The steps of one call, and the workspaces that it allocates between them."""

    def __init__(self, ask: Ask) -> None:
        self.steps, self.ask, self.library = Steps(), ask, ""
        self.workspaces: dict[ConvolutionProblem, Workspace] = {}
        self.trials: list[tuple[ConvolutionProblem, Trial]] = []

    def copy(self, tensor: Operand, channels_last: bool) -> tuple[Operand, int | None]:
        """Do `tensor.contiguous(format)`; return the copy and the number of its temporary for `drop`."""
        size = copy_bytes(tensor, channels_last)
        place = self.steps.take(size) if size else None
        return laid_out(tensor, channels_last), place

    def drop(self, *places: int | None) -> None:
        for place in reversed(places):
            if place is not None:
                self.steps.free(place)

    def workspace(self, problem: ConvolutionProblem) -> None:
        """Allocate cuDNN's workspace, which lives as long as the kernel."""
        answer = self.ask(problem)
        self.workspaces[problem] = answer.winner if isinstance(answer, Trial) else answer
        if isinstance(answer, Trial):
            self.steps.trial(len(self.trials))
            self.trials.append((problem, answer))
            return
        if answer.larger > answer.size:
            self.steps.or_larger(answer.larger)
        if answer.size:
            self.steps.temporary(answer.size).free(-1)

    def plan(self, outputs: list[Output], single: bool = False) -> Plan:
        return Plan(
            outputs,
            self.steps.steps,
            single=single,
            library=CONVOLUTION if self.workspaces else self.library,
            workspaces=self.workspaces or None,
            trials=self.trials or None,
        )

    def convolve(
        self, back: bool, given: Operand, weight: Operand, size: Sequence[int], settings: ConvolutionSettings
    ) -> Output:
        """ConvShared.cpp: cudnn_convolution_forward, or cudnn_convolution_backward_input if `back`; a transposed one is
        the other."""
        channels_last = prefers_channels_last(given, weight)
        self.steps.output(0)
        copies = [self.copy(tensor, channels_last)[1] for tensor in (weight, given)]
        direction, source, out = (DATA, size, given.size) if back else (FORWARD, given.size, size)
        self.workspace(_problem(direction, source, weight, out, settings, channels_last))
        self.drop(*copies)
        return new(size, given.dtype, strides_of(size, channels_last))

    def filter_gradient(self, grad: Operand, source: Operand, weight: Operand, settings: ConvolutionSettings) -> Output:
        """ConvShared.cpp, cudnn_convolution_backward_weight."""
        channels_last = prefers_channels_last(source, grad)
        copies = [self.copy(tensor, channels_last)[1] for tensor in (grad, source)]
        self.steps.output(1)
        self.workspace(_problem(FILTER, source.size, weight, grad.size, settings, channels_last))
        self.drop(*copies)
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


def forward_plan(
    source: Operand,
    weight: Operand,
    settings: ConvolutionSettings,
    cudnn: bool,
    ask: Ask,
    capability: Capability = MEASURED_CAPABILITY,
) -> Plan:
    """Convolution.cpp, _convolution. The bias is added in place afterwards and needs no memory."""
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
    elif is_depthwise(source, weight, settings) and not (
        cudnn and cudnn_runs_depthwise(source, weight, settings, capability)
    ):
        run.copy(source, False)
        run.steps.output(0)
        run.copy(weight, False)
        result = new(out, source.dtype)
    elif not cudnn:
        result = _by_columns(run, source, weight, out, settings)
    else:
        source = run.copy(source, prefers_channels_last(source, weight))[0]
        result = run.convolve(settings.transposed, source, weight, out, settings)
    outputs = [_as_1d(result) if flat else result]
    return run.plan(outputs, single=True)


def _columns(source: Operand, weight: Operand, out: Sequence[int], settings: ConvolutionSettings) -> int:
    """Return the bytes of one sample's columns in one group (ConvolutionMM2d.cu, NaiveConvolutionTranspose2d.cu)."""
    space = math.prod((source.size if settings.transposed else out)[2:])
    return math.prod(weight.size[1:]) * space * source.dtype.itemsize


def _by_columns(
    run: _Run, source: Operand, weight: Operand, out: Sequence[int], settings: ConvolutionSettings
) -> Output:
    """Without cuDNN, im2col for one sample at a time, and one group after the other; PyTorch joins their results."""
    run.copy(source, False)
    run.library = CUBLAS
    result, groups = new(tuple(out), source.dtype), settings.groups
    parts = [run.steps.take(result.nbytes // groups) for _ in range(groups)] if groups > 1 else []
    if not parts:
        run.steps.output(0)
    # ConvolutionMM2d.cu, requires_columns: a filter of one point reads the input as it is
    point = all(length == 1 for length in (*weight.size[2:], *settings.stride)) and not any(settings.padding)
    if settings.transposed or not point or len(weight.size) != 4:
        run.steps.temporary(_columns(source, weight, out, settings)).free(-1)
    if parts:
        run.steps.output(0).free(*parts)
    return result


def _columns_back(
    run: _Run, grad: Operand, source: Operand, weight: Operand, settings: ConvolutionSettings, mask: Sequence[bool]
) -> list[Output]:
    """ConvolutionMM2d.cu, slow_conv2d_backward_out_cuda: the same columns for either gradient."""
    run.copy(grad, False)
    run.library = CUBLAS
    columns = _columns(source, weight, grad.size, settings)
    for place in range(2):
        if mask[place]:
            run.copy((weight, source)[place], False)
            run.steps.output(place)
            run.steps.temporary(columns).free(-1)
    return [new(source.size, source.dtype), new(weight.size, weight.dtype)]


def backward_plan(
    grad: Operand,
    source: Operand,
    weight: Operand,
    settings: ConvolutionSettings,
    mask: Sequence[bool],
    cudnn: bool,
    ask: Ask,
    capability: Capability = MEASURED_CAPABILITY,
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
    elif is_depthwise(source, weight, settings) and not (
        cudnn and cudnn_runs_depthwise(source, weight, settings, capability)
    ):
        outputs = _depthwise_back(run, grad, source, weight, mask)
    elif not cudnn:
        outputs = _columns_back(run, grad, source, weight, settings, mask)
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
    run: _Run, grad: Operand, source: Operand, weight: Operand, settings: ConvolutionSettings, mask: Sequence[bool]
) -> list[Output]:
    """ConvShared.cpp, cudnn_convolution_backward and cudnn_convolution_transpose_backward."""
    copies: list[int | None] = []
    if mask[1]:
        source, place = run.copy(source, prefers_channels_last(source, weight))
        copies.append(place)
    wanted = suggests_channels_last(source)
    if settings.transposed:
        grad, place = run.copy(grad, wanted)
        copies.append(place)
    elif suggests_channels_last(grad) is not wanted:  # Tensor.to(memory_format) reads the format off the strides
        grad = grad._replace(stride=strides_of(grad.size, wanted))
        copies.append(run.steps.take(grad.nbytes))
    outputs: list[Output] = [None, None]
    if mask[0]:
        outputs[0] = run.convolve(not settings.transposed, grad, weight, source.size, settings)
    if mask[1]:
        first, second = (source, grad) if settings.transposed else (grad, source)
        outputs[1] = run.filter_gradient(first, second, weight, settings)
    run.drop(*copies)
    return outputs


def _asker(call: Call) -> Ask:
    """Return the source of workspaces on this GPU: its own cuDNN, if that is queried, or else tables and trees."""
    spec, get = call.gpu, torch._C
    kind = spec.compute_capability, spec.sms
    deterministic = get._get_cudnn_deterministic() or get._get_deterministic_algorithms()
    tf32, tries = tf32_for_convolutions(), get._get_cudnn_benchmark()
    answers = cudnn_query.in_use(spec)

    def ask(problem: ConvolutionProblem) -> Workspace | Trial:
        plans = None
        if answers is not None and answers.cudnn is not None:
            same = cudnn_query.dotted(answers.cudnn) == MEASURED_CUDNN and tf32 and not deterministic and not tries
            if not same or measured(problem, *kind) is None:
                plans = answers.of(problem)
        answer = plans and (cudnn_query.trial if tries else cudnn_query.first)(plans, problem, tf32, deterministic)
        if answer:
            return answer
        return (trial if tries else workspace)(problem, *kind, tf32, deterministic)

    return ask


@kernel("aten.convolution.default")
def convolution(call: Call) -> Plan:
    source, weight = operand(call.args[0]), operand(call.args[1])
    settings = settings_of(call.args[3:9], len(source.size) - 2)
    check_shapes(source, weight, settings)
    capability = call.gpu.capability
    cudnn = cudnn_convolves(source.dtype, capability)
    return forward_plan(source, weight, settings, cudnn, _asker(call), capability)


@kernel("aten.convolution_backward.default")
def convolution_backward(call: Call) -> Plan:
    """Convolution.cpp, convolution_backward: the bias gradient is a sum over all but the channels."""
    grad, source, weight = (operand(tensor) for tensor in call.args[:3])
    settings = settings_of(call.args[4:10], len(source.size) - 2)
    mask = call.args[10]
    capability = call.gpu.capability
    cudnn = cudnn_convolves(source.dtype, capability)
    outputs, run = backward_plan(grad, source, weight, settings, mask, cudnn, _asker(call), capability)
    outputs.append(None)
    if mask[2]:
        outputs[2] = new((grad.size[1],), grad.dtype)
        run.steps.output(2)
        dims = [dim for dim in range(len(grad.size)) if dim != 1]
        add_buffers(run.steps, call, call.args[0], dims, sum_kind(grad.dtype), grad.dtype.itemsize)
    return run.plan(outputs)
