"""Reductions: sums, extremes, products, counts, variances. For large tensors partial results need a buffer.

aten/src/ATen/native/cuda/Reduce.cuh decides by sizes, strides and the number of multiprocessors whether several blocks
work on one output. aten/src/ATen/TensorIterator.cpp decides in which order it sees the dimensions. Both are followed
step by step. The operators are in aten/src/ATen/native/ReduceOps.cpp and aten/src/ATen/native/cuda/Reduce*Kernel.cu.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ullage.virtual.kernels.plan import Call, New, Plan, Steps, kernel, like, twin

_MAX_THREADS = 512
_WARP = 32
_INT_MAX = 2**31 - 1
_MIN_VALUES_A_THREAD, _MAX_VALUES_A_THREAD = 16, 256


@dataclass(frozen=True, slots=True)
class Iteration:
    """A reduction as TensorIterator sees it: dimensions from the fastest on, the reduced ones first."""

    shape: tuple[int, ...]
    output_strides: tuple[int, ...]  # bytes; 0 where reduced
    input_strides: tuple[int, ...]  # bytes

    @property
    def reduced(self) -> int:
        """How many dimensions are reduced."""
        return sum(stride == 0 for stride in self.output_strides)


def iterate(
    size: Sequence[int], stride: Sequence[int], dims: Sequence[int], itemsize: int, out_itemsize: int
) -> Iteration:
    """Order and join the dimensions of a reduction over `dims` (TensorIteratorBase::reorder_dimensions, coalesce).

    >>> iterate((8, 128, 512), (65536, 512, 1), (0, 1), 2, 2).shape
    (1024, 512)
    """
    rank = len(size)
    reduced = {dim % rank for dim in dims} if dims and rank else set(range(rank))
    out, step = [0] * rank, out_itemsize
    for dim in reversed(range(rank)):
        if dim not in reduced:
            out[dim] = step
            step *= size[dim]
    # PyTorch views the output with stride 0 along reduced dimensions; dimensions of one element keep their strides.
    inp = [s * itemsize for s in stride]
    order = _ordered(size, out, inp)
    shape = [size[dim] for dim in order]
    return _joined(shape, [out[dim] for dim in order], [inp[dim] for dim in order])


def _ordered(size: Sequence[int], out: Sequence[int], inp: Sequence[int]) -> list[int]:
    def compare(first: int, second: int) -> int:
        for operand, is_output in ((out, True), (inp, False)):
            a, b = operand[first], operand[second]
            if is_output and (a == 0) != (b == 0):
                return 1 if b == 0 else -1
            if a == 0 or b == 0:
                continue
            if a != b:
                return -1 if a < b else 1
            if size[first] > size[second]:
                return 1
        return 0

    order = list(reversed(range(len(size))))
    for start in range(1, len(order)):
        place = start
        for before in range(start - 1, -1, -1):
            comparison = compare(order[before], order[place])
            if comparison > 0:
                order[before], order[place] = order[place], order[before]
                place = before
            elif comparison < 0:
                break
    return order


def _joined(shape: list[int], out: list[int], inp: list[int]) -> Iteration:
    if not shape:
        return Iteration((), (), ())
    last = 0
    for dim in range(1, len(shape)):
        fits = shape[last] == 1 or shape[dim] == 1
        fits = fits or all(shape[last] * strides[last] == strides[dim] for strides in (out, inp))
        if fits:
            if shape[last] == 1:
                out[last], inp[last] = out[dim], inp[dim]
            shape[last] *= shape[dim]
        else:
            last += 1
            shape[last], out[last], inp[last] = shape[dim], out[dim], inp[dim]
    count = last + 1
    return Iteration(tuple(shape[:count]), tuple(out[:count]), tuple(inp[:count]))


def split_to_32_bits(iteration: Iteration) -> list[Iteration]:
    """Halves of the longest dimension until offsets fit 32 bits (TensorIterator.cpp, SplitUntil32Bit)."""
    lengths = iteration.shape
    operands = (iteration.output_strides, iteration.input_strides)
    reach = [sum((n - 1) * step for n, step in zip(lengths, strides, strict=True)) for strides in operands]
    if max(reach, default=0) < _INT_MAX:
        return [iteration]
    extents = [max((lengths[dim] - 1) * strides[dim] for strides in operands) for dim in range(len(lengths))]
    dim = extents.index(max(extents))
    parts = []
    for length in (lengths[dim] // 2, lengths[dim] - lengths[dim] // 2):
        shape = (*lengths[:dim], length, *lengths[dim + 1 :])
        parts += split_to_32_bits(Iteration(shape, *operands))
    return parts


@dataclass(frozen=True, slots=True)
class Kind:
    """What a reduction kernel is compiled for: bytes of an element and of a partial result, values a thread reads."""

    itemsize: int
    partial: int
    values: int = 4
    vector: int = 4


def buffer_sizes(iteration: Iteration, kind: Kind, sms: int, threads_per_sm: int = 2048) -> tuple[int, int] | None:
    """Bytes of the buffer and of the counters in global memory, or `None` if no block shares its output.

    >>> iteration = iterate((8, 128, 512), (65536, 512, 1), (0, 1), 2, 2)
    >>> buffer_sizes(iteration, Kind(2, 4), 132)
    (4194304, 16)
    """
    total = 1
    for length in iteration.shape:
        total *= length
    outputs = 1
    for length, stride in zip(iteration.shape, iteration.output_strides, strict=True):
        if stride:
            outputs *= length
    if total == 0 or outputs == 0:
        return None
    inputs, reduced = total // outputs, iteration.reduced
    rank = len(iteration.shape)
    along_fastest, fastest_stride, width, height = True, kind.itemsize, 1, 1
    if rank:
        strides = iteration.input_strides
        along_fastest = reduced == rank or strides[0] < strides[reduced]
        fastest_stride = strides[0] if along_fastest else strides[reduced]
        width, height = (inputs, outputs) if along_fastest else (outputs, inputs)
    output_vector = 1
    if fastest_stride == kind.itemsize:
        if along_fastest and width > 128 and rank == 1 and kind.values >= kind.vector:
            width //= kind.vector
        elif not along_fastest:
            output_vector = _output_vector(iteration, kind.itemsize)
            width //= output_vector
    return _blocks(kind, inputs, outputs, width, height, along_fastest or not rank, output_vector, sms, threads_per_sm)


def _output_vector(iteration: Iteration, itemsize: int) -> int:
    vector, place = 4, iteration.reduced

    def shrink(number: int) -> None:
        nonlocal vector
        while number % vector:
            vector //= 2

    shrink(iteration.shape[place])
    for dim, stride in enumerate(iteration.input_strides):
        if dim != place:
            shrink(stride // itemsize)
    return vector


def _blocks(
    kind: Kind,
    inputs: int,
    outputs: int,
    width: int,
    height: int,
    reduce_in_block: bool,
    vector: int,
    sms: int,
    threads_per_sm: int,
) -> tuple[int, int] | None:
    limit = _MAX_THREADS // vector
    width2 = _last_power(width) if width < limit else limit
    height2 = _last_power(height) if height < limit else limit
    block_width = min(width2, _WARP)
    block_height = min(height2, limit // block_width)
    block_width = min(width2, limit // block_height)
    threads = block_width * block_height
    input_step, output_step = (block_width, 1) if reduce_in_block else (1, block_width)
    if -(-inputs // input_step) < min(block_height * 16, _MAX_VALUES_A_THREAD):
        return None
    input_step *= block_height
    values = -(-inputs // input_step)
    grid = -(-(outputs // vector) // output_step)
    target = sms * (threads_per_sm // threads)
    if values < _MAX_VALUES_A_THREAD or grid > target:
        return None
    blocks = min(-(-target // grid), -(-values // _MIN_VALUES_A_THREAD))
    blocks = max(blocks, -(-values // _MAX_VALUES_A_THREAD))
    if blocks <= 1:
        return None
    size = kind.partial * outputs * blocks
    if not reduce_in_block:
        size *= block_width * vector
    return size, 4 * grid


def _last_power(number: int) -> int:
    return 1 << (max(number, 1).bit_length() - 1)


def partial_size(dtype: torch.dtype) -> int:
    """Bytes of a partial sum: half precision is summed in single."""
    return max(4, dtype.itemsize) if dtype.is_floating_point else dtype.itemsize


def add_buffers(
    steps: Steps, call: Call, source: torch.Tensor, dims: Sequence[int], kind: Kind, out_itemsize: int
) -> None:
    """Add the buffers of a reduction to the steps of a plan: they live as long as its kernel."""
    whole = iterate(source.shape, source.stride(), dims, source.dtype.itemsize, out_itemsize)
    parts = split_to_32_bits(whole)
    for part in parts:
        sizes = buffer_sizes(part, kind, call.gpu.sms or 1, call.gpu.max_threads_per_sm or 2048)
        if sizes is not None:
            steps.temporary(*sizes).free(-1, -2)


def _dims(value: object) -> list[int]:
    if value is None:
        return []
    return [value] if isinstance(value, int) else list(value)  # type: ignore[call-overload]


@kernel("aten.sum.default", "aten.sum.dim_IntList", "aten.mean.default", "aten.mean.dim")
def sum_and_mean(call: Call) -> Plan:
    """ReduceOps.cpp: another result type means a cast first, except from half to single precision."""
    plan = call.infer()
    source, out = call.args[0], plan.outputs[0]
    assert isinstance(out, New)
    dims = (
        _dims(call.args[1])
        if call.func._overloadname in ("dim_IntList", "dim", "dim_OptIntList") and len(call.args) > 1
        else []
    )
    steps = Steps().output(0)
    half_to_single = source.dtype in (torch.float16, torch.bfloat16) and out.dtype is torch.float32
    if source.dtype is not out.dtype and not half_to_single:
        steps.temporary(source.numel() * out.dtype.itemsize)
        source = torch.empty_like(torch.empty_strided(source.shape, source.stride(), device="meta"), dtype=out.dtype)
    add_buffers(steps, call, source, dims, Kind(source.dtype.itemsize, partial_size(source.dtype)), out.dtype.itemsize)
    return Plan(plan.outputs, steps.steps, single=True)


@kernel("aten.linalg_vector_norm.default")
def vector_norm(call: Call) -> Plan:
    """LinearAlgebra.cpp, linalg_vector_norm_out; ReduceNormKernel.cu"""
    plan = call.infer()
    source, out = call.args[0], plan.outputs[0]
    assert isinstance(out, New)
    steps = Steps().output(0)
    dims = _dims(call.argument(2, "dim"))
    add_buffers(steps, call, source, dims, Kind(source.dtype.itemsize, partial_size(source.dtype)), out.dtype.itemsize)
    return Plan(plan.outputs, steps.steps, single=True)


# Extremes and their places, all, any, products and counts.

_VALUE_AND_PLACE = 16  # bytes of a value and a 64-bit place


def _as_list(dims: Any) -> list[int]:
    if dims is None:
        return []
    return [dims] if isinstance(dims, int) else list(dims)


def _reduction(call: Call, dims: Any, partial: int) -> Plan:
    """Outputs in order, then the buffers of one reduction whose partial results have so many bytes."""
    plan = call.infer()
    source = call.args[0]
    outputs = [output for output in plan.outputs if isinstance(output, New)]
    steps = Steps().output(*range(len(outputs)))
    kind = Kind(source.dtype.itemsize, partial)
    add_buffers(steps, call, source, _as_list(dims), kind, outputs[0].dtype.itemsize)
    return Plan(plan.outputs, steps.steps, single=plan.single)


@kernel("aten.max.default", "aten.min.default")
def extreme(call: Call) -> Plan:
    """ReduceMaxValuesKernel.cu: one number."""
    return _reduction(call, None, call.args[0].element_size())


@kernel("aten.amax.default", "aten.amin.default")
def extreme_along(call: Call) -> Plan:
    """ReduceMaxValuesKernel.cu, along dimensions."""
    return _reduction(call, call.argument(1, "dim"), call.args[0].element_size())


@kernel("aten.aminmax.default")
def both_extremes(call: Call) -> Plan:
    """ReduceAMinMaxKernel.cu: a pair of values."""
    return _reduction(call, call.argument(1, "dim"), 2 * call.args[0].element_size())


@kernel("aten.max.dim", "aten.min.dim", "aten.argmax.default", "aten.argmin.default")
def place_of_extreme(call: Call) -> Plan:
    """ReduceArgMaxKernel.cu: a value and where it is."""
    return _reduction(call, call.argument(1, "dim"), _VALUE_AND_PLACE)


@kernel("aten.all.default", "aten.any.default")
def logic(call: Call) -> Plan:
    """ReduceLogicKernel.cu: partial results have the type of the input."""
    return _reduction(call, None, call.args[0].element_size())


@kernel("aten.all.dim", "aten.any.dim", "aten.all.dims", "aten.any.dims")
def logic_along(call: Call) -> Plan:
    """ReduceLogicKernel.cu, along dimensions."""
    return _reduction(call, call.argument(1, "dim"), call.args[0].element_size())


@kernel("aten.prod.default", "aten.prod.dim_int", "aten.nansum.default")
def product(call: Call) -> Plan:
    """ReduceOps.cpp: as a sum; integers are cast to 64 bits first."""
    along = call.func._overloadname == "dim_int" or call.func._schema.name == "aten::nansum"
    return _sum(call, call.args[0], _as_list(call.argument(1, "dim")) if along else [])


def _sum(call: Call, source: torch.Tensor, dims: list[int], before: Steps | None = None) -> Plan:
    plan = call.infer()
    out = plan.outputs[0]
    assert isinstance(out, New)
    steps = (before or Steps()).output(0)
    add_sum(steps, call, source, dims, out.dtype)
    return Plan(plan.outputs, steps.steps, single=True)


def add_sum(steps: Steps, call: Call, source: torch.Tensor, dims: list[int], dtype: torch.dtype) -> None:
    """Add what a sum takes beside its output: a cast first, except from half to single precision."""
    half_to_single = source.dtype in (torch.float16, torch.bfloat16) and dtype is torch.float32
    copy = None
    if source.dtype is not dtype and not half_to_single:
        copy = steps.take(source.numel() * dtype.itemsize)
        source = torch.empty_like(twin(source), dtype=dtype)
    kind = Kind(source.dtype.itemsize, partial_size(source.dtype))
    add_buffers(steps, call, source, dims, kind, dtype.itemsize)
    if copy is not None:
        steps.free(copy)


@kernel("aten.count_nonzero.default", "aten.count_nonzero.dim_IntList")
def count_nonzero(call: Call) -> Plan:
    """TensorAdvancedIndexing.cpp, count_nonzero_cuda: the sum of a comparison."""
    source = call.args[0]
    dims = _as_list(call.args[1]) if call.func._overloadname == "dim_IntList" else []
    steps = Steps()
    if source.dtype is not torch.bool:
        steps.temporary(source.numel())
        source = torch.empty_like(twin(source), dtype=torch.bool)
    return _sum(call, source, dims, steps)


@kernel("aten.logsumexp.default")
def logsumexp(call: Call) -> Plan:
    """ReduceOps.cpp, logsumexp_out_impl: largest values, a mask of infinities, the sum of differences."""
    plan = call.infer()
    source, dims = call.args[0], _as_list(call.args[1])
    out = plan.outputs[0]
    assert isinstance(out, New)
    if not source.dtype.is_floating_point or source.numel() == 0:
        return plan
    itemsize = source.element_size()
    count = out.nbytes // out.dtype.itemsize
    steps = Steps()
    largest = steps.take(count * itemsize)
    add_buffers(steps, call, source, dims, Kind(itemsize, itemsize), itemsize)
    steps.temporary(count * itemsize, count).free(-1, -2)
    differences = like(source)
    inner = steps.take(differences.nbytes)
    steps.output(0)
    add_sum(steps, call, torch.empty_like(twin(source)), dims, out.dtype)
    return Plan(plan.outputs, steps.free(inner, largest).steps, single=True)


# Variance and standard deviation: partial results are Welford's running values (ReduceMomentKernel.cu).

_VALUES = 2  # values that a thread reads at a time; ReduceMomentKernel.cu, std_var_kernel_impl


def welford_kind(dtype: torch.dtype) -> Kind:
    """SharedReduceOps.h, WelfordData: mean, squares, a 32-bit count and the count as a floating-point number."""
    return Kind(dtype.itemsize, 32 if dtype is torch.float64 else 16, _VALUES, _VALUES)


def add_moments(steps: Steps, call: Call, source: torch.Tensor, dims: Sequence[int], out: torch.dtype) -> None:
    """Add what `var_mean` takes for two results of type `out`: a cast first, except from half to single precision."""
    copy = None
    if source.dtype is not out and not (source.dtype is torch.float16 and out is torch.float32):
        copy = steps.take(source.numel() * out.itemsize)
        source = torch.empty_like(twin(source), dtype=out)
    add_buffers(steps, call, source, dims, welford_kind(source.dtype), out.itemsize)
    if copy is not None:
        steps.free(copy)


def _moment_dims(call: Call) -> list[int]:
    dims = call.argument(1, "dim")
    return [] if dims is None else [dims] if isinstance(dims, int) else list(dims)


@kernel("aten.var.correction", "aten.std.correction")
def variance(call: Call) -> Plan:
    """ReduceOps.cpp, std_var_out: of complex numbers the sum of both parts' variances."""
    plan = call.infer()
    source, out = call.args[0], plan.outputs[0]
    assert isinstance(out, New)
    if source.is_complex():
        steps = Steps()
        part = torch.view_as_real(twin(source)).select(-1, 0)
        for _ in range(2):
            steps.temporary(out.nbytes)
            add_buffers(steps, call, part, _moment_dims(call), welford_kind(part.dtype), out.dtype.itemsize)
        return Plan(plan.outputs, steps.output(0).steps, single=True)
    steps = Steps().output(0)
    add_buffers(steps, call, source, _moment_dims(call), welford_kind(source.dtype), out.dtype.itemsize)
    return Plan(plan.outputs, steps.steps, single=True)


@kernel("aten.var_mean.correction", "aten.std_mean.correction")
def variance_and_mean(call: Call) -> Plan:
    """ReduceOps.cpp, std_var_mean_out."""
    plan = call.infer()
    source, out = call.args[0], plan.outputs[0]
    assert isinstance(out, New)
    steps = Steps().output(0, 1)
    add_moments(steps, call, source, _moment_dims(call), out.dtype)
    return Plan(plan.outputs, steps.steps)
