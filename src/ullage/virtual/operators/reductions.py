"""Reductions: sums, extremes, products, counts, variances. For large tensors partial results need a buffer.

aten/src/ATen/native/cuda/Reduce.cuh decides by sizes, strides and the number of multiprocessors whether several blocks
work on one output. aten/src/ATen/TensorIterator.cpp decides in which order it sees the dimensions. Both are followed
step by step. The operators are in aten/src/ATen/native/ReduceOps.cpp and aten/src/ATen/native/cuda/Reduce*Kernel.cu.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ullage.units import INT_MAX, ceil_div, last_power_of_two
from ullage.virtual.call.plan import Call, New, Plan, Rule, Steps, kernel, like, twin

_MAX_THREADS = 512
_WARP = 32
_MIN_VALUES_A_THREAD, _MAX_VALUES_A_THREAD = 16, 256


@dataclass(frozen=True, slots=True)
class Iteration:
    """A reduction as TensorIterator sees it: dimensions from the fastest on, the reduced ones first."""

    shape: tuple[int, ...]
    output_strides: tuple[int, ...]  # bytes; 0 where reduced
    input_strides: tuple[int, ...]  # bytes

    @property
    def reduced(self) -> int:
        """The number of reduced dimensions."""
        return sum(stride == 0 for stride in self.output_strides)


def iterate(
    size: Sequence[int], stride: Sequence[int], dims: Sequence[int], itemsize: int, out_itemsize: int
) -> Iteration:
    """Order and join the dimensions of a reduction over `dims` (TensorIteratorBase::reorder_dimensions, coalesce)."""
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
    """Halve the longest dimension until offsets fit 32 bits (TensorIterator.cpp, SplitUntil32Bit)."""
    lengths = iteration.shape
    operands = (iteration.output_strides, iteration.input_strides)
    reach = [sum((n - 1) * step for n, step in zip(lengths, strides, strict=True)) for strides in operands]
    if max(reach, default=0) < INT_MAX:
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
    """A kind of reduction kernel: bytes of an element and of a partial result, values that a thread reads."""

    itemsize: int
    partial: int
    values: int = 4
    vector: int = 4


def buffer_sizes(iteration: Iteration, kind: Kind, sms: int, threads_per_sm: int = 2048) -> tuple[int, int] | None:
    """Return the bytes of the buffer and of the counters in global memory, or `None` if no block shares its output."""
    total = math.prod(iteration.shape)
    pairs = zip(iteration.shape, iteration.output_strides, strict=True)
    outputs = math.prod(length for length, stride in pairs if stride)
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
    width2 = last_power_of_two(width) if width < limit else limit
    height2 = last_power_of_two(height) if height < limit else limit
    block_width = min(width2, _WARP)
    block_height = min(height2, limit // block_width)
    block_width = min(width2, limit // block_height)
    threads = block_width * block_height
    input_step, output_step = (block_width, 1) if reduce_in_block else (1, block_width)
    if ceil_div(inputs, input_step) < min(block_height * 16, _MAX_VALUES_A_THREAD):
        return None
    input_step *= block_height
    values = ceil_div(inputs, input_step)
    grid = ceil_div(outputs // vector, output_step)
    target = sms * (threads_per_sm // threads)
    if values < _MAX_VALUES_A_THREAD or grid > target:
        return None
    blocks = min(ceil_div(target, grid), ceil_div(values, _MIN_VALUES_A_THREAD))
    blocks = max(blocks, ceil_div(values, _MAX_VALUES_A_THREAD))
    if blocks <= 1:
        return None
    size = kind.partial * outputs * blocks
    if not reduce_in_block:
        size *= block_width * vector
    return size, 4 * grid


def sum_kind(dtype: torch.dtype) -> Kind:
    """Return a sum's kernel: half precision is summed in single."""
    return Kind(dtype.itemsize, max(4, dtype.itemsize) if dtype.is_floating_point else dtype.itemsize)


def welford_kind(dtype: torch.dtype) -> Kind:
    """SharedReduceOps.h, WelfordData: mean, squares, the count twice; two values at a time (ReduceMomentKernel.cu)."""
    return Kind(dtype.itemsize, 32 if dtype is torch.float64 else 16, 2, 2)


def add_buffers(
    steps: Steps, call: Call, source: torch.Tensor, dims: Sequence[int], kind: Kind, out_itemsize: int
) -> None:
    """Add the buffers of a reduction to the steps of a plan: they live as long as its kernel."""
    whole = iterate(source.shape, source.stride(), dims, source.dtype.itemsize, out_itemsize)
    for part in split_to_32_bits(whole):
        sizes = buffer_sizes(part, kind, call.gpu.multiprocessors, call.gpu.threads_per_sm)
        if sizes is not None:
            steps.temporary(*sizes).free(-1, -2)


def _add_with_cast(
    steps: Steps,
    call: Call,
    source: torch.Tensor,
    dims: Sequence[int],
    dtype: torch.dtype,
    kind_of: Callable[[torch.dtype], Kind],
    from_half: Sequence[torch.dtype],
) -> None:
    copy = None
    if source.dtype is not dtype and not (source.dtype in from_half and dtype is torch.float32):
        copy = steps.take(source.numel() * dtype.itemsize)
        source = torch.empty_like(twin(source), dtype=dtype)
    add_buffers(steps, call, source, dims, kind_of(source.dtype), dtype.itemsize)
    if copy is not None:
        steps.free(copy)


def add_sum(steps: Steps, call: Call, source: torch.Tensor, dims: Sequence[int], dtype: torch.dtype) -> None:
    """Add a sum's temporaries: a cast first, except from half to single precision."""
    _add_with_cast(steps, call, source, dims, dtype, sum_kind, (torch.float16, torch.bfloat16))


def add_moments(steps: Steps, call: Call, source: torch.Tensor, dims: Sequence[int], dtype: torch.dtype) -> None:
    """Add the temporaries of `var_mean`, for results of type `dtype`: a cast first, except from float16 to float32."""
    _add_with_cast(steps, call, source, dims, dtype, welford_kind, (torch.float16,))


def _dims(call: Call) -> list[int]:
    """Return the dimensions that a call reduces, by its schema; none for all of them."""
    places = [place for place, argument in enumerate(call.func._schema.arguments) if argument.name == "dim"]
    dims = call.argument(places[0], "dim") if places else None
    if dims is None:
        return []
    return [dims] if isinstance(dims, int) else list(dims)


# ReduceOps.cpp; Reduce*Kernel.cu. Sums: another result type means a cast first, except from half to single precision.


def _sum(call: Call, source: torch.Tensor, steps: Steps) -> Plan:
    out = call.output
    add_sum(steps.output(0), call, source, _dims(call), out.dtype)
    return steps.plan(out)


@kernel(
    "aten.sum.default",
    "aten.sum.dim_IntList",
    "aten.mean.default",
    "aten.mean.dim",
    "aten.prod.default",
    "aten.prod.dim_int",
    "aten.nansum.default",
)
def sum_mean_and_product(call: Call) -> Plan:
    """ReduceOps.cpp: integers are cast to 64 bits first."""
    return _sum(call, call.args[0], Steps())


@kernel("aten.count_nonzero.default", "aten.count_nonzero.dim_IntList")
def count_nonzero(call: Call) -> Plan:
    """TensorAdvancedIndexing.cpp, count_nonzero_cuda: the sum of a comparison."""
    source, steps = call.args[0], Steps()
    if source.dtype is not torch.bool:
        steps.temporary(source.numel())
        source = torch.empty_like(twin(source), dtype=torch.bool)
    return _sum(call, source, steps)


def _of_a_value(dtype: torch.dtype) -> Kind:
    return Kind(dtype.itemsize, dtype.itemsize)


# Operators without "aten.", the kernel, and its partial result.
_REDUCTIONS: tuple[tuple[str, str, Callable[[torch.dtype], Kind]], ...] = (
    ("max.default min.default amax.default amin.default", "ReduceMaxValuesKernel.cu", _of_a_value),
    ("aminmax.default", "ReduceAMinMaxKernel.cu", lambda dtype: Kind(dtype.itemsize, 2 * dtype.itemsize)),
    # with a 64-bit place
    ("max.dim min.dim argmax.default argmin.default", "ReduceArgMaxKernel.cu", lambda dtype: Kind(dtype.itemsize, 16)),
    ("all.default any.default all.dim any.dim all.dims any.dims", "ReduceLogicKernel.cu", _of_a_value),
    ("linalg_vector_norm.default", "LinearAlgebra.cpp, linalg_vector_norm_out; ReduceNormKernel.cu", sum_kind),
)


def _reduction(kind_of: Callable[[torch.dtype], Kind]) -> Rule:
    """Return a rule: outputs in order, then the buffers of one reduction."""

    def rule(call: Call) -> Plan:
        outputs, source = call.infer().outputs, call.args[0]
        steps = Steps().output(*range(len(outputs)))
        out = outputs[0]
        assert isinstance(out, New)
        add_buffers(steps, call, source, _dims(call), kind_of(source.dtype), out.dtype.itemsize)
        return steps.plan(*outputs)

    return rule


for _names, _, _kind in _REDUCTIONS:
    kernel(*(f"aten.{name}" for name in _names.split()))(_reduction(_kind))


@kernel("aten.logsumexp.default")
def logsumexp(call: Call) -> Plan:
    """ReduceOps.cpp, logsumexp_out_impl: largest values, a mask of infinities, the sum of differences."""
    source, out, dims = call.args[0], call.output, _dims(call)
    if not source.dtype.is_floating_point or source.numel() == 0:
        return call.infer()
    itemsize = source.element_size()
    count = out.nbytes // out.dtype.itemsize
    steps = Steps()
    largest = steps.take(count * itemsize)
    add_buffers(steps, call, source, dims, _of_a_value(source.dtype), itemsize)
    steps.temporary(count * itemsize, count).free(-1, -2)
    inner = steps.take(like(source).nbytes)
    steps.output(0)
    add_sum(steps, call, torch.empty_like(twin(source)), dims, out.dtype)
    return steps.free(inner, largest).plan(out)


# Variance and standard deviation: partial results are Welford's running values (ReduceMomentKernel.cu).


@kernel("aten.var.correction", "aten.std.correction")
def variance(call: Call) -> Plan:
    """ReduceOps.cpp, std_var_out: of complex numbers the sum of both parts' variances."""
    source, out, steps = call.args[0], call.output, Steps()
    if source.is_complex():
        part = torch.view_as_real(twin(source)).select(-1, 0)
        for _ in range(2):
            steps.temporary(out.nbytes)
            add_buffers(steps, call, part, _dims(call), welford_kind(part.dtype), out.dtype.itemsize)
        return steps.output(0).plan(out)
    steps.output(0)
    add_buffers(steps, call, source, _dims(call), welford_kind(source.dtype), out.dtype.itemsize)
    return steps.plan(out)


@kernel("aten.var_mean.correction", "aten.std_mean.correction")
def variance_and_mean(call: Call) -> Plan:
    """ReduceOps.cpp, std_var_mean_out."""
    outputs, steps = call.infer().outputs, Steps().output(0, 1)
    add_moments(steps, call, call.args[0], _dims(call), call.output.dtype)
    return steps.plan(*outputs)
