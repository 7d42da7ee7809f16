"""Which attention kernel `scaled_dot_product_attention` takes.

The rules of aten/src/ATen/native/transformers/cuda/sdp_utils.cpp: a list of kernels in order of preference, each with
conditions; the first whose conditions hold is taken. Not covered: nested tensors.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

CUDNN, FLASH, EFFICIENT, MATH = "cudnn", "flash", "efficient", "math"
_LOW_PRECISION = (torch.float16, torch.bfloat16)
_CODES = {0: MATH, 1: FLASH, 2: EFFICIENT, 3: CUDNN}  # at::SDPBackend: math 0, flash 1, efficient 2, cudnn 3


class Attention(NamedTuple):
    """The arguments that decide."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    mask: torch.Tensor | None
    dropout: float
    causal: bool
    grouped: bool

    @property
    def trains(self) -> bool:
        """Whether a backward pass may follow."""
        tensors = (self.query, self.key, self.value)
        return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def choose(attention: Attention, capability: tuple[int, int]) -> str:
    """The kernel that a GPU of this compute capability takes: "cudnn", "flash", "efficient" or "math".

    >>> q = torch.empty(2, 8, 128, 64, dtype=torch.bfloat16)
    >>> attention = Attention(q, q, q, None, 0.0, True, False)
    >>> choose(attention, (9, 0)), choose(attention, (8, 0))
    ('cudnn', 'flash')
    """
    able = {CUDNN: _cudnn, FLASH: _flash, EFFICIENT: _efficient}
    for name in _order(capability):
        if name == MATH:
            if torch._C._get_math_sdp_enabled():
                return MATH
        elif able[name](attention, capability):
            return name
    raise RuntimeError("No available kernel. Aborting execution.")


def _order(capability: tuple[int, int]) -> list[str]:
    """priority_order: Hopper and data-centre Blackwell prefer cuDNN, unless somebody set an order of his own."""
    written = [_CODES[int(code)] for code in torch._C._get_sdp_priority_order() if int(code) in _CODES]
    default = [FLASH, EFFICIENT, MATH, CUDNN]
    if capability[0] in (9, 10) and written == default:
        return [CUDNN, FLASH, EFFICIENT, MATH]
    return written


def _cudnn(attention: Attention, capability: tuple[int, int]) -> bool:
    """can_use_cudnn_attention"""
    query, key, value = attention[:3]
    if not torch._C._get_cudnn_sdp_enabled() or capability < (8, 0):
        return False
    if torch._C._get_deterministic_algorithms() and not torch._C._get_deterministic_algorithms_warn_only():
        return False
    if not (_all_have_type(attention, _LOW_PRECISION) and _four_dimensions(attention) and _heads_agree(attention)):
        return False
    if not _mask_suits_cudnn(attention):
        return False
    if not (_not_empty(attention) and _last_stride_is_one(attention, ignore_single=True)):
        return False
    sizes = query.shape[3], value.shape[3]
    limit = 192 if capability[0] in (9, 10) and sizes == (192, 128) else 128
    if max(sizes) > limit or sizes[0] % 8 or sizes[1] % 8 or max(query.shape[:2]) > 65535:
        return False
    return key.shape[2] != 1 and not (attention.dropout and query.shape[2] == 1)


def _flash(attention: Attention, capability: tuple[int, int]) -> bool:
    """can_use_flash_attention"""
    query, key, value = attention[:3]
    if not torch._C._get_flash_sdp_enabled() or capability < (8, 0) or attention.mask is not None:
        return False
    if not (_all_have_type(attention, _LOW_PRECISION) and _four_dimensions(attention) and _heads_agree(attention)):
        return False
    size = query.shape[-1]
    if size > 256 or key.shape[-1] != size or value.shape[-1] != size:
        return False
    consumer = (8, 6) <= capability <= (8, 9) or capability[0] == 12
    if attention.trains and consumer and not (size <= 192 or (not attention.dropout and size > 224)):
        return False
    if attention.causal and query.shape[-2] != key.shape[-2]:
        return False
    return _not_empty(attention) and _last_stride_is_one(attention, ignore_single=True)


def _efficient(attention: Attention, capability: tuple[int, int]) -> bool:
    """can_use_mem_efficient_attention"""
    query, key, value = attention[:3]
    if not torch._C._get_mem_efficient_sdp_enabled() or not _four_dimensions(attention):
        return False
    if query.shape[1] != key.shape[1]:  # grouped heads: not up to PyTorch 2.11, whose choices these are
        return False
    types = (torch.float16, torch.float32, torch.bfloat16) if capability >= (8, 0) else (torch.float16, torch.float32)
    if not (_all_have_type(attention, types) and _heads_agree(attention)):
        return False
    alignment = minimum_alignment(query.dtype, capability)
    if query.shape[-1] != key.shape[-1] or query.shape[-1] % alignment or value.shape[-1] % alignment:
        return False
    return _not_empty(attention) and _last_stride_is_one(attention, ignore_single=False)


def minimum_alignment(dtype: torch.dtype, capability: tuple[int, int]) -> int:
    """minimum_gemm_alignment: elements."""
    half = dtype in _LOW_PRECISION
    tensor_cores = capability >= (8, 0) or (capability >= (7, 0) and half)
    alignment = 4 if capability >= (8, 0) else 1
    return max(alignment, 128 // (16 if half else 32)) if tensor_cores else alignment


def _all_have_type(attention: Attention, types: tuple[torch.dtype, ...]) -> bool:
    first = attention.query.dtype
    return first in types and attention.key.dtype == first and attention.value.dtype == first


def _four_dimensions(attention: Attention) -> bool:
    return all(tensor.dim() == 4 for tensor in attention[:3])


def _heads_agree(attention: Attention) -> bool:
    query, key, value = attention[:3]
    if not query.shape[0] == key.shape[0] == value.shape[0]:
        return False
    heads = query.shape[1], key.shape[1], value.shape[1]
    if attention.grouped:
        return heads[1] == heads[2] and heads[0] % heads[1] == 0
    return heads[0] == heads[1] == heads[2]


def _not_empty(attention: Attention) -> bool:
    return attention.query.shape[-2] > 0 and attention.key.shape[-2] > 0


def _last_stride_is_one(attention: Attention, ignore_single: bool) -> bool:
    def fits(tensor: Any) -> bool:
        return bool(tensor.stride(-1) == 1 or (ignore_single and tensor.shape[-1] == 1))

    mask = attention.mask
    mask_fits = mask is None or mask.stride(-1) == 1 or mask.shape[-1] == 1
    return all(fits(tensor) for tensor in attention[:3]) and mask_fits


def _mask_suits_cudnn(attention: Attention) -> bool:
    """check_attn_mask_shape"""
    mask = attention.mask
    if mask is None:
        return True
    if mask.requires_grad or mask.dim() not in (2, 4):
        return False
    lengths = attention.query.shape[2], attention.key.shape[2]
    if mask.shape[-2] not in (1, lengths[0]) or mask.shape[-1] not in (1, lengths[1]):
        return False
    if mask.dim() == 2:
        return True
    return mask.shape[0] in (1, attention.query.shape[0]) and mask.shape[1] in (1, attention.query.shape[1])
