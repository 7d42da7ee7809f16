"""What `torch.cuda` and its neighbours answer while a virtual GPU is in use."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from ullage.virtual.gpu import VirtualGPU

_MISSING = object()


def install(gpu: VirtualGPU) -> Callable[[], None]:
    """Put the virtual GPU's answers in place; returns what takes them away again."""
    replaced: list[tuple[Any, str, Any]] = []

    def replace(owner: Any, name: str, value: Any) -> None:
        replaced.append((owner, name, vars(owner).get(name, _MISSING)))
        setattr(owner, name, value)

    replace(torch.cuda, "_lazy_init", lambda: None)
    replace(torch.cuda, "is_available", lambda: True)
    replace(torch.cuda, "device_count", lambda: 1)
    replace(torch.cuda, "current_device", lambda: 0)
    replace(torch.cuda, "is_bf16_supported", lambda including_emulation=True: True)

    def restore() -> None:
        while replaced:
            owner, name, value = replaced.pop()
            if value is _MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, value)

    return restore
