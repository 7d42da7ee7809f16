"""What `torch.cuda` and its neighbours answer while a virtual GPU is in use.

PyTorch's own Python code stays in place wherever it can: what it asks of its C++ part is replaced
(`torch._C._cuda_...`), so that a CPU build, a CUDA build and a machine with a GPU give the same answers. Each
file `surface_*.py` has one subject and puts its replacements into one list; leaving the `with` statement
takes them back in the opposite order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from ullage.virtual import (
    collectives,  # noqa: F401  (registers itself)
    decided_flags,  # noqa: F401  (registers itself)
    in_place_views,  # noqa: F401  (registers itself)
    surface_accelerator,
    surface_backends,
    surface_construction,
    surface_cuda,
    surface_distributed,
    surface_events,
    surface_legacy,
    surface_memory,
    surface_parallel,
    surface_random,
    surface_refusals,
    surface_saving,
    surface_scripting,
    surface_streams,
    surface_tensors,
    surface_threads,
    torchvision_operators,
)
from ullage.virtual.replacements import Replacements

if TYPE_CHECKING:
    from ullage.virtual.gpu import VirtualGPU

_PARTS = (
    surface_cuda,
    surface_memory,
    surface_events,
    surface_streams,
    surface_accelerator,
    surface_random,
    surface_backends,
    surface_construction,
    surface_tensors,
    surface_saving,
    surface_scripting,
    surface_legacy,
    surface_parallel,
    surface_threads,
    surface_refusals,
    surface_distributed,
)


def install(gpu: VirtualGPU) -> Callable[[], None]:
    """Put the virtual GPU's answers in place; returns what takes them away again."""
    torchvision_operators.make_torchvision_importable()
    replacements = Replacements()
    try:
        for part in _PARTS:
            part.install(gpu, replacements)
    except BaseException:
        replacements.undo()
        raise
    return replacements.undo
