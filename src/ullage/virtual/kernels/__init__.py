"""What each CUDA kernel asks of the allocator, and which kernel is chosen: one rule for each operator.

Importing this package registers every rule; see `plan.py` for how one is written.
"""

from __future__ import annotations

from typing import Any

import torch

from ullage.virtual.kernels import (  # noqa: F401
    attention,
    indexing,
    losses,
    matmul,
    normalization,
    pointwise,
    pooling,
    recurrent,
    reductions,
    sorting,
)
from ullage.virtual.kernels.cudnn import convolution  # noqa: F401


def settings() -> tuple[Any, ...]:
    """The global switches of PyTorch that decide which kernel it takes."""
    get = torch._C
    return (
        get._get_cudnn_enabled(),
        get._get_cudnn_benchmark(),
        get._get_cudnn_deterministic(),
        get._get_cudnn_allow_tf32(),
        get._get_deterministic_algorithms(),
    )
