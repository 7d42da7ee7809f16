"""`torch.jit.script`: what is scripted while a virtual GPU is in use runs as the Python code it was written as.

The compiler reads the source of every function that is called, and the stand-ins for PyTorch's functions are written
in a Python that it does not know. Functions scripted before the `with` statement run as they are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ullage.virtual.replacements import Replacements

if TYPE_CHECKING:
    from ullage.virtual.gpu import VirtualGPU


def install(gpu: VirtualGPU, replacements: Replacements) -> None:
    """Put the stand-in in place."""
    replacements.put(torch.jit, "script", script)


def script(obj: Any = None, *args: Any, **options: Any) -> Any:
    """`torch.jit.script`: returns what it is given."""
    return script if obj is None else obj
