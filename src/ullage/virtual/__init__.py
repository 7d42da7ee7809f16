"""The virtual GPU: any training code runs on "cuda" without a GPU, and its memory is counted.

The names are loaded on first use: `ullage.virtual.shared_card.cards` is for programs that never import PyTorch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ullage.virtual.gpu import VirtualGPU, current, virtual_gpu

__all__ = ["VirtualGPU", "current", "virtual_gpu"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(importlib.import_module("ullage.virtual.gpu"), name)
    raise AttributeError(f"module 'ullage.virtual' has no attribute {name!r}")
