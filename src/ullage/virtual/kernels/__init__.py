"""What CUDA kernels ask of the allocator: one rule for each operator that needs one.

Importing this package registers every rule; `plan.py` says how to write one.
"""

from __future__ import annotations

from ullage.virtual.kernels import (  # noqa: F401
    attention,
    indexing,
    linalg,
    losses,
    matmul,
    normalization,
    pointwise,
    pooling,
    recurrent,
    reductions,
    regular,
    sharding,
    sorting,
    spectral,
)
from ullage.virtual.kernels.cudnn import convolution  # noqa: F401
