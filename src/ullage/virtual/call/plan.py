"""Plans and kernel rules.

A plan lists the tensors that one operator call returns and its allocator requests, in order. A rule makes the plan of a
call: other outputs than PyTorch's shape inference gives, temporaries, and the order of requests. An operator without a
rule allocates its outputs in order and nothing else.

    @kernel("aten.sum.dim_IntList")
    def sum_over_dimensions(call: Call) -> Plan: ...
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Self, TypeVar

import torch

from ullage.hardware import GPU
from ullage.units import INT_MAX
from ullage.virtual.cudnn.formulas import ConvolutionProblem, Trial, Workspace

OUTPUT, TEMPORARY, FREE, MAY_BE_LARGER, TRIAL = range(5)
CUBLAS, CUBLAS_LT, CUDNN, CONVOLUTION = "cublas", "cublaslt", "cudnn", "convolution"  # libraries


class New(NamedTuple):
    """An output with its own memory."""

    size: Sequence[int]
    stride: Sequence[int]
    dtype: torch.dtype
    nbytes: int


class Alias(NamedTuple):
    """An output over the storage of an argument; `offset` counts from the argument's offset."""

    argument: Any  # its place: an index, a name, or a pair (index, place in the list)
    size: Sequence[int]
    stride: Sequence[int]
    offset: int
    dtype: torch.dtype
    conjugated: bool = False  # whether it is conjugated once more than the argument
    negated: bool = False


class Same(NamedTuple):
    """An output that is an argument itself."""

    argument: Any


Output = New | Alias | Same | None


def contiguous_strides(size: Sequence[int]) -> tuple[int, ...]:
    strides, step = [], 1
    for length in reversed(size):
        strides.append(step)
        step *= max(length, 1)
    return tuple(reversed(strides))


def is_contiguous(size: Sequence[int], stride: Sequence[int]) -> bool:
    """Check for row-major strides; dimensions of one element do not count."""
    expected = 1
    for length, step in zip(reversed(size), reversed(stride), strict=True):
        if length != 1 and step != expected:
            return False
        expected *= length
    return True


def is_dense(size: Sequence[int], stride: Sequence[int]) -> bool:
    """Check whether the elements fill a range of memory, in any order of dimensions."""
    expected = 1
    for step, length in sorted(zip(stride, size, strict=True)):
        if length == 0:
            return True
        if length == 1:
            continue
        if step != expected:
            return False
        expected *= length
    return True


def span_of_elements(size: Sequence[int], stride: Sequence[int]) -> int:
    """Return the number of elements that a storage needs for this size and these strides."""
    last = 1
    for length, step in zip(size, stride, strict=True):
        if length == 0:
            return 0
        last += (length - 1) * step
    return last


def new(size: Sequence[int], dtype: torch.dtype, stride: Sequence[int] | None = None) -> New:
    """Return an output of this size, contiguous unless strides are given."""
    strides = contiguous_strides(size) if stride is None else tuple(stride)
    return New(tuple(size), strides, dtype, span_of_elements(size, strides) * dtype.itemsize)


@dataclass(slots=True)
class Plan:
    """The outputs of one call, and its steps in the order of the real kernel.

    A step is `(OUTPUT, place among the outputs)`, `(TEMPORARY, bytes)` or `(FREE, place among the temporaries)`.
    `(MAY_BE_LARGER, bytes)` gives another possible size of the next temporary, or a possible temporary if none follows.
    `(TRIAL, place among the trials)` is a convolution whose plans `cudnn.benchmark` tries at its first call.
    Temporaries without a FREE step are freed at the end, last first. Without steps the outputs are allocated in order.
    """

    outputs: list[Output]
    steps: list[tuple[int, int]] | None = None
    single: bool = False
    as_list: bool = False
    defaults: dict[int, Any] | None = None  # outputs that are plain numbers
    host_outputs: dict[int, torch.dtype] | None = None  # single numbers: in CPU tensors, unless captured
    quick: Output = None  # the only output of a plan without steps; set by the mode
    small: bool = False  # whether the values of an output can be followed; set by the mode
    library: str = ""  # that runs the call: its code, and for cuBLAS a workspace, is loaded at first use
    workspaces: dict[ConvolutionProblem, Workspace] | None = None  # of cuDNN, measured or guessed
    trials: list[tuple[ConvolutionProblem, Trial]] | None = None  # of `cudnn.benchmark`
    note: tuple[str, str] | None = None  # for `GPUState.note`, at each call
    resized: tuple[tuple[Any, Sequence[int]], ...] = ()  # arguments given as `out` that get another size


class Steps:
    """Builds the steps of a plan in the order of the kernel. Temporaries of 0 bytes are numbered and left out."""

    def __init__(self) -> None:
        self.steps: list[tuple[int, int]] = []
        self._numbers: list[int | None] = []  # of the temporaries in the plan, `None` for one of no bytes
        self._in_plan = 0

    def output(self, *places: int) -> Self:
        self.steps.extend((OUTPUT, place) for place in places)
        return self

    def temporary(self, *sizes: int) -> Self:
        """Allocate temporaries of these sizes now; they are numbered from 0."""
        for size in sizes:
            self._numbers.append(self._in_plan if size else None)
            if size:
                self.steps.append((TEMPORARY, size))
                self._in_plan += 1
        return self

    def copies(self, *tensors: torch.Tensor | None, layout: torch.memory_format = torch.contiguous_format) -> Self:
        return self.temporary(*(copy_size(tensor, layout) for tensor in tensors))

    def or_larger(self, size: int) -> Self:
        """Note that a temporary of this size may come next."""
        self.steps.append((MAY_BE_LARGER, size))
        return self

    def trial(self, place: int) -> Self:
        """Run a convolution whose plans are tried at its first call."""
        self.steps.append((TRIAL, place))
        return self

    def take(self, size: int) -> int:
        """Allocate one temporary now and return its number, for `free`."""
        self.temporary(size)
        return len(self._numbers) - 1

    def free(self, *places: int) -> Self:
        """Free these temporaries now; -1 is the last one."""
        for place in places:
            number = self._numbers[place]
            if number is not None:
                self.steps.append((FREE, number))
        return self

    def plan(self, *outputs: Output, library: str = "", note: tuple[str, str] | None = None) -> Plan:
        """Return the plan with these steps; a single output is returned by itself."""
        in_order = [(OUTPUT, place) for place, output in enumerate(outputs) if isinstance(output, New)]
        steps = None if self.steps == in_order else self.steps
        return Plan(list(outputs), steps, single=len(outputs) == 1, library=library, note=note)


@dataclass(slots=True)
class Call:
    """One operator call on the virtual GPU: its arguments have shapes and no data."""

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    gpu: GPU
    infer: Callable[[], Plan]  # runs PyTorch's own shape inference

    def argument(self, place: int, name: str, default: Any = None) -> Any:
        return self.args[place] if len(self.args) > place else self.kwargs.get(name, default)

    @property
    def output(self) -> New:
        """Return the first output by PyTorch's shape inference, of an operator that makes a new tensor."""
        output = self.infer().outputs[0]
        assert isinstance(output, New)
        return output


def argument_at(place: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return the argument at a place as `Alias` has it."""
    if isinstance(place, tuple):
        return argument_at(place[0], args, kwargs)[place[1]]
    return kwargs[place] if isinstance(place, str) else args[place]


F = TypeVar("F", bound=Callable[..., Any])
Rule = Callable[[Call], Plan]
Handler = Callable[[Any, Any, tuple[Any, ...], dict[str, Any]], Any]
RULES: dict[str, Rule] = {}
HANDLERS: dict[str, Handler] = {}


def register(table: dict[str, F], names: tuple[str, ...]) -> Callable[[F], F]:
    """Return a decorator that enters a function under these names; a name that exists is refused."""

    def enter(function: F) -> F:
        for name in names:
            if name in table:
                raise ValueError(f"{name} is taken by {table[name].__qualname__}")
            table[name] = function
        return function

    return enter


def tf32_for_products() -> bool:
    """Check whether products of float32 matrices may be rounded to TF32."""
    try:
        return bool(torch._C._get_cublas_allow_tf32())
    except RuntimeError:  # it was set by the names of PyTorch 2.9, which the older name does not report
        return torch._C._get_fp32_precision_getter("cuda", "matmul") == "tf32"


def tf32_for_convolutions() -> bool:
    """Check whether convolutions of float32 may be rounded to TF32, PyTorch's default."""
    try:
        return bool(torch._C._get_cudnn_allow_tf32())
    except RuntimeError:
        return torch._C._get_fp32_precision_getter("cuda", "conv") == "tf32"


def benchmark_limit() -> int:
    """Return how many plans `cudnn.benchmark` times; 0 means all."""
    return torch._C._cuda_get_cudnn_benchmark_limit()


def kernel_switches() -> tuple[int, ...]:
    """Return PyTorch's global switches that select kernels; they are a part of a plan's key."""
    get = torch._C
    benchmark = get._get_cudnn_benchmark()
    return (
        get._get_cudnn_enabled(),
        benchmark,
        benchmark and benchmark_limit(),
        get._get_cudnn_deterministic(),
        tf32_for_convolutions(),
        get._get_deterministic_algorithms(),
        get._get_deterministic_algorithms_warn_only(),
    )


def kernel(*names: str) -> Callable[[Rule], Rule]:
    """Register a rule for operators by name, such as `"aten.sum.dim_IntList"`."""
    return register(RULES, names)


def handler(*names: str) -> Callable[[Handler], Handler]:
    """Register a handler for operators by name, or for a whole library by its name. It carries out an operator itself
    if a kernel rule is not enough: given the virtual GPU, the operator and its arguments, it returns the result, or
    `NotImplemented` to use the operator's rule."""
    return register(HANDLERS, names)


def gpu_handler(*names: str) -> Callable[[Handler], Handler]:
    """Register a handler of calls whose first argument is on the GPU; the CPU runs all others."""

    def enter(function: Handler) -> Handler:
        def handle(gpu: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            return function(gpu, func, args, kwargs) if args[0].is_cuda else gpu.host.call(func, args, kwargs)

        register(HANDLERS, names)(handle)
        return function

    return enter


@functools.cache
def written_places(func: Any) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Return the arguments that an operator writes to, by place and by name (such as `out`)."""
    written = [
        (place, argument)
        for place, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    return (
        tuple(place for place, argument in written if not argument.kwarg_only),
        tuple(argument.name for _, argument in written if argument.kwarg_only),
    )


# Checks of layouts that many CUDA kernels make.

LOW_PRECISION = (torch.float16, torch.bfloat16)


def accumulate_type(dtype: torch.dtype) -> torch.dtype:
    """aten/src/ATen/AccumulateType.h: half precision is summed in single."""
    return torch.float32 if dtype in LOW_PRECISION else dtype


def twin(tensor: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return a "meta" tensor of the same layout, to ask PyTorch about layouts."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype or tensor.dtype, device="meta")


def like(tensor: torch.Tensor, dtype: torch.dtype | None = None) -> New:
    """Return an output as `at::empty_like(tensor)` makes it: dense layouts are kept."""
    made = torch.empty_like(twin(tensor))
    return new(tuple(made.shape), dtype or tensor.dtype, made.stride())


def suggested_format(tensor: torch.Tensor) -> torch.memory_format:
    """`tensor.suggest_memory_format()`: channels last if the strides say so."""
    return torch._prims_common.suggest_memory_format(tensor)


def bytes_of(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def copy_size(tensor: torch.Tensor | None, memory_format: torch.memory_format = torch.contiguous_format) -> int:
    """Return the bytes that `tensor.contiguous(memory_format)` allocates; 0 if the layout fits."""
    return 0 if tensor is None or tensor.is_contiguous(memory_format=memory_format) else bytes_of(tensor)


def contiguous(tensor: torch.Tensor, dtype: torch.dtype | None = None) -> New:
    return new(tuple(tensor.shape), dtype or tensor.dtype)


def fits_32_bits(tensor: torch.Tensor) -> bool:
    """aten/src/ATen/native/CanUse32BitIndexMath.cpp: the farthest element can be counted in 32 bits."""
    return tensor.numel() < INT_MAX and span_of_elements(tensor.shape, tensor.stride()) - 1 < INT_MAX
