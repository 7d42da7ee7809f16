"""Makes new networks start from cheap weights: how much memory training takes does not depend on them.

Drawing a billion normal numbers on one core takes ten seconds, to send them to the GPU one more; a run there takes
less. Small weights are filled by repeating a short block of random numbers, as small as the usual starting weights.
Large ones are not filled at all, and `on_gpu` makes them there, in the order and the sizes in which `model.to("cuda")`
would bring them. None may be left as they are found: with 16-bit gradients a GradScaler skips the
optimizer's step while gradients are not finite, and the optimizer's states would never come to be.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

_BLOCK = 1 << 16
_LARGE = 1 << 20  # bytes
_LEFT = "left_for_the_gpu"  # an attribute of parameters that have no values yet
_RANDOM = (
    "uniform_", "normal_", "trunc_normal_", "kaiming_uniform_", "kaiming_normal_", "xavier_uniform_", "xavier_normal_",
)  # fmt: skip


def fill(tensor: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    """Fill with repeated random numbers, no larger than one over the root of the larger of its two sides.

    Large parameters are only marked, for `on_gpu`.

    >>> bool(fill(torch.empty(100, 100)).abs().max() <= 0.1)
    True
    """
    if tensor.device.type == "meta" or tensor.numel() == 0:
        return tensor
    if isinstance(tensor, nn.Parameter) and tensor.nbytes >= _LARGE:
        setattr(tensor, _LEFT, True)
        return tensor
    block = _block() * _bound(tensor)
    with torch.no_grad():
        flat = tensor.detach().view(-1)
        whole = flat.numel() // _BLOCK * _BLOCK
        if whole:
            flat[:whole].view(-1, _BLOCK).copy_(block.to(flat.dtype).expand(whole // _BLOCK, _BLOCK))
        flat[whole:].copy_(block[: flat.numel() - whole])
    return tensor


def _bound(tensor: torch.Tensor) -> float:
    rows = tensor.shape[0]
    longest = max(rows, tensor.numel() // rows) if tensor.dim() > 1 else max(tensor.numel(), 100)
    return float(longest**-0.5)


_made: list[torch.Tensor] = []


def _block() -> torch.Tensor:
    if not _made:
        _made.append(torch.rand(_BLOCK, generator=torch.Generator().manual_seed(0)) * 2 - 1)
    return _made[0]


def on_gpu(model: nn.Module, low: torch.dtype | None = None, *, drawn: bool = False, device: str = "cuda") -> nn.Module:
    """Bring a network that was made in `cheap_start` to the GPU, its floating-point numbers cast to `low`.

    Large weights are zero there, which loads no kernel that training does not; or `drawn` at random, where it matters
    what is multiplied.

    >>> with cheap_start():
    ...     model = nn.Linear(1000, 1000)
    >>> float(on_gpu(model, torch.bfloat16, device="cpu").weight.abs().max())
    0.0
    """

    def move(tensor: torch.Tensor) -> torch.Tensor:
        dtype = low if low is not None and tensor.is_floating_point() else tensor.dtype
        if getattr(tensor, _LEFT, False):
            delattr(tensor, _LEFT)  # a parameter that two modules share comes a second time, and stays
            made = torch.empty_like(tensor, dtype=dtype, device=device)
            return made.uniform_(-_bound(tensor), _bound(tensor)) if drawn else made.zero_()
        return tensor.to(dtype).to(device)  # in this order: a cast on the GPU would take memory there

    with torch.no_grad():
        model._apply(move)
    return model


@contextmanager
def cheap_start() -> Iterator[None]:
    """For the time of the `with`, PyTorch's functions of random starting weights fill cheaply; `on_gpu` does the rest.

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
