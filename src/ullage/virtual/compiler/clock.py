"""How long operators would take, roughly: Inductor times a few alternatives on the card and takes the faster one.

Only what is far apart is told apart: a product on tensor cores whose sizes are odd runs at about half the speed, a copy
runs at the speed of the memory, and every launch has its price.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ullage.hardware import GPU
from ullage.performance.data_sheet import CHOICES_HOST_S, CHOICES_SHARE, CHOICES_UNKNOWN_TFLOPS
from ullage.performance.work import bandwidth_of
from ullage.virtual.call.plan import tf32_for_products

_ODD_SIZES = 0.55  # of the speed of a product of even sizes, where a size is no multiple of 16 bytes
_STRIDED = 2  # times as long takes a copy that is not contiguous
_PRODUCTS = {"aten::mm": 0, "aten::bmm": 0, "aten::addmm": 1, "aten::baddbmm": 1}
UNKNOWN = 1.0  # seconds of a kernel of Triton's: what PyTorch has itself is taken before it


class Clock(TorchDispatchMode):
    """Adds up how long the operators inside a `with` statement would take on a GPU."""

    def __init__(self, gpu: GPU) -> None:
        super().__init__()
        self._gpu = gpu
        self.seconds = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not func.is_view:
            self.seconds += CHOICES_HOST_S + self._time(func, args, result)
        return result

    def _time(self, func: Any, args: Any, result: Any) -> float:
        name = func._schema.name
        if name in _PRODUCTS:
            left, right = args[_PRODUCTS[name] : _PRODUCTS[name] + 2]
            return self._product(left, right)
        seconds = 0.0
        for tensor in (*_tensors(args), *_tensors((result,))):
            times = 1 if tensor.is_contiguous() else _STRIDED
            seconds += times * tensor.numel() * tensor.element_size() / bandwidth_of(self._gpu)
        return seconds

    def _product(self, left: torch.Tensor, right: torch.Tensor) -> float:
        rate = self._rate(left.dtype)
        on_tensor_cores = left.dtype is not torch.float32 or tf32_for_products()
        even = 16 // left.element_size()
        if on_tensor_cores and any(size % even for size in (*left.shape[-2:], right.shape[-1])):
            rate *= _ODD_SIZES
        return 2 * left.numel() * right.shape[-1] / (1e12 * CHOICES_SHARE * rate)

    def _rate(self, dtype: torch.dtype) -> float:
        gpu = self._gpu
        if dtype in (torch.float16, torch.bfloat16):
            return gpu.bf16_tflops or gpu.fp16_tflops or CHOICES_UNKNOWN_TFLOPS
        return (gpu.tf32_tflops if tf32_for_products() else gpu.fp32_tflops) or CHOICES_UNKNOWN_TFLOPS


def _tensors(values: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            found += _tensors(value)
    return found
