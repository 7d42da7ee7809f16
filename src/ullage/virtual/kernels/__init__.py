"""What each CUDA kernel asks of the allocator, and which kernel is chosen: one rule for each operator.

Importing this package registers every rule; see `plan.py` for how one is written.
"""

from __future__ import annotations

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
