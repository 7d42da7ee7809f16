"""Layer, root-mean-square, group and batch normalization.

aten/src/ATen/native/cuda/layer_norm_kernel.cu, group_norm_kernel.cu, Normalization.cu and Normalization.cuh,
aten/src/ATen/native/cudnn/BatchNorm.cpp
"""

import math
from collections.abc import Sequence
from typing import Any

import torch

from ullage.units import ceil_div, last_power_of_two
from ullage.virtual.call.plan import (
    CUDNN,
    Call,
    New,
    Output,
    Plan,
    Steps,
    accumulate_type,
    contiguous,
    fits_32_bits,
    handler,
    kernel,
    like,
    new,
    suggested_format,
)
from ullage.virtual.cudnn.plans import figures_of
from ullage.virtual.operators.reductions import add_buffers, add_moments, sum_kind
from ullage.virtual.state import GPUState

# layer_norm_kernel.cu, LaunchGammaBetaBackwardCUDAKernel: above this number of rows, blocks of 32 columns and 32 rows
# leave partial sums, which are then added up; no more than 32768 blocks.
_MANY_ROWS, _BLOCK_WIDTH, _BLOCK_ROWS, _MAX_BLOCKS = 64 * 1024, 32, 32, 32 * 1024


@kernel("aten.native_layer_norm.default")
def layer_norm(call: Call) -> Plan:
    """layer_norm_kernel.cu, layer_norm_cuda: a contiguous copy first; statistics in single precision."""
    source, shape, weight, bias = call.args[:4]
    statistics = _statistics(source, shape)
    return Steps().copies(source, weight, bias).output(0, 1, 2).plan(contiguous(source), statistics, statistics)


def _statistics(source: torch.Tensor, shape: Any) -> New:
    size = (*source.shape[: source.dim() - len(shape)], *([1] * len(shape)))
    return new(size, accumulate_type(source.dtype))


@kernel("aten.native_layer_norm_backward.default")
def layer_norm_backward(call: Call) -> Plan:
    """layer_norm_kernel.cu, layer_norm_backward_cuda."""
    grad, source, shape, _, _, weight, bias, mask = call.args
    return _backward(call, grad, source, math.prod(shape), [weight, bias], mask)


@kernel("aten._fused_rms_norm.default")
def rms_norm(call: Call) -> Plan:
    """layer_norm_kernel.cu, _fused_rms_norm_cuda."""
    source, shape, weight = call.args[:3]
    return Steps().copies(source, weight).output(0, 1).plan(contiguous(source), _statistics(source, shape))


@kernel("aten._fused_rms_norm_backward.default")
def rms_norm_backward(call: Call) -> Plan:
    """layer_norm_kernel.cu, _fused_rms_norm_backward_cuda: as layer norm, without a bias."""
    grad, source, shape, _, weight, mask = call.args
    return _backward(call, grad, source, math.prod(shape), [weight], mask)


def _backward(
    call: Call, grad: torch.Tensor, source: torch.Tensor, columns: int, parameters: list[Any], mask: Any
) -> Plan:
    steps = Steps().copies(source, *parameters)
    outputs: list[Output] = [
        contiguous(tensor) if wanted else None for tensor, wanted in zip((source, *parameters), mask, strict=True)
    ]
    rows = source.numel() // max(1, columns)
    sms = call.gpu.multiprocessors
    in_parts = rows > _MANY_ROWS and columns // _BLOCK_WIDTH < sms // 2
    wanted = [place for place, output in enumerate(outputs) if output is not None and place > 0]
    if mask[0]:
        steps.output(0)
    if not (in_parts and wanted):
        return steps.output(*wanted).copies(grad).plan(*outputs)
    _add_partial_sums(steps, call, outputs, wanted, rows, columns, grad)
    return steps.plan(*outputs)


def _add_partial_sums(
    steps: Steps, call: Call, outputs: list[Output], wanted: list[int], rows: int, columns: int, grad: torch.Tensor
) -> None:
    """Add sums of partial results, which replace the gradients that were allocated first."""
    blocks = min(_MAX_BLOCKS // ceil_div(columns, _BLOCK_WIDTH), ceil_div(rows, _BLOCK_ROWS))
    made = [output for place in wanted if isinstance(output := outputs[place], New)]
    thrown_away = [steps.take(output.nbytes) for output in made]
    steps.copies(grad).temporary(*(blocks * columns * output.dtype.itemsize for output in made))
    for index, output in enumerate(made):
        steps.output(wanted[index])
        partial = torch.empty(blocks, columns, dtype=output.dtype, device="meta")
        add_buffers(steps, call, partial, [0], sum_kind(output.dtype), output.dtype.itemsize)
        steps.free(thrown_away[index])


@kernel("aten.native_group_norm.default")
def group_norm(call: Call) -> Plan:
    """group_norm_kernel.cu, GroupNormKernelImplInternal: a scale and a shift for every channel of every sample."""
    source, weight, bias, batch, channels, positions = call.args[:6]
    steps = Steps().output(0, 1, 2)
    if positions > 1 and (weight is not None or bias is not None):
        size = batch * channels * accumulate_type(source.dtype).itemsize
        steps.temporary(size, size)
    return steps.plan(*call.infer().outputs)


@kernel("aten.native_group_norm_backward.default")
def group_norm_backward(call: Call) -> Plan:
    """group_norm_kernel.cu, GroupNormBackwardKernelImplInternal: two sums a channel, coefficients a group."""
    grad, source, _, _, weight, batch, channels, positions, groups, mask = call.args
    parameter = new((channels,), weight.dtype) if weight is not None else None
    made = (contiguous(source), parameter, parameter)
    outputs: list[Output] = [output if wanted else None for output, wanted in zip(made, mask, strict=True)]
    itemsize = accumulate_type(source.dtype).itemsize
    steps = Steps().copies(grad, source).output(*_made(outputs))
    steps.temporary(batch * channels * itemsize, batch * channels * itemsize)
    if mask[0]:
        steps.temporary(batch * groups * itemsize, batch * groups * itemsize)
        if positions > 1 and weight is not None:
            steps.temporary(batch * channels * itemsize).free(-2, -3, -1)
    return steps.plan(*outputs)


def _made(outputs: Sequence[Output]) -> list[int]:
    return [place for place, output in enumerate(outputs) if output is not None]


# Batch normalization, by PyTorch's own kernels and by cuDNN.

# Normalization.cuh: threads of a block, its width, rows a thread works on, blocks along the rows, and the fewest of
# them that make partial results worth while.
_THREADS, _WIDTH, _ROWS_A_THREAD, _MAX_BATCH_NORM_BLOCKS, _MIN_BLOCKS = 512, 32, 16, 128, 8
_CONTIGUOUS, _CHANNELS_LAST, _GENERAL = range(3)


def _implementation(tensor: torch.Tensor) -> int:
    """Normalization.cu, batch_norm_choose_impl."""
    if not fits_32_bits(tensor) or (tensor.dim() == 5 and not tensor.is_contiguous()):
        return _GENERAL
    if _channels_lie_together(tensor):
        return _CHANNELS_LAST
    return _CONTIGUOUS if tensor.is_contiguous() else _GENERAL


def _channels_lie_together(tensor: torch.Tensor) -> bool:
    """Normalization.cu, batch_norm_use_channels_last_kernels."""
    if tensor.is_contiguous():
        return tensor.dim() > 1 and tensor.stride(1) == 1
    if tensor.dim() == 4:
        return tensor.is_contiguous(memory_format=torch.channels_last)
    return tensor.dim() == 5 and tensor.is_contiguous(memory_format=torch.channels_last_3d)


def blocks_along_rows(rows: int, channels: int) -> tuple[int, int]:
    """Return the blocks along the channels and along the rows (Normalization.cuh, flexible_launch_configs)."""
    width = min(last_power_of_two(channels), _WIDTH)
    height = min(last_power_of_two(ceil_div(rows, _ROWS_A_THREAD)), _THREADS // width)
    if width * height != _THREADS:
        width = min(last_power_of_two(channels), _THREADS // height)
    blocks = min(ceil_div(rows, height * _ROWS_A_THREAD), _MAX_BATCH_NORM_BLOCKS)
    return ceil_div(channels, width), 1 if blocks < _MIN_BLOCKS else blocks


def _add_staging(steps: Steps, tensor: torch.Tensor, numbers: int, itemsize: int) -> None:
    """Add the partial results of several blocks and a counter for each column of blocks, for one kernel's lifetime."""
    channels = tensor.shape[1]
    columns, blocks = blocks_along_rows(tensor.numel() // channels, channels)
    if blocks > 1:
        steps.temporary(numbers * channels * blocks * itemsize, 4 * columns).free(-1, -2)


def _channels(source: Any) -> int:
    """Return the channels of a normalization's input; 0 for an empty vector."""
    return int(source.shape[1]) if source.dim() > 1 else 0


@kernel(
    "aten.native_batch_norm.default", "aten._native_batch_norm_legit.default", "aten._native_batch_norm_legit.no_stats"
)
def native_forward(call: Call) -> Plan:
    """Normalization.cu, batch_norm_cuda."""
    training = call.args[3 if call.func._overloadname == "no_stats" else 5]  # without running statistics
    source, weight, bias = call.args[:3]
    kind = accumulate_type(source.dtype)
    saved = new((_channels(source),), kind)
    steps = Steps().output(0, 1, 2)
    implementation = _implementation(source)
    if training and source.numel():
        if implementation == _CHANNELS_LAST:
            _add_staging(steps, source, 4, kind.itemsize)
        elif implementation == _GENERAL:
            add_moments(steps, call, source, [dim for dim in range(source.dim()) if dim != 1], kind)
    if implementation == _GENERAL:  # batch_norm_elementwise: a missing weight or bias is a number on the GPU
        steps.temporary(*[kind.itemsize for parameter in (weight, bias) if parameter is None])
    return steps.plan(like(source), saved, saved)


@kernel("aten.native_batch_norm_backward.default")
def native_backward(call: Call) -> Plan:
    """Normalization.cu, batch_norm_backward_cuda."""
    grad, source, weight, running_mean, running_var, mean, invstd, train, _, mask = call.args
    reduces = train or mask[1] or mask[2]
    fits = fits_32_bits(source) and fits_32_bits(grad)
    if reduces and mask[0] and not _channels_lie_together(source) and fits:
        # Normalization.cuh, batch_norm_backward_cuda_template
        parameter = new((_channels(source),), weight.dtype) if weight is not None else None
        fused: list[Output] = [contiguous(source), *(parameter if wanted else None for wanted in mask[1:])]
        return Steps().output(*_made(fused)).plan(*fused)
    kind = accumulate_type(source.dtype)
    channels = _channels(source)
    steps = Steps()
    outputs: list[Output] = [None, None, None]
    if mean is not None and mean.numel() == 0 and reduces and running_mean.dtype is not kind:
        steps.temporary(channels * kind.itemsize)
    if invstd is not None and invstd.numel() == 0:
        steps.temporary(channels * kind.itemsize)
    if reduces:
        outputs[1:] = _reduce(steps, grad, source, weight, kind, mask)
    if mask[0]:
        outputs[0] = _input_gradient(steps, grad, source, weight, kind, train)
    return steps.plan(*outputs)


def _reduce(
    steps: Steps, grad: torch.Tensor, source: torch.Tensor, weight: torch.Tensor | None, kind: torch.dtype, mask: Any
) -> list[Output]:
    """Normalization.cu, batch_norm_backward_reduce_cuda: two sums a channel, then the gradients of weight and bias."""
    channels = _channels(source)
    together = fits_32_bits(grad) and _channels_lie_together(grad) and _channels_lie_together(source)
    if together or mask[0]:
        steps.temporary(channels * kind.itemsize, channels * kind.itemsize)
    made: list[Output] = [None, None]
    if weight is not None:
        made = [new((channels,), weight.dtype) if together or wanted else None for wanted in mask[1:]]
    elif together:
        made = [new((0,), kind), new((0,), kind)]
    steps.output(*_made([None, *made]))
    if together and source.numel():
        _add_staging(steps, source, 2, kind.itemsize)
    return made


def _input_gradient(
    steps: Steps, grad: torch.Tensor, source: torch.Tensor, weight: torch.Tensor | None, kind: torch.dtype, train: bool
) -> New:
    """Normalization.cu, batch_norm_elementwise_backward_train and _eval."""
    implementation = _implementation(source)
    if implementation != _implementation(grad):
        implementation = _GENERAL
    if train and implementation == _GENERAL and weight is None:
        steps.temporary(kind.itemsize)
    steps.output(0)
    if train and implementation == _CHANNELS_LAST:
        return like(source)
    if train and implementation == _CONTIGUOUS:
        return contiguous(source)
    return new(tuple(source.shape), grad.dtype, _strides(source) if train else None)


_FIGURES = figures_of("normalization")


def cudnn_workspace(size: Any, dtype: torch.dtype, forward: bool) -> int:
    """Return the bytes of cuDNN's workspace for a channels-last tensor of this size."""
    channels, rows = size[1], math.prod(size) // max(1, size[1])
    figures = _FIGURES["forward" if forward else "backward"]
    height, width = figures["rows_float16" if dtype is torch.float16 else "rows"], _FIGURES["width"]
    if channels % 4 and channels > 4:
        width = _FIGURES["odd_width"]
    elif channels % 4:
        height, width = 4 * height, _FIGURES["narrow_width"]
    column = 4 + (8 * width + figures["count"]) * ceil_div(rows, height)
    return int(figures["base"] + ceil_div(channels, width) * column)


def _is_channels_last(tensor: torch.Tensor) -> bool:
    return suggested_format(tensor) is not torch.contiguous_format and not tensor.is_contiguous()


@kernel("aten.cudnn_batch_norm.default")
def cudnn_forward(call: Call) -> Plan:
    """BatchNorm.cpp, cudnn_batch_norm: a workspace, and an empty reserve."""
    source, weight = call.args[:2]
    training = call.args[5]
    out = new(tuple(source.shape), source.dtype, _strides(source))
    reserve = new((0,), torch.uint8)
    if not training:
        none = new((0,), weight.dtype)
        return Steps().output(0, 1, 2, 3).plan(out, none, none, reserve, library=CUDNN)
    saved = new((_channels(source),), weight.dtype)
    steps = Steps().output(0, 1, 2)
    if _is_channels_last(source):
        steps.temporary(cudnn_workspace(source.shape, source.dtype, forward=True))
    return steps.output(3).plan(out, saved, saved, reserve, library=CUDNN)


@kernel("aten.cudnn_batch_norm_backward.default")
def cudnn_backward(call: Call) -> Plan:
    """BatchNorm.cpp, cudnn_batch_norm_backward: the gradient is brought into the input's layout first."""
    source, grad, weight = call.args[:3]
    out, parameter = new(tuple(source.shape), source.dtype, _strides(source)), contiguous(weight)
    steps = Steps().copies(grad, layout=suggested_format(source)).output(0, 1, 2)
    if _is_channels_last(source):
        steps.temporary(cudnn_workspace(source.shape, source.dtype, forward=False))
    return steps.plan(out, parameter, parameter)


def _strides(source: torch.Tensor) -> tuple[int, ...]:
    return torch.empty(source.shape, device="meta", memory_format=suggested_format(source)).stride()


# Operators of `torch.nn.SyncBatchNorm` (Normalization.cu): PyTorch infers no shapes for them.


@handler("aten.batch_norm_stats.default", "aten.batch_norm_gather_stats_with_counts.default")
def statistics(gpu: GPUState, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the mean and the inverse deviation by channel, in the type of sums."""
    dtype = torch.float64 if args[0].dtype is torch.float64 else torch.float32
    with gpu.mode:
        return tuple(args[0].new_empty(args[0].shape[1], dtype=dtype) for _ in range(2))


@handler("aten.batch_norm_elemt.default", "aten.batch_norm_backward_elemt.default")
def elementwise(gpu: GPUState, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the normalized input, or its gradient."""
    with gpu.mode:
        return torch.empty_like(args[0])


@handler("aten.batch_norm_backward_reduce.default")
def backward_sums(gpu: GPUState, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return sums of gradients by channel, and the gradients of the weights if requested."""
    mean, weight, (inputs, weights, biases) = args[2], args[4], args[5:8]
    like = mean if weight is None else weight
    with gpu.mode:
        made = [(mean, inputs), (mean, inputs), (like, weights), (like, biases)]
        return tuple(torch.empty_like(each) if wanted else None for each, wanted in made)
