"""Parts that the generated families share: activation functions by name, GPT-2's projection, attention."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from ullage.errors import UnknownName

ACTIVATIONS: dict[str, Any] = {
    "relu": nn.ReLU,
    "elu": nn.ELU,
    "tanh": nn.Tanh,
    "gelu": nn.GELU,
    "silu": nn.SiLU,
    "selu": nn.SELU,
    "leaky_relu": nn.LeakyReLU,
    "prelu": nn.PReLU,
    "mish": nn.Mish,
    "softplus": nn.Softplus,
    "sigmoid": nn.Sigmoid,
    "identity": nn.Identity,
}


def activation(name: str) -> nn.Module:
    """An activation function by its name.

    >>> activation("elu")
    ELU(alpha=1.0)
    """
    if name not in ACTIVATIONS:
        raise UnknownName("activation function", name, ACTIVATIONS)
    made: nn.Module = ACTIVATIONS[name]()
    return made


class Conv1D(nn.Module):
    """A projection with its weight stored inputs first, as GPT-2 has it in the place of linear layers.

    >>> Conv1D(8, 24)(torch.ones(2, 3, 8)).shape
    torch.Size([2, 3, 24])
    """

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.outputs = outputs
        self.weight = nn.Parameter(torch.empty(inputs, outputs))
        self.bias = nn.Parameter(torch.empty(outputs))
        nn.init.normal_(self.weight, std=0.02)
        nn.init.zeros_(self.bias)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """One matrix product with the bias added."""
        shape = (*states.shape[:-1], self.outputs)
        return torch.addmm(self.bias, states.view(-1, states.shape[-1]), self.weight).view(shape)


class Attention(nn.Module):
    """Attention of several heads over its own states, or over those of an encoder (`memory`).

    `fused` projects queries, keys and values with one layer; `eager` computes the scores one operation after the
    other instead of by `scaled_dot_product_attention`. Without padding masks.
    """

    def __init__(
        self, size: int, heads: int, dropout: float, *,
        projection: type[nn.Module] = nn.Linear, causal: bool = False, fused: bool = True, eager: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        self.heads, self.causal, self.eager, self.rate = heads, causal, eager, dropout
        parts = 1 if fused else 3
        self.projections = nn.ModuleList(projection(size, size * 3 // parts) for _ in range(parts))
        self.output = projection(size, size)
        self.dropout = nn.Dropout(dropout)

    def forward(self, states: torch.Tensor, memory: torch.Tensor | None = None) -> torch.Tensor:
        """The mixed values, projected."""
        queries, keys, values = (self._split(part) for part in self._projected(states, memory))
        mixed = self._eager(queries, keys, values) if self.eager else self._kernel(queries, keys, values)
        together: torch.Tensor = self.output(mixed.transpose(1, 2).reshape(states.shape))
        return together

    def _projected(self, states: torch.Tensor, memory: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
        source = states if memory is None else memory
        if len(self.projections) == 3:
            return tuple(
                project(given) for project, given in zip(self.projections, (states, source, source), strict=True)
            )
        own: tuple[torch.Tensor, ...] = self.projections[0](states).chunk(3, dim=-1)
        return own if memory is None else (own[0], *self.projections[0](memory).chunk(3, dim=-1)[1:])

    def _split(self, states: torch.Tensor) -> torch.Tensor:
        apart: torch.Tensor = states.unflatten(-1, (self.heads, -1)).transpose(1, 2)
        return apart

    def _kernel(self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        rate = self.rate if self.training else 0.0
        return functional.scaled_dot_product_attention(queries, keys, values, dropout_p=rate, is_causal=self.causal)

    def _eager(self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        scores = queries @ keys.transpose(-2, -1) / math.sqrt(queries.shape[-1])
        if self.causal:
            length = scores.shape[-1]
            later = torch.ones(length, length, dtype=torch.bool, device=scores.device).triu(1)
            scores = scores.masked_fill(later, torch.finfo(scores.dtype).min)
        mixed: torch.Tensor = self.dropout(scores.softmax(-1)) @ values
        return mixed
