"""Makes new networks start from cheap random weights: how much memory training takes does not depend on them.

Drawing a billion normal numbers on one core takes ten seconds; a run on the GPU takes less than one. Weights are filled
by repeating a short block of random numbers instead, as small as the usual starting weights. They must not be left as
they are found: with 16-bit gradients a GradScaler skips the optimizer's step while gradients are not finite, and the
optimizer's states would never come to be. Very large ones are left zero, as the system gives new memory: it then costs
neither time nor memory of the host.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

_BLOCK = 1 << 16
_LARGE = 64 << 20  # bytes; twice the largest piece that glibc gives a second time (mallopt(3), M_MMAP_THRESHOLD)
_RANDOM = (
    "uniform_", "normal_", "trunc_normal_", "kaiming_uniform_", "kaiming_normal_", "xavier_uniform_", "xavier_normal_",
)  # fmt: skip


def fill(tensor: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    """Fill with repeated random numbers, no larger than one over the root of the larger of its two sides.

    >>> bool(fill(torch.empty(100, 100)).abs().max() <= 0.1)
    True
    """
    if tensor.device.type == "meta" or tensor.numel() == 0:
        return tensor
    longest = max(tensor.shape[0], tensor.numel() // tensor.shape[0]) if tensor.dim() > 1 else max(tensor.numel(), 100)
    block = _block() * longest**-0.5
    with torch.no_grad():
        flat = tensor.detach().view(-1)
        if flat.nbytes >= _LARGE and not (flat[0] or flat[-1]):
            return tensor
        whole = flat.numel() // _BLOCK * _BLOCK
        if whole:
            flat[:whole].view(-1, _BLOCK).copy_(block.to(flat.dtype).expand(whole // _BLOCK, _BLOCK))
        flat[whole:].copy_(block[: flat.numel() - whole])
    return tensor


_made: list[torch.Tensor] = []


def _block() -> torch.Tensor:
    if not _made:
        _made.append(torch.rand(_BLOCK, generator=torch.Generator().manual_seed(0)) * 2 - 1)
    return _made[0]


@contextmanager
def cheap_start() -> Iterator[None]:
    """For the time of the `with`, PyTorch's functions of random starting weights fill cheaply.

    Not covered: weights that a model fills by its tensors' own methods (`weight.data.normal_()`); they are only slower.

    >>> with cheap_start():
    ...     layer = nn.Linear(4, 4)
    """
    before = {name: getattr(nn.init, name) for name in _RANDOM}
    try:
        for name in _RANDOM:
            setattr(nn.init, name, fill)
        yield
    finally:
        for name, function in before.items():
            setattr(nn.init, name, function)
