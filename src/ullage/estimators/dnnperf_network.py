"""DNNPerf's graph network: an attention-based encoder of nodes and edges, and a sum over the nodes as its answer.

In every round an edge is encoded anew from itself and its two ends, then a node gathers what arrives over its incoming
edges, weighed by attention. The answer is a sum over operators: the network says which share of an operator's output is
alive at the peak and by how much its time differs from what arithmetic and bandwidth allow.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass

import torch
from torch import nn
from torch.nn import functional

from ullage.estimators.dnnperf_graph import EDGE_FEATURES, GRAPH_FEATURES, KINDS, NODE_FEATURES, Graph

WIDTH = 32
ROUNDS = 3
# One H200: what the measured step times come from (NVIDIA's data sheet; a launch is a round figure).
FLOPS_A_SECOND = {4: 67e12, 2: 990e12, 1: 990e12, 8: 34e12}
BYTES_A_SECOND = 4.8e12
SECONDS_A_LAUNCH = 5e-6
OUTSIDE_OF_GRAPH = 64 * 2**20  # bytes: libraries' workspaces and the allocator's rounding, before learning


@dataclass
class Tensors:
    """A graph as the network takes it."""

    kinds: torch.Tensor  # [nodes]
    nodes: torch.Tensor  # [nodes, NODE_FEATURES]
    edges: torch.Tensor  # [edges, EDGE_FEATURES]
    ends: torch.Tensor  # [2, edges]
    whole: torch.Tensor  # [GRAPH_FEATURES]
    sizes: torch.Tensor  # [nodes] bytes that a node adds
    seconds: torch.Tensor  # [nodes] by arithmetic and bandwidth
    fixed: torch.Tensor  # bytes of weights, gradients and optimizer state


def tensors_of(graph: Graph) -> Tensors:
    """The features of a graph: sizes on a logarithmic scale, flags as 0 and 1.

    >>> from ullage.estimators.dnnperf_graph import Node
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
    fixed = torch.tensor(float(graph.parameters + graph.gradients + graph.state))
    made = [tensor.float() for tensor in (nodes, edges)]
    return Tensors(kinds, *made, ends, whole.float(), rest[:, 1].float(), seconds.float(), fixed)


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
        """Two logarithms: bytes and seconds."""
        whole = self.whole(graph.whole)
        nodes = self.kind(graph.kinds) + self.node(graph.nodes) + whole
        edges = self.edge(graph.edges)
        for encode in self.rounds:
            nodes, edges = encode(nodes, edges, graph.ends)
        alive = torch.sigmoid(self.alive(nodes)).squeeze(1)
        size = graph.fixed + OUTSIDE_OF_GRAPH + (alive * graph.sizes).sum()
        slower = torch.exp(self.slower(nodes).squeeze(1).clamp(-4, 6))
        seconds = (slower * graph.seconds).sum() + SECONDS_A_LAUNCH
        pooled = torch.cat([nodes.mean(dim=0), whole])
        answer: torch.Tensor = torch.stack([size.log(), seconds.log()]) + self.correction(pooled)
        return answer


def _softmax_by_target(score: torch.Tensor, target: torch.Tensor, count: int) -> torch.Tensor:
    """The softmax over the edges that arrive at one node."""
    most = score.new_full((count,), -torch.inf).scatter_reduce(0, target, score.detach(), "amax")
    weight = torch.exp(score - most[target])
    return weight / score.new_zeros(count).index_add(0, target, weight)[target].clamp_min(1e-12)
