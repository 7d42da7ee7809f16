"""GPUMemNet's networks as published: an ensemble of small perceptrons, and Transformers over the sequence of layers.

Both give a free score to every class of memory. The sizes are those of the published code: perceptrons of 8 neurons in
the first hidden layer and 4 in the others, with depths from 1 to 7 (CNNs: to 8), each with batch normalisation and
ReLU; two Transformers, of 6 and 4 numbers a layer, whose sums over the layers an ensemble of perceptrons reads.

The published code lets its Transformers attend from job to job of a batch; here, as in the paper, attention runs
over the layers of one job. Trained networks are safetensors files: one for each family, estimator and width of a class.
"""

import functools
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from ullage.errors import InvalidValue, UnknownName
from ullage.estimation.estimators.gpumemnet.features import LONGEST, TYPES, names_of, totals_of, tuples_of
from ullage.estimation.estimators.printed_summary import ModelSummary
from ullage.estimation.estimators.weights import SHIPPED, ModelCard, read_weights
from ullage.units import GIB

_TWICE = (1, 2, 3, 4, 5, 6, 7, 1, 2, 3, 4, 5, 6)
DEPTHS = {"mlp": _TWICE, "cnn": (1, 2, 3, 4, 5, 6, 7, 8, 4, 5, 6, 7, 8, 4, 5, 6), "transformer": _TWICE}
FIRST, OTHERS = 8, 4  # neurons of the first hidden layer, and of the others
TRANSFORMERS = ((6, 3), (4, 2))  # numbers a layer, and blocks; one head each, 4 neurons between, no dropout
BETWEEN = 4
UNSORTED_LENGTH = 60  # sequences as long as this many layers or shorter are not sorted by length


@dataclass
class SummaryBatch:
    """A batch of jobs; sequences are padded with zeros, and `there` marks layers."""

    totals: torch.Tensor  # [jobs, features]
    tokens: torch.Tensor  # [jobs, longest, 2 to 4 for the type, and 2]
    there: torch.Tensor  # [jobs, longest] bool

    def rows(self, chosen: torch.Tensor) -> "SummaryBatch":
        """Return some of the jobs, with no more padding than necessary."""
        there = self.there[chosen]
        longest = max(int(there.sum(1).max()), 1)
        return SummaryBatch(self.totals[chosen], self.tokens[chosen][:, :longest], there[:, :longest])

    def alone(self) -> "SummaryBatch":
        """Return the jobs without their sequences, for networks that read none."""
        return SummaryBatch(self.totals, self.tokens[:, :1], self.there[:, :1])

    def __len__(self) -> int:
        return len(self.totals)


def jobs_of(summaries: Sequence[ModelSummary], family: str) -> SummaryBatch:
    sequences = [tuples_of(summary, family) for summary in summaries]
    longest = max(max(map(len, sequences)), 1)
    tokens = torch.zeros(len(summaries), longest, token_size(family))
    there = torch.zeros(len(summaries), longest, dtype=torch.bool)
    for place, sequence in enumerate(sequences):
        if sequence:
            tokens[place, : len(sequence)] = torch.tensor(sequence, dtype=torch.float32)
        there[place, : max(len(sequence), 1)] = True  # a model without such layers is one layer of zeros
    return SummaryBatch(torch.tensor([totals_of(summary, family) for summary in summaries]), tokens, there)


def token_size(family: str) -> int:
    """Return the length of a tuple: the type's code, activations, parameters."""
    return len(next(iter(TYPES[family].values()))) + 2


class Perceptrons(nn.Module):
    """Perceptrons of several depths over the same features; the answer is the mean of their scores.

    All members compute at once: member `m` of a layer is `weights[m]`, deeper members come first.
    """

    def __init__(self, inputs: int, classes: int, depths: Sequence[int]) -> None:
        super().__init__()
        self.depths = sorted(depths, reverse=True)
        self.weights, self.biases, self.norms = nn.ParameterList(), nn.ParameterList(), nn.ModuleList()
        before = inputs
        for layer in range(self.depths[0]):
            members, width = self._members(layer), FIRST if layer == 0 else OTHERS
            self.weights.append(_xavier(members, before, width))
            self.biases.append(torch.zeros(members, 1, width))
            self.norms.append(nn.BatchNorm1d(members * width))
            before = width
        ends = [FIRST if depth == 1 else OTHERS for depth in reversed(self.depths)]
        self.last = nn.Parameter(torch.cat([_xavier(1, width, classes)[0].detach() for width in ends]))
        self.last_bias = nn.Parameter(torch.zeros(len(self.depths), classes))

    def _members(self, layer: int) -> int:
        """Return the number of members with a layer of this number, from 0."""
        return sum(depth > layer for depth in self.depths)

    def forward(self, numbers: torch.Tensor) -> torch.Tensor:
        """Return the scores [jobs, classes]."""
        hidden, done = numbers.expand(self._members(0), *numbers.shape), []
        for layer, (weight, bias, norm) in enumerate(zip(self.weights, self.biases, self.norms, strict=True)):
            members, jobs, width = len(weight), hidden.shape[1], weight.shape[2]
            made = torch.baddbmm(bias, hidden[:members], weight).transpose(0, 1).reshape(jobs, members * width)
            hidden = functional.relu(norm(made)).view(jobs, members, width).transpose(0, 1)
            later = self._members(layer + 1)
            done.append(hidden[later:].transpose(0, 1).reshape(jobs, -1))
        return torch.cat(done, dim=1) @ self.last / len(self.depths) + self.last_bias.mean(0)


def _xavier(members: int, inputs: int, outputs: int) -> nn.Parameter:
    """Return weights by Xavier's rule, for each member."""
    bound = math.sqrt(6 / (inputs + outputs))
    return nn.Parameter(torch.empty(members, inputs, outputs).uniform_(-bound, bound))


class GPUMemNetEnsemble(nn.Module):
    def __init__(self, family: str, classes: int) -> None:
        super().__init__()
        self.members = Perceptrons(len(names_of(family)), classes, DEPTHS[family])

    def forward(self, jobs: SummaryBatch) -> torch.Tensor:
        return self.members(jobs.totals)  # type: ignore[no-any-return]


class _PlaceNorm(nn.BatchNorm1d):
    """Batch normalization with statistics for every place of the sequence, also over shorter sequences."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert self.running_mean is not None and self.running_var is not None
        places = x.shape[1]
        return functional.batch_norm(
            x,
            self.running_mean[:places],
            self.running_var[:places],
            self.weight[:places],
            self.bias[:places],
            self.training,
            self.momentum or 0.0,
            self.eps,
        )


class GPUMemNetBlock(nn.Module):
    """`nn.TransformerEncoderLayer` with one head and no dropout: attention and a perceptron, norms after."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.mixed, self.out = nn.Linear(size, 3 * size), nn.Linear(size, size)
        self.wide, self.narrow = nn.Linear(size, BETWEEN), nn.Linear(BETWEEN, size)
        self.first_norm, self.second_norm = nn.LayerNorm(size), nn.LayerNorm(size)
        nn.init.xavier_uniform_(self.mixed.weight)
        for layer in (self.mixed, self.out):
            nn.init.zeros_(layer.bias)

    def forward(self, x: torch.Tensor, padding: torch.Tensor) -> torch.Tensor:
        """Apply the block; `padding` is added to the scores of attention, minus infinity if there is no layer."""
        query, key, value = (part.unsqueeze(1) for part in self.mixed(x).chunk(3, dim=-1))
        seen = functional.scaled_dot_product_attention(query, key, value, attn_mask=padding.unsqueeze(1)).squeeze(1)
        x = self.first_norm(x + self.out(seen))
        return self.second_norm(x + self.narrow(functional.relu(self.wide(x))))  # type: ignore[no-any-return]


class GPUMemNetTransformer(nn.Module):
    """A Transformer over the tuples of a job, and perceptrons over its sum and the totals."""

    places: torch.Tensor

    def __init__(self, family: str, classes: int, size: int, blocks: int) -> None:
        super().__init__()
        longest = LONGEST[family]
        self.first, self.first_norm = nn.Linear(token_size(family), size), _PlaceNorm(longest)
        self.second, self.second_norm = nn.Linear(size, size), _PlaceNorm(longest)
        self.register_buffer("places", _places(longest, size), persistent=False)
        self.blocks = nn.ModuleList(GPUMemNetBlock(size) for _ in range(blocks))
        self.members = Perceptrons(size + len(names_of(family)), classes, _TWICE)

    def forward(self, jobs: SummaryBatch) -> torch.Tensor:
        x = functional.relu(self.first_norm(self.first(jobs.tokens)))
        x = functional.relu(self.second_norm(self.second(x))) + self.places[: x.shape[1]]
        return self.members(torch.cat([self._summed(x, jobs.there), jobs.totals], dim=1))  # type: ignore[no-any-return]

    def _summed(self, x: torch.Tensor, there: torch.Tensor) -> torch.Tensor:
        """Return the sum of the blocks' results over the layers [jobs, size].

        Jobs of about the same length are grouped: attention costs the square of the longest.
        """
        lengths = there.sum(1)
        order, sums = lengths.argsort(), []
        for group in order.chunk(max(1, x.shape[1] // UNSORTED_LENGTH)):
            longest = max(int(lengths[group].max()), 1)
            inside = there[group, :longest]
            made = x[group, :longest]
            padding = torch.zeros_like(inside, dtype=x.dtype).unsqueeze(1).masked_fill(~inside.unsqueeze(1), -math.inf)
            for block in self.blocks:
                made = block(made, padding)
            sums.append((made * inside.unsqueeze(2)).sum(1))
        return torch.cat(sums)[order.argsort()]


def _places(longest: int, size: int) -> torch.Tensor:
    """Return sines and cosines of a layer's place, of several wavelengths."""
    angles = torch.arange(longest).unsqueeze(1) * torch.exp(torch.arange(0, size, 2) * (-math.log(10_000.0) / size))
    waves = torch.zeros(longest, size)
    waves[:, 0::2], waves[:, 1::2] = angles.sin(), angles.cos()
    return waves


class Transformers(nn.Module):
    """The Transformer estimator: the mean of the scores of two."""

    def __init__(self, family: str, classes: int) -> None:
        super().__init__()
        self.members = nn.ModuleList(GPUMemNetTransformer(family, classes, *sizes) for sizes in TRANSFORMERS)

    def forward(self, jobs: SummaryBatch) -> torch.Tensor:
        return torch.stack([member(jobs) for member in self.members]).mean(0)


GPUMemNet = GPUMemNetEnsemble | Transformers


# Family and estimator: the widths in GiB of the classes that there are networks for, the one that estimates use first.
# The paper has 1 and 2 for MLPs and 8 for the others.
WIDTHS = {
    ("mlp", "mlp"): (1, 2),
    ("mlp", "transformer"): (1,),
    ("cnn", "mlp"): (8, 1),
    ("cnn", "transformer"): (8,),
    ("transformer", "mlp"): (8, 1),
    ("transformer", "transformer"): (8,),
}


def build(card: ModelCard) -> GPUMemNet:
    """Return a new, untrained network of the card's kind."""
    if card.estimator not in ("mlp", "transformer"):
        raise UnknownName("GPUMemNet estimator", card.estimator, ["mlp", "transformer"], hint="mlp or transformer")
    return (GPUMemNetEnsemble if card.estimator == "mlp" else Transformers)(card.family, card.bins)


def shipped(family: str, estimator: str, width: int | None = None) -> Path:
    """Return the file of weights that comes with Ullage, for classes of `width` bytes or those of the paper."""
    gib = WIDTHS[family, estimator][0] if width is None else width // GIB
    return SHIPPED / f"gpumemnet_{family}_{estimator}_{gib}gib.safetensors"


def load(path: Path) -> tuple[GPUMemNet, ModelCard]:
    """Return the network of a file, in evaluation mode, and its card.

    Weights that were trained on other inputs are refused: they would load if sizes agree, and give wrong answers.
    """
    with read_weights("gpumemnet", path) as (tensors, metadata):
        card, trained_on = ModelCard(**json.loads(metadata["card"])), json.loads(metadata["facts"])
        inputs = inputs_of(card)
        if trained_on != inputs:
            raise InvalidValue(
                f"{path} was trained by another version of Ullage (its inputs are {trained_on}, not {inputs})"
            )
        network = build(card)
        network.load_state_dict(tensors)
    return network.eval(), card


def inputs_of(card: ModelCard) -> dict[str, Any]:
    """Describe the inputs of a network, for its file of weights."""
    return {"format": 1, "method": "gpumemnet", "totals": names_of(card.family), "token": token_size(card.family)}


trained = functools.cache(load)
