"""Layer, root-mean-square and group normalization.

aten/src/ATen/native/cuda/layer_norm_kernel.cu and group_norm_kernel.cu
"""

from __future__ import annotations

from typing import Any

import torch

from ullage.virtual.kernels.layouts import accumulate_type, ceil_div, copy_size, elements
from ullage.virtual.kernels.plan import New, Output, Plan, Steps, contiguous_strides, new
from ullage.virtual.kernels.reductions import Kind, add_buffers, partial_size
from ullage.virtual.kernels.registry import Call, kernel

# layer_norm_kernel.cu, LaunchGammaBetaBackwardCUDAKernel: above so many rows, blocks of 32 columns and 32 rows leave
# partial sums, which are then added up; no more than 32768 blocks.
_MANY_ROWS, _BLOCK_WIDTH, _BLOCK_ROWS, _MAX_BLOCKS = 64 * 1024, 32, 32, 32 * 1024


@kernel("aten.native_layer_norm.default")
def layer_norm(call: Call) -> Plan:
    """layer_norm_kernel.cu, layer_norm_cuda: a contiguous copy first; statistics in single precision."""
    source, shape, weight, bias = call.args[:4]
    copies = [copy_size(tensor) for tensor in (source, weight, bias)]
    statistics = new(_statistics_size(source, shape), accumulate_type(source.dtype))
    steps = Steps().temporary(*[size for size in copies if size]).output(0, 1, 2)
    return Plan([new(tuple(source.shape), source.dtype), statistics, statistics], steps.steps)


def _statistics_size(source: torch.Tensor, shape: Any) -> tuple[int, ...]:
    return (*source.shape[: source.dim() - len(shape)], *([1] * len(shape)))


@kernel("aten.native_layer_norm_backward.default")
def layer_norm_backward(call: Call) -> Plan:
    """layer_norm_kernel.cu, layer_norm_backward_cuda."""
    grad, source, shape, _, _, weight, bias, mask = call.args
    return _backward(call, grad, source, elements(shape), [weight, bias], mask)


@kernel("aten._fused_rms_norm.default")
def rms_norm(call: Call) -> Plan:
    """layer_norm_kernel.cu, _fused_rms_norm_cuda."""
    source, shape, weight = call.args[:3]
    copies = [copy_size(tensor) for tensor in (source, weight)]
    statistics = new(_statistics_size(source, shape), accumulate_type(source.dtype))
    steps = Steps().temporary(*[size for size in copies if size]).output(0, 1)
    return Plan([new(tuple(source.shape), source.dtype), statistics], steps.steps)


@kernel("aten._fused_rms_norm_backward.default")
def rms_norm_backward(call: Call) -> Plan:
    """layer_norm_kernel.cu, _fused_rms_norm_backward_cuda: as layer norm, without a bias."""
    grad, source, shape, _, weight, mask = call.args
    return _backward(call, grad, source, elements(shape), [weight], mask)


def _backward(
    call: Call, grad: torch.Tensor, source: torch.Tensor, columns: int, parameters: list[Any], mask: Any
) -> Plan:
    steps = Steps()
    for tensor in (source, *parameters):
        if copy_size(tensor):
            steps.temporary(copy_size(tensor))
    outputs: list[Output] = [new(tuple(source.shape), source.dtype) if mask[0] else None]
    outputs += [
        new(tuple(p.shape), p.dtype) if wanted else None for p, wanted in zip(parameters, mask[1:], strict=True)
    ]
    rows = source.numel() // max(1, columns)
    sms = call.gpu.spec.sms or 1
    in_parts = rows > _MANY_ROWS and columns // _BLOCK_WIDTH < sms // 2
    wanted = [place for place, output in enumerate(outputs) if output is not None and place > 0]
    if mask[0]:
        steps.output(0)
    if not (in_parts and wanted):
        steps.output(*wanted)
        if copy_size(grad):
            steps.temporary(copy_size(grad))
        return Plan(outputs, steps.steps)
    _add_partial_sums(steps, call, outputs, wanted, rows, columns, copy_size(grad))
    return Plan(outputs, steps.steps)


def _add_partial_sums(
    steps: Steps, call: Call, outputs: list[Output], wanted: list[int], rows: int, columns: int, copy: int
) -> None:
    """The gradients that were made first are thrown away: sums of the partial results take their place."""
    blocks = min(_MAX_BLOCKS // ceil_div(columns, _BLOCK_WIDTH), ceil_div(rows, _BLOCK_ROWS))
    made = [output for place in wanted if isinstance(output := outputs[place], New)]
    thrown_away = [steps.take(output.nbytes) for output in made]
    if copy:
        steps.temporary(copy)
    steps.temporary(*[blocks * columns * output.dtype.itemsize for output in made])
    for index, output in enumerate(made):
        steps.output(wanted[index])
        partial = torch.empty_strided((blocks, columns), contiguous_strides((blocks, columns)), device="meta")
        kind = Kind(output.dtype.itemsize, partial_size(output.dtype))
        add_buffers(steps, call, partial.to(output.dtype), [0], kind, output.dtype.itemsize)
        steps.free(thrown_away[index])


@kernel("aten.native_group_norm.default")
def group_norm(call: Call) -> Plan:
    """group_norm_kernel.cu, GroupNormKernelImplInternal: a scale and a shift for every channel of every sample."""
    plan = call.infer()
    source, weight, bias, batch, channels, positions = call.args[:6]
    steps = Steps().output(0, 1, 2)
    if positions > 1 and (weight is not None or bias is not None):
        size = batch * channels * accumulate_type(source.dtype).itemsize
        steps.temporary(size, size)
    return Plan(plan.outputs, steps.steps)


@kernel("aten.native_group_norm_backward.default")
def group_norm_backward(call: Call) -> Plan:
    """group_norm_kernel.cu, GroupNormBackwardKernelImplInternal: two sums a channel, coefficients a group."""
    source, weight, batch, channels, positions, groups, mask = (call.args[place] for place in (1, 4, 5, 6, 7, 8, 9))
    grad = call.args[0]
    parameter = new((channels,), weight.dtype) if weight is not None else None
    outputs: list[Output] = [new(tuple(source.shape), source.dtype) if mask[0] else None]
    outputs += [parameter if wanted else None for wanted in mask[1:]]
    itemsize = accumulate_type(source.dtype).itemsize
    steps = Steps()
    for tensor in (grad, source):
        if copy_size(tensor):
            steps.temporary(copy_size(tensor))
    steps.output(*[place for place, output in enumerate(outputs) if output is not None])
    steps.temporary(batch * channels * itemsize, batch * channels * itemsize)
    if mask[0]:
        steps.temporary(batch * groups * itemsize, batch * groups * itemsize)
        if positions > 1 and weight is not None:
            steps.temporary(batch * channels * itemsize).free(-2, -3, -1)
    return Plan(outputs, steps.steps)
