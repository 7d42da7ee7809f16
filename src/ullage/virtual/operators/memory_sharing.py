"""Operators that are more than a plan: copies between CPU and GPU, values read back, tensors over others' memory.

Each takes the virtual GPU, the operator and its arguments and returns what the operator would.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.graph import _engine_run_backward

from ullage.virtual.kernels.plan import contiguous_strides, is_dense, register, span_of_elements
from ullage.virtual.native import same_memory

if TYPE_CHECKING:
    from ullage.virtual.gpu import VirtualGPU


# Sums of gradients that meet at one tensor: autograd adds the second into the first if nobody else holds that.
#
# PyTorch never does so while a dispatch mode is in use (torch/csrc/autograd/input_buffer.cpp, can_accumulate_inplace),
# so the sum arrives here as an addition out of place. It is told from other additions by who calls it, the engine
# itself, and that the first summand is held by nobody else is told by its reference counts. What those are for a
# tensor that only the engine holds is measured once in a process.

_storage_of: Any = torch._C.TensorBase.untyped_storage
_ENGINE = _engine_run_backward.__code__
_MEASURING = (-1, -1)
_alone: tuple[int, int] | None = None


def called_by_engine(frames_up: int) -> bool:
    """Whether the code so many frames up was called by autograd's engine and not by Python."""
    return torch._C._current_graph_task_id() != -1 and sys._getframe(frames_up + 1).f_code is _ENGINE


def adds_in_place(args: tuple[Any, ...], frames_up: int) -> bool:
    """Whether this call of `aten.add.Tensor` is the engine's and would be done in place on a real GPU."""
    global _alone
    if not called_by_engine(frames_up + 1):
        return False
    first = args[0]
    held = first._use_count(), torch._C._storage_Use_Count(_storage_of(first)._cdata)
    if _alone == _MEASURING:
        _alone = held
        return True
    return held == _alone and not torch.is_grad_enabled() and is_dense(first.shape, first.stride())


def measure(run: Callable[[Callable[[], None]], None]) -> None:
    """Measure the counts of a tensor that only the engine holds, once; `run` runs a function on a virtual GPU."""
    global _alone
    if _alone is not None:
        return
    _alone = _MEASURING

    def two_gradients_meet() -> None:
        leaf = torch.zeros(2, device="cuda", requires_grad=True)
        torch.autograd.grad(leaf * 2 + leaf * 3, leaf, torch.ones(2, device="cuda"))

    run(two_gradients_meet)


Handler = Callable[["VirtualGPU", Any, tuple[Any, ...], dict[str, Any]], Any]
SPECIAL: dict[str, Handler] = {}


def special(*names: str) -> Callable[[Handler], Handler]:
    """Register a handler for operators by name."""
    return register(SPECIAL, names)


def is_gpu(device: torch.device) -> bool:
    """Whether a device is the virtual GPU; a second GPU is refused in PyTorch's words."""
    if device.type != "cuda":
        return False
    if device.index:
        raise getattr(torch, "AcceleratorError", RuntimeError)(  # PyTorch before 2.8 has no name for it
            "CUDA error: invalid device ordinal\nGPU device may be out of range, do you have enough GPUs?"
        )
    return True


@special("aten._to_copy.default")
def to_copy(gpu: VirtualGPU, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A copy of another type or to another device. To the GPU it takes memory, from it it has no values."""
    source: torch.Tensor = args[0]
    device = kwargs.get("device")
    to_gpu = is_gpu(device) if device is not None else source.is_cuda
    if not to_gpu and not source.is_cuda:
        return gpu.host.call(func, args, kwargs)
    dtype = kwargs.get("dtype") or source.dtype
    memory_format = kwargs.get("memory_format")
    if to_gpu:
        size, stride = layout_of_copy(source, memory_format)
        out = gpu.memory.tensor(size, stride, dtype, span_of_elements(size, stride) * dtype.itemsize)
        if not source.is_cuda and isinstance(source, torch.nn.Parameter):
            gpu.mark_parameter(out)
        gpu.values.copied(source, out)
        return out
    return gpu.values.on_host(source, dtype)


@special("aten.copy_.default")
def copy_in_place(gpu: VirtualGPU, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`target.copy_(source)`; a cast between devices is done on the CPU."""
    target, source = args[0], args[1]
    if target.is_cuda:
        gpu.memory.written(target)
        if source.shape == target.shape:
            gpu.values.copied(source, target)
        return target
    if source.is_cuda:
        gpu.host.fill(target)
        target.copy_(gpu.values.on_host(source, target.dtype))
        return target
    return gpu.host.call(func, args, kwargs)


@special("aten._local_scalar_dense.default")
def local_scalar(gpu: VirtualGPU, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`.item()`, `float(x)`, `if x:` ..."""
    tensor = args[0]
    if tensor.is_cuda:
        return gpu.values.scalar(tensor)
    gpu.host.fill(tensor)
    return func(tensor)


@special("aten.equal.default", "aten.allclose.default")
def equal(gpu: VirtualGPU, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`torch.equal` and `allclose` of tensors whose values nobody knows: true if the sizes are equal."""
    if not (args[0].is_cuda or args[1].is_cuda):
        return gpu.host.call(func, args, kwargs)
    gpu.note("values", "torch.equal or allclose compared tensors without data: answered by their sizes")
    return args[0].shape == args[1].shape


@special("aten._is_all_true.default", "aten._is_any_true.default")
def checked(gpu: VirtualGPU, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """How PyTorch checks arguments (of distributions, for one): unknown values are taken for valid ones."""
    if not args[0].is_cuda:
        return gpu.host.call(func, args, kwargs)
    with gpu.counting():
        all_true = func is torch.ops.aten._is_all_true.default
        result = args[0].all() if all_true else args[0].any()
    if gpu.values.known(result) is None:
        gpu.values.set(result, torch.tensor(all_true))
    return result


@special("aten._nested_tensor_from_mask_left_aligned.default")
def without_nested_tensors(gpu: VirtualGPU, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Whether an encoder may leave out padding in evaluation: its lengths are data, so all of it is followed."""
    if not args[0].is_cuda:
        return gpu.host.call(func, args, kwargs)
    gpu.note("nested", "an encoder's padding was followed in full; in evaluation PyTorch may leave it out")
    return False


@special("aten.is_pinned.default")
def is_pinned(gpu: VirtualGPU, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Pinned memory is ordinary CPU memory that says it is pinned."""
    return gpu.pinned(args[0])


@special("aten._pin_memory.default", "aten.pin_memory.default")
def pin_memory(gpu: VirtualGPU, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """A pinned copy."""
    copy: torch.Tensor = gpu.host.call(torch.ops.aten.clone.default, (args[0],), {})
    gpu.pin(copy)
    return copy


@special("aten.record_stream.default")
def record_stream(gpu: VirtualGPU, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Delays the reuse of a block until another stream is done; taken as done at once."""
    gpu.note("streams", "record_stream was followed without its delay")


@special("aten.add.Tensor")
def add(gpu: VirtualGPU, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """An addition by autograd itself may reuse its first summand."""
    if args[0].__class__ is torch.Tensor and args[0].is_cuda and not kwargs and adds_in_place(args, frames_up=3):
        gpu.memory.written(args[0])
        return args[0]
    return NotImplemented


@special("aten.scatter_add.default", "aten.index_add.default")
def add_at_indices(gpu: VirtualGPU, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """FunctionsManual.cpp, gather_backward and index_select_backward: in place, except under a dispatch mode."""
    if args[0].is_cuda and called_by_engine(frames_up=3):
        with gpu.counting():
            in_place = getattr(torch.ops.aten, func._schema.name.removeprefix("aten::") + "_").default
            return in_place(*args, **kwargs)
    return NotImplemented


@special("aten.detach.default", "aten.alias.default")
def detach(gpu: VirtualGPU, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The commonest call of all (autograd makes one for most tensors it saves): the same memory, nothing else."""
    source = args[0]
    if not source.is_cuda:
        return func(source)
    result = same_memory(source)
    if hasattr(source, "ullage_value"):
        result.ullage_value = source.ullage_value  # type: ignore[attr-defined]
    return result


@special("aten.lift_fresh.default", "aten.lift.default")
def lift(gpu: VirtualGPU, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """`torch.tensor(...)` hands its result over: nothing to do."""
    tensor: torch.Tensor = args[0]
    return tensor


@special("aten.resize_.default")
def resize(gpu: VirtualGPU, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`resize_`: a larger storage is a new allocation."""
    tensor, size = args[0], list(args[1])
    if not tensor.is_cuda:
        gpu.host.fill(tensor)
        return func(*args, **kwargs)
    stride = contiguous_strides(size)
    nbytes = span_of_elements(size, stride) * tensor.element_size()
    if nbytes > tensor.untyped_storage().nbytes():
        tensor.data = gpu.memory.tensor(size, stride, tensor.dtype, nbytes)
    else:
        tensor.as_strided_(size, stride)
    return tensor


@special(
    "aten.set_.default",
    "aten.set_.source_Tensor",
    "aten.set_.source_Storage",
    "aten.set_.source_Storage_storage_offset",
)
def set_source(gpu: VirtualGPU, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`set_` on the GPU: the tensor takes over another's memory."""
    tensor = args[0]
    if not tensor.is_cuda:
        return func(*args, **kwargs)
    if len(args) == 1:
        tensor.data = gpu.memory.tensor((0,), (1,), tensor.dtype, 0)
    elif isinstance(args[1], torch.Tensor):
        tensor.data = args[1]
    else:
        gpu.refuse("Tensor.set_ with a bare storage", "use the tensor that owns the storage")
    return tensor


def layout_of_copy(source: torch.Tensor, memory_format: torch.memory_format | None) -> tuple[Any, Any]:
    """Size and strides of a copy: dense sources keep theirs, others become contiguous (`empty_like`)."""
    size = source.shape
    if memory_format is None or memory_format is torch.preserve_format:
        stride = source.stride()
        if is_dense(size, stride):
            return size, stride
        return size, torch.empty_like(torch.empty_strided(size, stride, device="meta")).stride()
    if memory_format is torch.contiguous_format:
        return size, contiguous_strides(size)
    return size, torch.empty(size, device="meta", memory_format=memory_format).stride()


# Operators that change a tensor's shape in place, such as `x.t_()` and `x.squeeze_()`.
#
# PyTorch's own code for them touches nothing but sizes and strides, so it does for tensors without data and for
# CPU tensors that are not filled yet.


@special(
    "aten.as_strided_.default",
    "aten.t_.default",
    "aten.transpose_.default",
    "aten.squeeze_.default",
    "aten.squeeze_.dim",
    "aten.squeeze_.dims",
    "aten.unsqueeze_.default",
)
def change_shape(gpu: VirtualGPU, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The tensor itself, with its new shape."""
    return func(*args, **kwargs)


@special("aten.resize_as_.default")
def resize_as(gpu: VirtualGPU, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`resize_` to the size of another tensor."""
    if not args[0].is_cuda:
        return gpu.host.call(func, args, kwargs)
    resize = torch.ops.aten.resize_.default
    return SPECIAL[str(resize)](gpu, resize, (args[0], list(args[1].shape)), {})
