"""DNNPerf's graph network: an attention-based encoder of nodes and edges, and a sum over the nodes as its answer.

In every round an edge is encoded anew from itself and its two ends, then a node gathers what arrives over its incoming
edges, weighed by attention. The answer is a sum over operators: the network says which share of an operator's output is
alive at the peak and by how much its time differs from what arithmetic and bandwidth allow.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from ullage.estimation.estimators.dnnperf.graph import EDGE_FEATURES, GRAPH_FEATURES, KINDS, NODE_FEATURES, Graph

WIDTH = 24
ROUNDS = 2
# One H200: what the measured step times come from (NVIDIA's data sheet; a launch is a round figure).
FLOPS_A_SECOND = {4: 67e12, 2: 990e12, 1: 990e12, 8: 34e12}
BYTES_A_SECOND = 4.8e12
SECONDS_A_LAUNCH = 5e-6
OUTSIDE_OF_GRAPH = 64 * 2**20  # bytes: libraries' workspaces and the allocator's rounding, before learning


@dataclass
class Tensors:
    """A graph as the network takes it, or several side by side."""

    kinds: torch.Tensor  # [nodes]
    nodes: torch.Tensor  # [nodes, NODE_FEATURES]
    edges: torch.Tensor  # [edges, EDGE_FEATURES]
    ends: torch.Tensor  # [2, edges]
    whole: torch.Tensor  # [graphs, GRAPH_FEATURES]
    sizes: torch.Tensor  # [nodes] bytes that a node adds
    seconds: torch.Tensor  # [nodes] by arithmetic and bandwidth
    fixed: torch.Tensor  # [graphs] bytes of weights, gradients and optimizer state
    counts: torch.Tensor  # [nodes] how many operators of the job a node stands for
    owner: torch.Tensor  # [nodes] the graph that a node belongs to


def tensors_of(graph: Graph) -> Tensors:
    """The features of a graph: sizes on a logarithmic scale, flags as 0 and 1.

    >>> from ullage.estimation.estimators.dnnperf.graph import Node
    >>> tensors_of(Graph(nodes=[Node(0), Node(2, outputs=1024)], edges=[(0, 1, 512, 4)])).nodes.shape
    torch.Size([2, 9])
    """
    raw = torch.tensor([astuple(node) for node in graph.nodes], dtype=torch.float64)
    kinds, rest = raw[:, 0].long(), raw[:, 1:]
    nodes = torch.log1p(rest) / 10
    nodes[:, -1] = rest[:, -1]
    links = torch.tensor(graph.edges or [(0, 0, 0, 4)], dtype=torch.float64)
    ends, size, width = links[:, :2].long().T, links[:, 2], links[:, 3]
    backward = rest[:, -1][ends]
    weight = (kinds[ends[0]] == 0).double()
    edges = torch.stack([torch.log1p(size) / 10, width / 4, weight, backward[1] - backward[0], backward[1]], dim=1)
    widths = torch.full((len(nodes),), 4.0, dtype=torch.float64).scatter_(0, ends[1], width)
    speed = torch.tensor([FLOPS_A_SECOND.get(int(value), 67e12) for value in widths], dtype=torch.float64)
    works = (kinds > 1).double()
    seconds = works * (rest[:, 3] / speed + (rest[:, 0] + rest[:, 1]) / BYTES_A_SECOND + SECONDS_A_LAUNCH)
    totals = [graph.parameters, graph.gradients, graph.state, graph.live]
    precision = [graph.precision in ("fp32", "tf32"), graph.precision.startswith("amp"), graph.precision.endswith("16")]
    flags = [*precision, graph.checkpointing, graph.foreach, graph.fused]
    whole = torch.cat([torch.log1p(torch.tensor(totals, dtype=torch.float64)) / 10, torch.tensor(flags).double()])
    fixed = torch.tensor([float(graph.parameters + graph.gradients + graph.state)])
    return Tensors(
        kinds=kinds,
        nodes=nodes.float(),
        edges=edges.float(),
        ends=ends,
        whole=whole.float().unsqueeze(0),
        sizes=rest[:, 1].float(),
        seconds=seconds.float(),
        fixed=fixed,
        counts=torch.ones(len(kinds)),
        owner=torch.zeros_like(kinds),
    )


def joined(graphs: list[Tensors]) -> Tensors:
    """Several graphs side by side: the network reads them at once."""
    starts = torch.tensor([0, *(len(graph.kinds) for graph in graphs)]).cumsum(0).tolist()
    names = ("kinds", "nodes", "edges", "whole", "sizes", "seconds", "fixed", "counts")
    return Tensors(
        **{name: torch.cat([getattr(graph, name) for graph in graphs]) for name in names},
        ends=torch.cat([graph.ends + start for graph, start in zip(graphs, starts, strict=False)], dim=1),
        owner=torch.cat([torch.full_like(graph.kinds, place) for place, graph in enumerate(graphs)]),
    )


def folded(graph: Tensors, rounds: int = ROUNDS) -> Tensors:
    """The same graph with one node for all those that the network cannot tell apart, which changes no answer.

    After `rounds` rounds of encoding a node knows only what is within as many edges before it. Nodes that agree in all
    of that, as in the repeated layers of a transformer, get the same encoding; one is enough, with their number.
    """
    described = torch.cat([graph.kinds.unsqueeze(1), graph.nodes, graph.sizes.unsqueeze(1)], dim=1)
    colours = _numbered([tuple(row) for row in described.tolist()])
    edge_colours = _numbered([tuple(row) for row in graph.edges.tolist()])
    sources, targets = graph.ends.tolist()
    for _ in range(rounds):
        arriving: list[list[tuple[int, int]]] = [[] for _ in colours]
        for source, target, colour in zip(sources, targets, edge_colours, strict=True):
            arriving[target].append((colours[source], colour))
        colours = _numbered([(colour, tuple(sorted(seen))) for colour, seen in zip(colours, arriving, strict=True)])
    first: dict[int, int] = {}
    for place, colour in enumerate(colours):
        first.setdefault(colour, place)
    chosen = torch.tensor(list(first.values()))
    row = {colour: number for number, colour in enumerate(first)}
    kept = [place for place, target in enumerate(targets) if first[colours[target]] == target]
    ends = [[row[colours[end[place]]] for place in kept] for end in (sources, targets)]
    counts = torch.zeros(len(first)).index_add(0, torch.tensor([row[colour] for colour in colours]), graph.counts)
    by_node = {name: getattr(graph, name)[chosen] for name in ("kinds", "nodes", "sizes", "seconds", "owner")}
    return replace(graph, **by_node, edges=graph.edges[kept], ends=torch.tensor(ends, dtype=torch.long), counts=counts)


def _numbered(things: list[Any]) -> list[int]:
    """A number for every different thing, in the order of their appearance."""
    numbers: dict[Any, int] = {}
    return [numbers.setdefault(thing, len(numbers)) for thing in things]


class Encoder(nn.Module):
    """One round of the attention-based node-edge encoder.

    >>> nodes, edges = Encoder(8)(torch.zeros(3, 8), torch.zeros(2, 8), torch.tensor([[0, 1], [1, 2]]))
    >>> nodes.shape, edges.shape
    (torch.Size([3, 8]), torch.Size([2, 8]))
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.edge = nn.Linear(3 * width, width)
        self.attention = nn.Linear(3 * width, 1)
        self.message = nn.Linear(2 * width, width)
        self.node = nn.Linear(2 * width, width)
        self.norm = nn.LayerNorm(width)

    def forward(
        self, nodes: torch.Tensor, edges: torch.Tensor, ends: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Nodes and edges encoded anew."""
        source, target = nodes[ends[0]], nodes[ends[1]]
        together = torch.cat([source, target, edges], dim=1)
        edges = edges + functional.leaky_relu(self.edge(together))
        score = functional.leaky_relu(self.attention(together)).squeeze(1)
        share = _softmax_by_target(score, ends[1], len(nodes))
        sent = share.unsqueeze(1) * self.message(torch.cat([source, edges], dim=1))
        gathered = torch.zeros_like(nodes).index_add(0, ends[1], sent)
        update = functional.leaky_relu(self.node(torch.cat([nodes, gathered], dim=1)))
        return self.norm(nodes + update), edges


class Network(nn.Module):
    """From graphs to the logarithms of reserved memory (bytes) and step time (seconds)."""

    def __init__(self, width: int = WIDTH, rounds: int = ROUNDS) -> None:
        super().__init__()
        self.kind = nn.Embedding(len(KINDS), width)
        self.node = nn.Linear(len(NODE_FEATURES), width)
        self.edge = nn.Linear(len(EDGE_FEATURES), width)
        self.whole = nn.Linear(len(GRAPH_FEATURES), width)
        self.rounds = nn.ModuleList(Encoder(width) for _ in range(rounds))
        self.alive = nn.Linear(width, 1)
        self.slower = nn.Linear(width, 1)
        self.correction = nn.Sequential(nn.Linear(2 * width, width), nn.LeakyReLU(), nn.Linear(width, 2))

    def forward(self, graph: Tensors) -> torch.Tensor:
        """Two logarithms a graph: bytes and seconds."""
        whole, owner = self.whole(graph.whole), graph.owner
        nodes = self.kind(graph.kinds) + self.node(graph.nodes) + whole[owner]
        edges = self.edge(graph.edges)
        for encode in self.rounds:
            nodes, edges = encode(nodes, edges, graph.ends)
        alive = torch.sigmoid(self.alive(nodes)).squeeze(1) * graph.counts
        size = (graph.fixed + OUTSIDE_OF_GRAPH).index_add(0, owner, alive * graph.sizes)
        slower = torch.exp(self.slower(nodes).squeeze(1).clamp(-4, 6)) * graph.counts
        seconds = torch.full_like(size, SECONDS_A_LAUNCH).index_add(0, owner, slower * graph.seconds)
        operators = torch.zeros_like(size).index_add(0, owner, graph.counts)
        summed = torch.zeros_like(whole).index_add(0, owner, nodes * graph.counts.unsqueeze(1))
        pooled = torch.cat([summed / operators.unsqueeze(1), whole], dim=1)
        answer: torch.Tensor = torch.stack([size.log(), seconds.log()], dim=1) + self.correction(pooled)
        return answer


def _softmax_by_target(score: torch.Tensor, target: torch.Tensor, count: int) -> torch.Tensor:
    """The softmax over the edges that arrive at one node."""
    most = score.new_full((count,), -torch.inf).scatter_reduce(0, target, score.detach(), "amax")
    weight = torch.exp(score - most[target])
    return weight / score.new_zeros(count).index_add(0, target, weight)[target].clamp_min(1e-12)
