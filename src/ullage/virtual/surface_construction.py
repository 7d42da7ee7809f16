"""Tensors made of Python data, as in `torch.tensor([loss, 2.0], device="cuda")`.

PyTorch's C++ part reads such data behind the back of dispatch modes (and copies it to the GPU by an operator,
see `VirtualGPU.__enter__`). What it cannot read, numbers that lie on the virtual GPU, is asked for here, and
pinned memory, which it would ask CUDA for, is pinned afterwards.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _device as torch_device

from ullage.virtual.replacements import Replacements

if TYPE_CHECKING:
    from ullage.virtual.gpu import VirtualGPU

_Tensor = torch.Tensor
_tensor, _as_tensor = torch.tensor, torch.as_tensor
_new_tensor: Any = torch._C.TensorBase.new_tensor


def install(gpu: VirtualGPU, replacements: Replacements) -> None:
    """Put the constructors in place."""
    torch_device._device_constructors()  # PyTorch remembers the originals: let it, before they are replaced
    replacements.put_all(torch, {"tensor": tensor, "as_tensor": as_tensor})
    replacements.put(torch.Tensor, "new_tensor", new_tensor)


def tensor(data: Any, *, pin_memory: bool = False, requires_grad: bool = False, **options: Any) -> torch.Tensor:
    """`torch.tensor`."""
    made = _tensor(_plain(data), **options)
    if pin_memory:
        made = made.pin_memory()
    return made.requires_grad_() if requires_grad else made


def as_tensor(data: Any, dtype: Any = None, device: Any = None) -> torch.Tensor:
    """`torch.as_tensor`."""
    return _as_tensor(_plain(data), dtype=dtype, device=device)


def new_tensor(self: torch.Tensor, data: Any, **options: Any) -> torch.Tensor:
    """`Tensor.new_tensor`."""
    made: torch.Tensor = _new_tensor(self, _plain(data), **options)
    return made


def _plain(data: Any) -> Any:
    """Nested lists in which tensors of the GPU are replaced by their numbers."""
    if isinstance(data, list | tuple) and any(isinstance(item, list | tuple | _Tensor) for item in data):
        return [item.tolist() if isinstance(item, _Tensor) and item.is_cuda else _plain(item) for item in data]
    return data
