"""torch.accelerator: the same device under its general name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ullage.virtual.replacements import Replacements
from ullage.virtual.surface_cuda import check_device, exchange_device

if TYPE_CHECKING:
    from ullage.virtual.gpu import VirtualGPU

_CUDA = torch.device("cuda")
_DTYPES = frozenset(
    value
    for value in vars(torch).values()
    if isinstance(value, torch.dtype) and not str(value).startswith(("torch.q", "torch.bits"))
)


def install(gpu: VirtualGPU, replacements: Replacements) -> None:
    """Make "cuda" the accelerator. Its streams are in surface_streams.py, its memory in surface_memory.py."""
    functions: dict[str, Any] = {
        "_accelerator_getAccelerator": lambda: _CUDA,
        "_get_accelerator": lambda check=None: _CUDA,
        "_accelerator_getDeviceIndex": lambda: 0,
        "_accelerator_setDeviceIndex": check_device,
        "_accelerator_exchangeDevice": exchange_device,
        "_accelerator_maybeExchangeDevice": exchange_device,
        "_accelerator_synchronizeDevice": check_device,
        "_accelerator_getDeviceCapability": lambda device=0: {"supported_dtypes": set(_DTYPES)},
        "_accelerator_hooks_device_count": lambda: 1,
        "_accelerator_hooks_get_current_device": lambda: 0,
        "_accelerator_hooks_set_current_device": check_device,
        "_accelerator_hooks_exchange_device": exchange_device,
        "_accelerator_hooks_maybe_exchange_device": exchange_device,
    }
    replacements.put_all(torch._C, functions)
    # PyTorch remembers this answer, so it has to be made to forget it.
    remembered: Any = getattr(torch.accelerator, "get_device_capability", None)
    if hasattr(remembered, "cache_clear"):
        replacements.on_undo(remembered.cache_clear)
