"""The three generated families as factories: `ullage_lab.networks.generated:mlp`, `:cnn` and `:transformer`.

A row of `ullage lab draw dataset` names one of them with its settings, so that every command that takes a model takes
these too. Sizes are explicit in the settings; only drawing turns a few numbers into a pyramid or an hourglass.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from ullage.errors import InvalidValue, UnknownName

# Parts that the generated families share: activation functions by name, GPT-2's projection, attention.

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
    if name not in ACTIVATIONS:
        raise UnknownName("activation function", name, ACTIVATIONS)
    made: nn.Module = ACTIVATIONS[name]()
    return made


class Conv1D(nn.Module):
    """A projection with its weight stored inputs first, as GPT-2 has it in the place of linear layers."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.outputs = outputs
        self.weight = nn.Parameter(torch.empty(inputs, outputs))
        self.bias = nn.Parameter(torch.empty(outputs))
        nn.init.normal_(self.weight, std=0.02)
        nn.init.zeros_(self.bias)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        shape = (*states.shape[:-1], self.outputs)
        return torch.addmm(self.bias, states.view(-1, states.shape[-1]), self.weight).view(shape)


class Attention(nn.Module):
    """Attention of several heads over its own states, or over those of an encoder (`memory`).

    `fused` projects queries, keys and values with one layer; `eager` computes the scores one operation after the
    other instead of by `scaled_dot_product_attention`. Without padding masks.
    """

    def __init__(
        self,
        size: int,
        heads: int,
        dropout: float,
        *,
        projection: type[nn.Module] = nn.Linear,
        causal: bool = False,
        fused: bool = True,
        eager: bool = False,
    ) -> None:
        super().__init__()
        self.heads, self.causal, self.eager, self.rate = heads, causal, eager, dropout
        parts = 1 if fused else 3
        self.projections = nn.ModuleList(projection(size, size * 3 // parts) for _ in range(parts))
        self.output = projection(size, size)
        self.dropout = nn.Dropout(dropout)

    def forward(self, states: torch.Tensor, memory: torch.Tensor | None = None) -> torch.Tensor:
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


def mlp(
    widths: Sequence[int], num_classes: int, act: str = "relu", batch_norm: bool = False, dropout: float = 0.0
) -> nn.Module:
    """Linear layers over vectors; `widths` begins with the size of the input."""
    layers: list[nn.Module] = []
    for inputs, outputs in zip(widths, widths[1:], strict=False):
        layers.append(nn.Linear(inputs, outputs))
        if batch_norm:
            layers.append(nn.BatchNorm1d(outputs))
        layers.append(activation(act))
        if dropout:
            layers.append(nn.Dropout(dropout))
    return nn.Sequential(*layers, nn.Linear(widths[-1], num_classes))


def _convolution(
    inputs: int, outputs: int, kernel: int, stride: int, act: str | None, batch_norm: bool, dropout: float
) -> list[nn.Module]:
    layers: list[nn.Module] = [nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2)]
    if batch_norm:
        layers.append(nn.BatchNorm2d(outputs))
    if act is not None:
        layers.append(activation(act))
    if dropout:
        layers.append(nn.Dropout(dropout))
    return layers


class Residual(nn.Module):
    """Two convolutions and a skip connection, with a 1x1 convolution if sizes change."""

    def __init__(
        self, inputs: int, outputs: int, kernels: Sequence[int], stride: int, act: str, batch_norm: bool, dropout: float
    ) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *_convolution(inputs, outputs, kernels[0], stride, act, batch_norm, dropout),
            *_convolution(outputs, outputs, kernels[1], 1, None, batch_norm, 0.0),
        )
        same = inputs == outputs and stride == 1
        self.around = (
            nn.Identity() if same else nn.Sequential(*_convolution(inputs, outputs, 1, stride, None, batch_norm, 0.0))
        )
        self.act = activation(act)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.act(self.body(images) + self.around(images))
        return out


class Dense(nn.Module):
    """A convolution whose output is concatenated with its input."""

    def __init__(self, inputs: int, growth: int, kernel: int, act: str, batch_norm: bool, dropout: float) -> None:
        super().__init__()
        self.body = nn.Sequential(*_convolution(inputs, growth, kernel, 1, act, batch_norm, dropout))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return torch.cat([images, self.body(images)], dim=1)


def cnn(
    arch: str,
    filters: Sequence[int],
    kernels: Sequence[int],
    num_classes: int,
    channels: int = 3,
    down: Sequence[int] = (),
    down_by: str = "max",
    act: str = "relu",
    batch_norm: bool = False,
    dropout: float = 0.0,
) -> nn.Module:
    """Convolutions over images, then the mean over places and a linear layer.

    `filters` and `kernels` have an entry a convolution (on the straight way, for "residual"); before those whose
    number is in `down` the image is halved: by "max" or "avg" pooling or by the convolution's "stride". In "dense"
    `filters` are what each convolution adds, and a 1x1 convolution halves the channels before the image is halved.
    """
    if down_by not in ("max", "avg", "stride"):
        raise InvalidValue(f"down_by must be max, avg or stride, to halve images by, got {down_by!r}")
    pool = {"max": nn.MaxPool2d, "avg": nn.AvgPool2d}.get(down_by)
    layers: list[nn.Module] = []
    width, place = channels, 0
    while place < len(filters):
        if place in down and pool is not None:
            layers.append(pool(2))
        stride = 2 if place in down and pool is None else 1
        outputs, kernel = filters[place], kernels[place]
        if arch == "residual" and place + 1 < len(filters):
            pair = kernels[place : place + 2]
            layers.append(Residual(width, outputs, pair, stride, act, batch_norm, dropout))
            width, place = outputs, place + 2
        elif arch == "dense" and stride == 1:
            if place in down:
                layers.insert(-1, nn.Conv2d(width, max(1, width // 2), 1))
                width = max(1, width // 2)
            layers.append(Dense(width, outputs, kernel, act, batch_norm, dropout))
            width, place = width + outputs, place + 1
        else:
            layers.extend(_convolution(width, outputs, kernel, stride, act, batch_norm, dropout))
            width, place = outputs, place + 1
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, num_classes))


class TransformerBlock(nn.Module):
    """Attention, optional cross-attention to an encoder's states, and two projections, with skip connections."""

    def __init__(
        self,
        size: int,
        middle: int,
        dropout: float,
        act: str,
        norm_first: bool,
        conv1d: bool,
        causal: bool,
        cross: bool,
        **attention: Any,
    ) -> None:
        super().__init__()
        projection: type[nn.Module] = Conv1D if conv1d else nn.Linear
        attend = functools.partial(Attention, size, dropout=dropout, projection=projection, **attention)
        self.norm_first = norm_first
        self.attention = attend(causal=causal)
        self.after_attention = nn.Dropout(dropout)
        self.norm_attention = nn.LayerNorm(size)
        if cross:
            self.cross = attend()
            self.after_cross = nn.Dropout(dropout)
            self.norm_cross = nn.LayerNorm(size)
        self.wide = projection(size, middle)
        self.act = activation(act)
        self.narrow = projection(middle, size)
        self.after_narrow = nn.Dropout(dropout)
        self.norm_middle = nn.LayerNorm(size)

    def forward(self, states: torch.Tensor, memory: torch.Tensor | None = None) -> torch.Tensor:
        """With the norm before each part (as in GPT-2) or after it (as in BERT)."""
        states = self._around(states, self.norm_attention, lambda x: self.after_attention(self.attention(x)))
        if memory is not None:
            states = self._around(states, self.norm_cross, lambda x: self.after_cross(self.cross(x, memory)))
        return self._around(states, self.norm_middle, lambda x: self.after_narrow(self.narrow(self.act(self.wide(x)))))

    def _around(self, states: torch.Tensor, norm: nn.Module, part: object) -> torch.Tensor:
        assert callable(part)
        out: torch.Tensor = states + part(norm(states)) if self.norm_first else norm(states + part(states))
        return out


class Transformer(nn.Module):
    """Token ids in; scores of classes out, or of the vocabulary at every place (`head="words"`)."""

    def __init__(
        self, kind: str, vocabulary: int, length: int, layers: int, num_classes: int, head: str, **block: Any
    ) -> None:
        super().__init__()
        size = block["size"]
        self.kind, self.head = kind, head
        self.words = nn.Embedding(vocabulary, size)  # first, since the number of ids is read from it
        self.places = nn.Parameter(torch.empty(length, size))
        nn.init.normal_(self.places, std=0.02)
        self.dropout = nn.Dropout(block["dropout"])
        encoders = {"encoder": layers, "decoder": 0, "hybrid": layers // 2}[kind]
        self.encoder = nn.ModuleList(TransformerBlock(**block, causal=False, cross=False) for _ in range(encoders))
        self.decoder = nn.ModuleList(
            TransformerBlock(**block, causal=True, cross=encoders > 0) for _ in range(layers - encoders)
        )
        self.norm = nn.LayerNorm(size) if block["norm_first"] else nn.Identity()
        self.scores = nn.Linear(size, vocabulary if head == "words" else num_classes, bias=head != "words")

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """An encoder, a decoder, or an encoder whose states the decoder attends to."""
        states: torch.Tensor = self.dropout(self.words(ids) + self.places[: ids.shape[1]])
        memory: torch.Tensor | None = None
        if self.encoder:
            memory = states
            for block in self.encoder:
                memory = block(memory)
        if self.decoder:
            for block in self.decoder:
                states = block(states, memory)
        elif memory is not None:
            states = memory
        states = self.norm(states)
        scores: torch.Tensor = self.scores(states if self.head == "words" else states.mean(dim=1))
        return scores


def transformer(
    kind: str,
    vocabulary: int,
    length: int,
    size: int,
    layers: int,
    heads: int,
    middle: int,
    num_classes: int = 2,
    head: str = "classes",
    dropout: float = 0.1,
    act: str = "gelu",
    norm_first: bool = True,
    conv1d: bool = False,
    fused: bool = True,
    eager: bool = False,
) -> nn.Module:
    """A Transformer over token ids: `kind` is "encoder", "decoder" or "hybrid" (both, half of the layers each).

    `head="words"` predicts the next word at every place instead of one class. `conv1d` takes GPT-2's projections in
    the place of linear layers.
    """
    if kind not in ("encoder", "decoder", "hybrid"):
        raise InvalidValue(f"kind of a transformer must be encoder, decoder or hybrid, got {kind!r}")
    if head not in ("classes", "words"):
        raise InvalidValue(f"head of a transformer must be classes or words, got {head!r}")
    if size % heads:
        raise InvalidValue(f"size must be divisible by its {heads} heads, got {size}")
    block = {"size": size, "heads": heads, "middle": middle, "dropout": dropout, "act": act, "norm_first": norm_first}
    return Transformer(
        kind, vocabulary, length, layers, num_classes, head, **block, conv1d=conv1d, fused=fused, eager=eager
    )
