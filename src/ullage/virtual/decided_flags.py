"""Flags that one known side decides: whatever or True is True, whatever and False is False.

Loops that end on data also end after a number of rounds (`done | (length >= limit)`): the second must be seen.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ullage.virtual.kernels.plan import contiguous_strides
from ullage.virtual.special import special

if TYPE_CHECKING:
    from ullage.virtual.gpu import VirtualGPU

_OR = ("aten.bitwise_or.Tensor", "aten.logical_or.default")
_AND = ("aten.bitwise_and.Tensor", "aten.logical_and.default")


@special(*_OR, *_AND)
def decided(gpu: VirtualGPU, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """One side is known, the other is not; all others go the common way."""
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
    gpu.values.set(result, torch.full(size, str(func) in _OR, dtype=dtype))
    return result
