"""Nested tensors. Jagged ones are made of others and need no more than to know which attention kernels there are."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch

from ullage.virtual.call.registry import handler
from ullage.virtual.call.replacements import Replacements
from ullage.virtual.state import GPUState

_LOW_PRECISION = (torch.float16, torch.bfloat16)
_LARGEST_HEAD = 256


def install(gpu: GPUState, replacements: Replacements) -> None:
    replacements.when_imported("torch.nested._internal.sdpa", lambda module: _answer(gpu, replacements, module))


def _answer(gpu: GPUState, replacements: Replacements, module: ModuleType) -> None:
    ampere = (gpu.spec.compute_capability or (0, 0)) >= (8, 0)

    def can_use_flash_attention(params: Any, debug: bool = False) -> bool:
        serves = params.query.dtype in _LOW_PRECISION and params.attn_mask is None
        return bool(ampere and serves and params.query.shape[-1] <= _LARGEST_HEAD and torch._C._get_flash_sdp_enabled())

    def can_use_efficient_attention(params: Any, debug: bool = False) -> bool:
        types = (torch.float32, *_LOW_PRECISION) if ampere else (torch.float32, torch.float16)
        return bool(params.query.dtype in types and torch._C._get_mem_efficient_sdp_enabled())

    def can_use_cudnn_attention(params: Any, debug: bool = False) -> bool:
        return False

    for function in (can_use_flash_attention, can_use_efficient_attention, can_use_cudnn_attention):
        replacements.put_existing(module, function.__name__, function)


@handler(
    "aten._nested_tensor_from_tensor_list.default",
    "aten._nested_view_from_buffer.default",
    "aten._nested_view_from_buffer_copy.default",
    "aten._nested_tensor_from_mask.default",
    "aten._nested_from_padded.default",
)
def strided(gpu: GPUState, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Nested tensors of the strided layout are objects of C++ with a storage on a real GPU."""
    tensors = args[0] if isinstance(args[0], list | tuple) else args[:1]
    devices = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.device)]
    if not any(tensor.is_cuda for tensor in tensors) and not any(device.type == "cuda" for device in devices):
        return gpu.host.call(func, args, kwargs)
    gpu.refuse("a nested tensor of the strided layout", "give layout=torch.jagged")
