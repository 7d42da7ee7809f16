"""Tensors over existing memory: `detach`, `set_`, `resize_`, and shapes changed in place."""

from collections.abc import Sequence
from typing import Any

import torch

from ullage.virtual.call.native import same_memory
from ullage.virtual.call.plan import contiguous_strides, gpu_handler, handler, span_of_elements
from ullage.virtual.state import GPUState


@handler("aten.detach.default", "aten.alias.default")
def detach(gpu: GPUState, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return a tensor over the same memory: the commonest call (autograd makes one for most tensors it saves)."""
    source = args[0]
    if not source.is_cuda:
        return func(source)
    return same_memory(source)


@handler("aten.lift_fresh.default", "aten.lift.default")
def lift(gpu: GPUState, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """Return the result of `torch.tensor(...)` unchanged."""
    tensor: torch.Tensor = args[0]
    return tensor


@handler("aten._efficientzerotensor.default")
def tangent_of_zeros(gpu: GPUState, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """Make the zero tensor that stands for a missing tangent in forward mode: an operator makes a single zero of it
    and repeats that without memory (ZeroTensorFallback.cpp)."""
    if torch.device(kwargs.get("device") or "cpu").type != "cuda":
        tensor: torch.Tensor = gpu.host.call(func, args, kwargs)
        return tensor
    dtype = kwargs.get("dtype") or torch.get_default_dtype()
    return gpu.memory.tensor(args[0], [0] * len(args[0]), dtype, dtype.itemsize)


@handler(
    "aten.set_.default",
    "aten.set_.source_Tensor",
    "aten.set_.source_Storage",
    "aten.set_.source_Storage_storage_offset",
)
def set_source(gpu: GPUState, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
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


@handler("aten.resize_.default")
def resize(gpu: GPUState, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor = args[0]
    if not tensor.is_cuda:
        gpu.host.fill(tensor)
        return func(*args, **kwargs)
    return resize_to(gpu, tensor, list(args[1]))


def resize_to(gpu: GPUState, tensor: torch.Tensor, size: Sequence[int]) -> torch.Tensor:
    """Give a tensor another size, and more memory if it needs it."""
    stride = contiguous_strides(size)
    nbytes = span_of_elements(size, stride) * tensor.element_size()
    if nbytes > tensor.untyped_storage().nbytes():
        tensor.data = gpu.memory.tensor(size, stride, tensor.dtype, nbytes)
    else:
        tensor.as_strided_(size, stride)
    return tensor


@gpu_handler("aten.resize_as_.default")
def resize_as(gpu: GPUState, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return resize(gpu, torch.ops.aten.resize_.default, (args[0], list(args[1].shape)), {})


@handler(
    "aten.as_strided_.default",
    "aten.t_.default",
    "aten.transpose_.default",
    "aten.squeeze_.default",
    "aten.squeeze_.dim",
    "aten.squeeze_.dims",
    "aten.unsqueeze_.default",
)
def change_shape(gpu: GPUState, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return func(*args, **kwargs)
