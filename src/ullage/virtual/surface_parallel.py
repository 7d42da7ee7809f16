"""torch.nn.DataParallel on one GPU: its C++ helpers, which a CPU build does not have."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.parallel import _functions

from ullage.virtual.replacements import Replacements

if TYPE_CHECKING:
    from ullage.virtual.gpu import VirtualGPU


def install(gpu: VirtualGPU, replacements: Replacements) -> None:
    """Put the helpers in place."""
    replacements.put_all(
        torch._C,
        {
            "_scatter": scatter,
            "_gather": lambda tensors, dim, destination=None: torch.cat(list(tensors), dim),
            "_broadcast": lambda tensor, devices: [tensor.to("cuda") for _ in devices],
            "_broadcast_coalesced": lambda tensors, devices, size=0: [list(tensors) for _ in devices],
        },
    )
    replacements.put(_functions, "_streams", None)  # PyTorch keeps the copying streams: not beyond the `with`


def scatter(
    tensor: torch.Tensor,
    devices: Sequence[int],
    chunk_sizes: Sequence[int] | None = None,
    dim: int = 0,
    streams: Sequence[Any] | None = None,
) -> list[torch.Tensor]:
    """torch/csrc/cuda/comm.cpp: chunks of a tensor, each copied in its stream to its device."""
    whole: Any = tensor
    chunks = whole.split(list(chunk_sizes), dim) if chunk_sizes else whole.chunk(len(devices), dim)
    moved = []
    for place, chunk in enumerate(chunks):
        stream = streams[place] if streams else None
        with torch.cuda.stream(stream):
            moved.append(chunk.to("cuda", non_blocking=True))
    return moved
