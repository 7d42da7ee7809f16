"""Values that code reads from the GPU: `.item()`, comparisons, checks, and flags that end a loop."""

import math
from typing import Any

import torch

from ullage.virtual.call.plan import contiguous_strides, gpu_handler, handler, span_of_elements
from ullage.virtual.operators.copies import layout_of_copy
from ullage.virtual.state import GPUState
from ullage.virtual.values.known_values import LARGEST_KNOWN


@handler("aten._local_scalar_dense.default")
def local_scalar(gpu: GPUState, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`.item()`, `float(x)`, `if x:` ..."""
    tensor = args[0]
    if tensor.is_cuda:
        return gpu.values.scalar(tensor)
    gpu.host.fill(tensor)
    return func(tensor)


@handler("aten.equal.default", "aten.allclose.default")
def equal(gpu: GPUState, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`torch.equal` and `allclose` of unknown tensors: true if the sizes are equal."""
    if not (args[0].is_cuda or args[1].is_cuda):
        return gpu.host.call(func, args, kwargs)
    known = gpu.values.computed(func, args, kwargs)
    if known is not None:
        return known[0]
    gpu.note("values", "torch.equal or allclose compared tensors without data: the answer follows from their sizes")
    if func is torch.ops.aten.allclose.default:
        with gpu.mode:
            torch.isclose(*args[:2]).all()
    return args[0].shape == args[1].shape


@gpu_handler("aten._is_all_true.default", "aten._is_any_true.default")
def checked(gpu: GPUState, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """PyTorch's checks of arguments (of distributions, for example): unknown values count as valid."""
    with gpu.mode:
        all_true = func is torch.ops.aten._is_all_true.default
        result = args[0].all() if all_true else args[0].any()
    if gpu.values.known(result) is None or gpu.values.is_supposed(args[0]):
        gpu.values.set(result, torch.tensor(all_true))
    return result


@handler("aten.eq.Tensor", "aten.ne.Scalar")
def finite(gpu: GPUState, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`isfinite` compares a number with itself and with infinity: unknown numbers are finite."""
    source, other = args[0], args[1]
    is_check = source is other if func is torch.ops.aten.eq.Tensor else other in (math.inf, -math.inf)
    if not (is_check and source.is_cuda and source.is_floating_point() and source.numel() <= LARGEST_KNOWN):
        return NotImplemented
    if gpu.values.known(source) is not None:
        return NotImplemented
    gpu.note("readings", "a check for infinite values passed: the tensors have no data")
    size, stride = layout_of_copy(source, None)
    result = gpu.memory.tensor(size, stride, torch.bool, span_of_elements(size, stride))
    gpu.values.set(result, torch.ones((), dtype=torch.bool, device="cpu"))
    return result


# Flags that one known side decides: anything or True is True, anything and False is False. Loops that end on data also
# end after a number of rounds (`done | (length >= limit)`), and that end must be seen.
_OR = ("aten.bitwise_or.Tensor", "aten.logical_or.default")
_AND = ("aten.bitwise_and.Tensor", "aten.logical_and.default")


@handler(*_OR, *_AND)
def decided(gpu: GPUState, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return a flag that one known side decides; all other calls take the usual path."""
    sides = args[:2]
    if not any(isinstance(side, torch.Tensor) and side.is_cuda for side in sides):
        return NotImplemented
    known = [gpu.values.known(side) if side.is_cuda else side for side in sides]
    if all(value is None for value in known) or all(value is not None for value in known):
        return NotImplemented
    value = next(value for value in known if value is not None)
    deciding = bool(value.all()) if str(func) in _OR and value.dtype is torch.bool else not bool(value.any())
    if not deciding or (str(func) in _OR and value.dtype is not torch.bool):
        return NotImplemented
    size = torch.broadcast_shapes(sides[0].shape, sides[1].shape)
    dtype = torch.bool if "logical" in str(func) else torch.result_type(sides[0], sides[1])
    result = gpu.memory.tensor(size, contiguous_strides(size), dtype, size.numel() * dtype.itemsize)
    supposed = any(map(gpu.values.is_supposed, sides))
    gpu.values.set(result, torch.full(size, str(func) in _OR, dtype=dtype, device="cpu"), supposed)
    return result
