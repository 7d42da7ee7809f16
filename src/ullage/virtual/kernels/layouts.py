"""Questions that many CUDA kernels ask of a tensor's layout before they choose what to do."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ullage.virtual.kernels.plan import New, new, span_of_elements

_INT_MAX = 2**31 - 1


def accumulate_type(dtype: torch.dtype) -> torch.dtype:
    """aten/src/ATen/AccumulateType.h: half precision is summed in single.

    >>> accumulate_type(torch.bfloat16)
    torch.float32
    """
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def twin(tensor: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """A tensor of the same layout on "meta", to ask PyTorch about layouts."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype or tensor.dtype, device="meta")


def like(tensor: torch.Tensor, dtype: torch.dtype | None = None) -> New:
    """An output as `at::empty_like(tensor)` makes it: dense layouts are kept."""
    made = torch.empty_like(twin(tensor))
    return new(tuple(made.shape), dtype or tensor.dtype, made.stride())


def suggested_format(tensor: torch.Tensor) -> torch.memory_format:
    """`tensor.suggest_memory_format()`: channels last if the strides say so."""
    return torch._prims_common.suggest_memory_format(tensor)


def copy_size(tensor: torch.Tensor | None, memory_format: torch.memory_format = torch.contiguous_format) -> int:
    """Bytes that `tensor.contiguous(memory_format)` takes: none if it is laid out so already."""
    if tensor is None or tensor.is_contiguous(memory_format=memory_format):
        return 0
    return tensor.numel() * tensor.element_size()


def fits_32_bits(tensor: torch.Tensor) -> bool:
    """aten/src/ATen/native/CanUse32BitIndexMath.cpp: the farthest element can be counted in 32 bits."""
    return tensor.numel() < _INT_MAX and span_of_elements(tensor.shape, tensor.stride()) - 1 < _INT_MAX


def elements(size: Sequence[int]) -> int:
    """How many elements a size has.

    >>> elements((2, 3, 4))
    24
    """
    count = 1
    for length in size:
        count *= length
    return count


def ceil_div(number: int, divisor: int) -> int:
    """The quotient, rounded up.

    >>> ceil_div(7, 2)
    4
    """
    return -(-number // divisor)


def last_power_of_two(number: int) -> int:
    """The largest power of two that is not larger (at least 1).

    >>> last_power_of_two(48)
    32
    """
    return 1 << (max(number, 1).bit_length() - 1)
