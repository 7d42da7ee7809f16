"""Copies: between CPU and GPU, to another type or layout, and into pinned memory."""

import math
from typing import Any

import torch

from ullage.virtual.call.native import is_gpu
from ullage.virtual.call.plan import contiguous_strides, handler, is_contiguous, is_dense, span_of_elements, twin
from ullage.virtual.operators import layouts
from ullage.virtual.state import GPUState


@handler("aten._to_copy.default")
def to_copy(gpu: GPUState, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Copy to another type or device. A copy to the GPU needs memory; one from the GPU has no values."""
    source: torch.Tensor = args[0]
    device = kwargs.get("device")
    to_gpu = is_gpu(device) if device is not None else source.is_cuda
    if not to_gpu and not source.is_cuda:
        return gpu.host.call(func, args, kwargs)
    if source.layout is not torch.strided:
        return layouts.copy(gpu, func, args, kwargs)
    dtype, non_blocking = kwargs.get("dtype") or source.dtype, bool(kwargs.get("non_blocking"))
    size, stride = layout_of_copy(source, kwargs.get("memory_format"))
    nbytes = span_of_elements(size, stride) * dtype.itemsize
    out = gpu.memory.tensor(size, stride, dtype, nbytes) if to_gpu else None
    if to_gpu is not source.is_cuda:
        if isinstance(source, torch.nn.Parameter) and out is not None:
            gpu.mark_parameter(out)
        _pass_through(gpu, source, to_gpu, size, stride, dtype, non_blocking)
    if out is not None:
        gpu.values.copied(source, out)
        gpu.memory.note_copy(source, out)
    if to_gpu is not source.is_cuda and not non_blocking:
        gpu.memory.read_back()
    return gpu.values.on_host(source, dtype) if out is None else out


def _pass_through(
    gpu: GPUState, source: torch.Tensor, to_gpu: bool, size: Any, stride: Any, dtype: torch.dtype, non_blocking: bool
) -> None:
    """Copy.cu, copy_kernel_cuda: allocate a copy's temporaries on the GPU. Elements in another order or of another type
    pass through contiguous tensors: the type is changed on the CPU, or on the GPU if the host does not wait."""
    count = math.prod(size)
    same_type, whole = source.dtype is dtype, source.numel() == count
    in_order, out_in_order = whole and source.is_contiguous(), is_contiguous(size, stride)
    same_order = in_order and out_in_order or whole and source.stride() == tuple(stride) and is_dense(size, stride)
    if count < 2 or (same_type and same_order):
        return
    if to_gpu:
        passed = not out_in_order or (non_blocking and not same_type)
        taken = [count * (source.dtype if non_blocking else dtype).itemsize] * passed
    elif non_blocking:
        taken = [count * dtype.itemsize] * ((not same_type) + (not in_order))
    else:
        taken = [count * source.dtype.itemsize] * (not in_order)
    for span in [gpu.memory.take(nbytes) for nbytes in taken]:
        gpu.memory.give_back(span)


@handler("aten.where.self", "aten.where.self_out")
def where_with_bytes(gpu: GPUState, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """TensorCompare.cpp, where_self_out: a condition of bytes, as in old code, is copied to one of booleans."""
    if not args[0].is_cuda or args[0].dtype is not torch.uint8:
        return NotImplemented
    with gpu.mode:
        return func(args[0].to(torch.bool), *args[1:], **kwargs)


@handler("aten.clone.default")
def clone(gpu: GPUState, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    source: torch.Tensor = args[0]
    if not source.is_cuda:
        return NotImplemented
    size, stride = layout_of_copy(source, kwargs.get("memory_format"))
    out = gpu.memory.tensor(size, stride, source.dtype, span_of_elements(size, stride) * source.dtype.itemsize)
    gpu.values.copied(source, out)
    gpu.memory.note_copy(source, out)
    return out


_NEW = ("zeros", "ones", "full", "empty_strided")
_PLAIN = {f"aten.new_{name}.default": getattr(torch.ops.aten, name).default for name in _NEW}
_PLAIN["aten.new_empty.default"] = torch.ops.aten.empty.memory_format
_LIKE = ("empty", "zeros", "ones", "full", "rand", "randn", "randint")


@handler(*_PLAIN, *(f"aten.{name}_like.default" for name in _LIKE), "aten.randint_like.low_dtype")
def made_elsewhere(gpu: GPUState, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Make a CPU tensor like one on the GPU: `torch.zeros_like(parameter, device="cpu")`."""
    source, device = args[0], kwargs.get("device")
    if device is None or is_gpu(device) or not source.is_cuda or source.layout is not torch.strided:
        return NotImplemented
    if str(func) in _PLAIN:
        return gpu.host.call(_PLAIN[str(func)], args[1:], {**kwargs, "dtype": kwargs.get("dtype") or source.dtype})
    return gpu.host.call(func, (twin(source), *args[1:]), kwargs)


@handler("aten.copy_.default")
def copy_in_place(gpu: GPUState, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`target.copy_(source)`; a cast between devices is done on the CPU."""
    target, source, *rest = args
    if target.is_cuda != source.is_cuda and not any(rest):
        gpu.memory.read_back()
    if target.is_cuda != source.is_cuda and target.layout is source.layout is torch.strided:
        non_blocking = any(rest)
        _pass_through(gpu, source, target.is_cuda, target.shape, target.stride(), target.dtype, non_blocking)
    if target.is_cuda:
        gpu.values.copied(source, target)
        gpu.memory.note_copy(source, target)
        return target
    if source.is_cuda:
        gpu.host.fill(target)
        target.copy_(gpu.values.on_host(source, target.dtype))
        return target
    return gpu.host.call(func, args, kwargs)


def layout_of_copy(source: torch.Tensor, memory_format: torch.memory_format | None) -> tuple[Any, Any]:
    """Return size and strides of a copy: dense sources keep theirs, others become contiguous (`empty_like`)."""
    size = source.size()
    if memory_format is None or memory_format is torch.preserve_format:
        stride = source.stride()
        if is_dense(size, stride):
            return size, stride
        return size, torch.empty_like(torch.empty_strided(size, stride, device="meta")).stride()
    if memory_format is torch.contiguous_format:
        return size, contiguous_strides(size)
    return size, torch.empty(size, device="meta", memory_format=memory_format).stride()


@handler("aten.is_pinned.default")
def is_pinned(gpu: GPUState, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether memory is pinned: pinned memory is ordinary CPU memory with a mark."""
    return gpu.pinned(args[0])


@handler("aten._pin_memory.default", "aten.pin_memory.default")
def pin_memory(gpu: GPUState, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    copy: torch.Tensor = gpu.host.call(torch.ops.aten.clone.default, (args[0],), {})
    gpu.pin(copy)
    return copy
