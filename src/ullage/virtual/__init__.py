"""The virtual GPU: training code runs on "cuda" without a GPU, and its memory is counted.

Names are loaded on first use, because programs that never import PyTorch use `ullage.virtual.shared_card.cards`.
"""

import importlib
from typing import TYPE_CHECKING, Any

from ullage.virtual import releases

if TYPE_CHECKING:
    from ullage.virtual.gpu import VirtualGPU, current, virtual_gpu

__all__ = ["VirtualGPU", "current", "virtual_gpu"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        releases.refuse_if_unserved()
        return getattr(importlib.import_module("ullage.virtual.gpu"), name)
    raise AttributeError(f"module 'ullage.virtual' has no attribute {name!r}")
