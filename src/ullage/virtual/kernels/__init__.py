"""CUDA's choice of kernels, and what each asks of the allocator. Importing this package registers every rule."""

from __future__ import annotations

from typing import Any

import torch

from ullage.virtual.kernels import (  # noqa: F401
    attention,
    batch_normalization,
    convolution,
    embedding,
    extremes,
    indexing,
    losses,
    matmul,
    normalization,
    pointwise,
    pooling,
    reductions,
    resampling,
    rnn,
    softmax,
    sorting,
    statistics,
)


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
