"""Attention and dropout on the meta device, with what CUDA's kernels keep for the backward pass.

PyTorch takes both apart on the meta device: attention would keep all its scores, dropout a mask of numbers. For the
time of a `with` these two functions keep what the fused kernels keep. Tensors elsewhere go the usual way.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn import functional

_LOCK = threading.RLock()  # what is exchanged belongs to the whole process


class _Attention(torch.autograd.Function):
    """Keeps queries, keys, values, output and a number for each row of the scores."""

    @staticmethod
    def forward(ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        # The kernels give the output with heads inside, so that joining them is no copy.
        *batch, heads, length, _ = query.shape
        out = torch.empty((*batch, length, heads, value.shape[-1]), dtype=query.dtype, device="meta").transpose(-3, -2)
        sums = torch.empty(query.shape[:-1], dtype=torch.float32, device="meta")
        ctx.save_for_backward(query, key, value, out, sums)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise NotImplementedError("features need the forward pass alone")


@contextmanager
def cheap_kernels(attended: Callable[[torch.Tensor], Any]) -> Iterator[None]:
    """`attended` is called with the output of every attention, and with the scores where they are computed apart.

    >>> seen = []
    >>> with cheap_kernels(seen.append):
    ...     states = torch.empty(1, 2, 8, 4, device="meta")
    ...     out = functional.scaled_dot_product_attention(states, states, states)
    >>> seen[0].shape
    torch.Size([1, 2, 8, 4])
    """
    attention, dropout = functional.scaled_dot_product_attention, functional.dropout
    softmaxes: dict[Any, Any] = {
        place: place.softmax for place in (torch, torch.Tensor)
    }  # functional.softmax calls the latter

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        if query.is_meta and query.dim() >= 3:
            out: torch.Tensor = _Attention.apply(query, key, value)
        else:
            with _softmaxes_as_they_were(softmaxes):
                out = attention(query, key, value, *args, **options)
        attended(out)
        return out

    def drop(input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
        if not input.is_meta or not training or p == 0:
            return dropout(input, p, training, inplace)
        out, _ = torch.native_dropout(input, p, True)  # keeps a mask of one byte a number
        return out

    inside: list[None] = []  # a function mode looks the method up again and calls it once more

    def counting(softmax: Any) -> Any:
        def soften(tensor: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
            inside.append(None)
            try:
                out: torch.Tensor = softmax(tensor, *args, **options)
            finally:
                inside.pop()
            if out.dim() >= 3 and not inside:
                attended(out)
            return out

        return soften

    with _LOCK:
        try:
            functional.scaled_dot_product_attention, functional.dropout = attend, drop
            for place, softmax in softmaxes.items():
                place.softmax = counting(softmax)
            yield
        finally:
            functional.scaled_dot_product_attention, functional.dropout = attention, dropout
            _restore(softmaxes)


@contextmanager
def _softmaxes_as_they_were(softmaxes: dict[Any, Any]) -> Iterator[None]:
    patched = {place: place.softmax for place in softmaxes}
    _restore(softmaxes)
    try:
        yield
    finally:
        _restore(patched)


def _restore(softmaxes: dict[Any, Any]) -> None:
    for place, softmax in softmaxes.items():
        place.softmax = softmax
