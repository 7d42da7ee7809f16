"""walknet's networks: an ensemble of multilayer perceptrons, and a Transformer over the sequence of layers.

Both classify a job into bins of memory. Bins have an order, and memory is a sum of parts that are known up to a factor,
so the last layer does not learn a free score a bin: it learns the factors of the parts, whose sum is where the memory
lies, and how sure that is; a bin's score is the logarithm of the probability that a logistic distribution, on the
logarithm of memory, gives to it. It is trained with cross-entropy over bins like any classifier, but a bin that no
training row fell into has a sensible score too.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from ullage.errors import UnknownName
from ullage.estimation.estimators.weights import (
    ModelCard,
    load_network,
    plain_products,
    probabilities,
    save_network,
)
from ullage_lab.estimators.walknet.inputs import PARTS, STARTS, TOKEN_FEATURES, TOTALS, WALKS, Inputs

# Hidden layers of the ensemble's members: depths from 1 to 7, as in the dissertation, and widths of our own choice.
MEMBERS = ((64,), (128,), (64, 32), (128, 64), (96, 96, 48), (64, 64, 64, 32), (128, 64, 64, 32, 32),
           (48, 48, 48, 48, 48, 48), (64, 64, 48, 48, 32, 32, 32))  # fmt: skip
SHIPPED = Path(__file__).parents[1] / "data"
WIDTH, HEADS, LAYERS = 32, 4, 2
START = 0.01  # the factor that a part begins with which is not in the sum at first
EXACT, SURE = -6.0, -3.0  # the logarithms of the two spreads before learning: 0.25 % and 5 % of the memory
TRUST = (0.0, -1.0, -1.0, 0.0)  # in the walks and in the network, before learning
LEAST_SPREAD = 2e-4


@dataclass
class WalknetBatch:
    """Jobs side by side; sequences are padded, `there` tells tokens from padding."""

    totals: torch.Tensor  # [jobs, len(TOTALS)]
    parts: torch.Tensor  # [jobs, len(PARTS)] bytes
    tokens: torch.Tensor  # [jobs, longest, TOKEN_FEATURES]
    sizes: torch.Tensor  # [jobs, longest] bytes
    repeats: torch.Tensor  # [jobs, longest]
    there: torch.Tensor  # [jobs, longest] bool

    def rows(self, chosen: torch.Tensor) -> WalknetBatch:
        """Some of the jobs, with no more padding than they need."""
        there = self.there[chosen]
        longest = int(there.sum(1).max())
        tokens, sizes, repeats = (part[chosen][:, :longest] for part in (self.tokens, self.sizes, self.repeats))
        return WalknetBatch(self.totals[chosen], self.parts[chosen], tokens, sizes, repeats, there[:, :longest])

    def alone(self) -> WalknetBatch:
        """The jobs without their sequences, for networks that read none."""
        tokens, sizes, repeats, there = (part[:, :1] for part in (self.tokens, self.sizes, self.repeats, self.there))
        return WalknetBatch(self.totals, self.parts, tokens, sizes, repeats, there)

    def __len__(self) -> int:
        return len(self.totals)


def batched(jobs: Sequence[Inputs]) -> WalknetBatch:
    """Jobs as one batch.

    >>> from ullage_lab.estimators.walknet.inputs import inputs_of
    >>> layers = [{"type": "linear", "activations": 1, "parameters": 3}]
    >>> job = inputs_of({"batch_size": 2, "parameters": 3, "layers": layers})
    >>> batched([job, job]).tokens.shape[:2]
    torch.Size([2, 1])
    """
    longest = max(len(job.tokens) for job in jobs)
    tokens = torch.zeros(len(jobs), longest, TOKEN_FEATURES)
    sizes, repeats = torch.zeros(len(jobs), longest), torch.ones(len(jobs), longest)
    there = torch.zeros(len(jobs), longest, dtype=torch.bool)
    for place, job in enumerate(jobs):
        count = len(job.tokens)
        tokens[place, :count] = torch.from_numpy(job.tokens)
        sizes[place, :count] = torch.from_numpy(job.sizes)
        repeats[place, :count] = torch.from_numpy(job.repeats)
        there[place, :count] = True
    totals = torch.stack([torch.from_numpy(job.totals) for job in jobs])
    parts = torch.stack([torch.from_numpy(job.parts) for job in jobs])
    return WalknetBatch(totals, parts, tokens, sizes, repeats, there)


@dataclass
class Belief:
    """Where memory may lie: a mixture of logistic distributions on its logarithm, all [..., jobs, ways].

    The last one stands where the network would have it, the others where a walk through the step ends (they differ in
    what cuDNN takes); the network says how much it trusts each: `trust` are the logarithms of the weights.
    """

    place: torch.Tensor
    spread: torch.Tensor
    trust: torch.Tensor

    def log_between(self, low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
        """The logarithm of the probability that memory lies between two edges (logarithms, broadcast over jobs)."""
        a, b = ((edge.unsqueeze(-1) - self.place) / self.spread for edge in (low, high))
        return torch.logsumexp(self.trust + _log_between(a, b), dim=-1)


def _log_between(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """log(sigma(b) - sigma(a)), for a < b: the difference is sigma(b) sigma(-a) (1 - exp(a - b))."""
    return functional.logsigmoid(b) + functional.logsigmoid(-a) + torch.log(-torch.expm1((a - b).clamp(max=-1e-6)))


class Bins(nn.Module):
    """From a belief to a score a bin, the logarithm of its probability; the last bin has no upper edge.

    >>> one = torch.tensor([[math.log(2.5 * 2**30)] * 2])
    >>> belief = Belief(one, torch.full((1, 2), 0.01), torch.full((1, 2), math.log(0.5)))
    >>> scores = Bins(4, 1 << 30)(belief)
    >>> scores.argmax(1).item(), round(scores.exp().sum().item(), 3)
    (2, 1.0)
    """

    edges: torch.Tensor

    def __init__(self, count: int, width: int) -> None:
        super().__init__()
        self.count, self.width = count, width
        inner = (torch.arange(1, count, dtype=torch.float64) * width).log().float()
        far = torch.tensor([0.0]), torch.tensor([80.0])  # 1 byte, and more than there is
        self.register_buffer("edges", torch.cat([far[0], inner, far[1]]), persistent=False)

    def forward(self, belief: Belief) -> torch.Tensor:
        """Scores [..., jobs, bins]."""
        spread = Belief(belief.place.unsqueeze(-2), belief.spread.unsqueeze(-2), belief.trust.unsqueeze(-2))
        return spread.log_between(self.edges[:-1], self.edges[1:])


def cross_entropy(belief: Belief, low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
    """The mean cross-entropy of classifying into bins, from the edges (logarithms) of each job's true bin.

    The same as `nll_loss(Bins(...)(belief), true)`, without the scores of all the other bins.

    >>> two = torch.tensor([math.log(2.0)])
    >>> belief = Belief(torch.zeros(1, 2), torch.ones(1, 2), torch.tensor([[0.0, -math.inf]]))
    >>> round(cross_entropy(belief, -two, two).exp().item(), 4)
    3.0
    """
    return -belief.log_between(low, high).mean()


class Factors(nn.Module):
    """From what a network made of a job to a belief: factors of the parts, two spreads, and trust in the walk."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.Linear(width, len(PARTS) + 2 + len(TRUST))
        nn.init.normal_(self.layer.weight, std=0.01)
        nn.init.zeros_(self.layer.bias)
        begin = [math.log(math.expm1(STARTS.get(part, START))) for part in PARTS]
        self.start = nn.Parameter(torch.tensor([*begin, EXACT, SURE, *TRUST]))  # what holds for all jobs
        self.walk = nn.Parameter(torch.zeros(2))  # logarithms of the factors of the walk and of what is fixed

    def begin(self, fixed: float) -> None:
        """Let what is fixed begin with this factor: another GPU has another context."""
        with torch.no_grad():
            self.start[len(PARTS) - 1] = math.log(math.expm1(fixed))
            self.walk[1] = math.log(fixed)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[jobs, parts + 8]: factors before they are made positive, spreads, trust, and the walks' two factors."""
        found = self.layer(hidden) + self.start
        return torch.cat([found, self.walk.expand(len(found), 2)], dim=1)


def belief_of(told: torch.Tensor, parts: torch.Tensor, more: torch.Tensor | None = None) -> Belief:
    """The belief from what `Factors` gave; `more` are bytes of activations that were summed elsewhere.

    >>> parts = torch.full((1, len(PARTS)), 2.0**30)
    >>> (belief_of(Factors(8)(torch.zeros(1, 8)), parts).place.exp() / 2**30).round(decimals=1)
    tensor([[2.0000, 2.0000, 2.0000, 2.3000]], grad_fn=<RoundBackward1>)
    """
    count = len(PARTS)
    memory = (functional.softplus(told[..., :count]) * parts).sum(-1)
    if more is not None:
        memory = memory + more
    walked = told[..., -2:-1].exp() * parts[..., WALKS] + told[..., -1:].exp() * parts[..., -1:]
    spread = told[..., count : count + 2].exp() + LEAST_SPREAD
    return Belief(
        torch.cat([walked, memory.unsqueeze(-1)], dim=-1).clamp(min=1.0).log(),
        torch.cat([spread[..., :1].expand(*spread.shape[:-1], len(WALKS)), spread[..., 1:]], dim=-1),
        functional.log_softmax(told[..., count + 2 : count + 2 + len(TRUST)], dim=-1),
    )


class Normal(nn.Module):
    """Totals brought to mean 0 and deviation 1; the statistics are those of the training part alone."""

    mean: torch.Tensor
    deviation: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(len(TOTALS)))
        self.register_buffer("deviation", torch.ones(len(TOTALS)))

    def learn(self, totals: torch.Tensor) -> None:
        """Take the statistics of these rows."""
        self.mean = totals.mean(0)
        deviation = totals.std(0, unbiased=False)
        self.deviation = torch.where(deviation > 1e-6, deviation, torch.ones_like(deviation))

    def forward(self, totals: torch.Tensor) -> torch.Tensor:
        """Values far outside of what was seen are held back: a network says nothing sensible there."""
        return ((totals - self.mean) / self.deviation).clamp(-4, 4)


def perceptron(hidden: Sequence[int]) -> nn.Module:
    """One member of the ensemble: totals to factors.

    >>> perceptron((8, 4))(torch.zeros(1, len(TOTALS))).shape[1] == len(PARTS) + 8
    True
    """
    layers: list[nn.Module] = []
    before = len(TOTALS)
    for width in hidden:
        layers += [nn.Linear(before, width), nn.SiLU()]
        before = width
    return nn.Sequential(*layers, Factors(before))


class WalknetEnsemble(nn.Module):
    """The MLP estimator: members of varied depth and width; the answer is the mean of their scores."""

    def __init__(self, bins: int, width: int, members: Sequence[Sequence[int]] = MEMBERS) -> None:
        super().__init__()
        self.normal, self.bins = Normal(), Bins(bins, width)
        self.members = nn.ModuleList(perceptron(hidden) for hidden in members)

    def belief(self, batch: WalknetBatch) -> Belief:
        """What each member believes [members, jobs, ways]."""
        totals = self.normal(batch.totals)
        return belief_of(torch.stack([member(totals) for member in self.members]), batch.parts)

    def forward(self, batch: WalknetBatch) -> torch.Tensor:
        """Scores [jobs, bins]."""
        return self.bins(self.belief(batch)).mean(0)  # type: ignore[no-any-return]


class WalknetBlock(nn.Module):
    """Attention from layer to layer of one job, and a perceptron."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.after = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mixed, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide, self.narrow = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor, weigh: torch.Tensor) -> torch.Tensor:
        """`weigh` is added to the scores of attention: minus infinity for padding, the logarithm of a count else."""
        jobs, length, width = x.shape
        mixed = self.mixed(self.before(x)).view(jobs, length, 3, self.heads, width // self.heads)
        q, k, v = mixed.permute(2, 0, 3, 1, 4).unbind(0)
        seen = functional.scaled_dot_product_attention(q, k, v, attn_mask=weigh)
        x = x + self.out(seen.transpose(1, 2).reshape(jobs, length, width))
        return x + self.narrow(functional.gelu(self.wide(self.after(x))))  # type: ignore[no-any-return]


class WalknetTransformer(nn.Module):
    """The Transformer estimator: tokens are the layers of one job, beside them its totals.

    Attention runs over the layers, never over the jobs of a batch, and padding is masked: a job's answer does not
    depend on its neighbours.
    """

    def __init__(self, bins: int, width: int, size: int = WIDTH, heads: int = HEADS, layers: int = LAYERS) -> None:
        super().__init__()
        self.normal, self.bins = Normal(), Bins(bins, width)
        self.token, self.total = nn.Linear(TOKEN_FEATURES, size), nn.Linear(len(TOTALS), size)
        self.blocks = nn.ModuleList(WalknetBlock(size, heads) for _ in range(layers))
        self.alive = nn.Linear(size, 1)
        nn.init.zeros_(self.alive.weight)
        nn.init.constant_(self.alive.bias, -5.0)  # what was walked through begins as the whole answer
        self.hidden = nn.Sequential(nn.Linear(2 * size + len(TOTALS), 96), nn.SiLU(), nn.Linear(96, 64), nn.SiLU())
        self.factors = Factors(64)

    def forward(self, batch: WalknetBatch) -> torch.Tensor:
        """Scores [jobs, bins]."""
        return self.bins(self.belief(batch))  # type: ignore[no-any-return]

    def belief(self, batch: WalknetBatch) -> Belief:
        """What the network believes [jobs, ways]."""
        totals = self.normal(batch.totals)
        x = self.token(batch.tokens) + self.total(totals).unsqueeze(1)
        counts = batch.repeats.log().masked_fill(~batch.there, -math.inf)
        weigh = counts[:, None, None, :].expand(-1, 1, x.shape[1], -1)
        for block in self.blocks:
            x = block(x, weigh)
        here = (batch.there * batch.repeats).unsqueeze(2)
        mean = (x * here).sum(1) / here.sum(1)
        most = x.masked_fill(~batch.there.unsqueeze(2), -math.inf).amax(1)
        kept = functional.softplus(self.alive(x)).squeeze(2) * batch.sizes * batch.repeats * batch.there
        hidden = self.hidden(torch.cat([mean, most, totals], dim=1))
        return belief_of(self.factors(hidden), batch.parts, kept.sum(1))


WalkNet = WalknetEnsemble | WalknetTransformer


# A trained walknet as one safetensors file: the weights, and beside them what they were trained on.

__all__ = ["SHIPPED", "ModelCard", "build", "load", "plain_products", "probabilities", "save", "shipped", "trained"]


def build(card: ModelCard) -> WalkNet:
    """A new network of the card's kind, untrained.

    >>> type(build(ModelCard(family="mlp", estimator="mlp", bin=1 << 30, bins=8))).__name__
    'WalknetEnsemble'
    """
    if card.estimator not in ("mlp", "transformer"):
        raise UnknownName("walknet estimator", card.estimator, ["mlp", "transformer"], hint="mlp or transformer")
    return WalknetEnsemble(card.bins, card.bin) if card.estimator == "mlp" else WalknetTransformer(card.bins, card.bin)


def shipped(family: str, estimator: str) -> Path:
    """The file of weights that comes with Ullage.

    >>> shipped("cnn", "mlp").name
    'walknet_cnn_mlp.safetensors'
    """
    return SHIPPED / f"walknet_{family}_{estimator}.safetensors"


def save(network: WalkNet, card: ModelCard, path: Path) -> None:
    """Write weights and card; `load` gives both back."""
    save_network(network, card, _facts(card), path)


def load(path: Path) -> tuple[WalkNet, ModelCard]:
    """The network of a file, ready to answer, and its card."""
    return load_network("walknet", path, build, _facts)


def _facts(card: ModelCard) -> dict[str, Any]:
    return {"totals": len(TOTALS), "parts": len(PARTS), "token": TOKEN_FEATURES}


@functools.cache
def trained(path: Path) -> tuple[WalkNet, ModelCard]:
    """As `load`, once a process."""
    return load(path)
