"""A graph network: messages along edges gathered with index_add and scatter, a read-out over graphs."""

import argparse

import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=256, help="graphs in a batch")
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--width", type=int, default=256)
args = parser.parse_args()
device, NODES, EDGES = "cuda", 60, 400


class Convolution(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.message = nn.Sequential(nn.Linear(2 * width, width), nn.ReLU(), nn.Linear(width, width))
        self.update = nn.GRUCell(width, width)

    def forward(self, nodes, edges):
        source, target = edges
        messages = self.message(torch.cat([nodes[source], nodes[target]], dim=1))
        total = torch.zeros_like(nodes).index_add(0, target, messages)
        degree = torch.zeros(len(nodes), device=nodes.device).scatter_add_(0, target, torch.ones_like(target).float())
        return self.update(total / degree.clamp(min=1)[:, None], nodes)


class Network(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.enter = nn.Embedding(100, width)
        self.layers = nn.ModuleList(Convolution(width) for _ in range(4))
        self.leave = nn.Linear(width, 1)

    def forward(self, kinds, edges, graph, graphs):
        nodes = self.enter(kinds)
        for layer in self.layers:
            nodes = layer(nodes, edges)
        pooled = torch.zeros(graphs, nodes.shape[1], device=nodes.device)
        pooled = pooled.scatter_reduce(0, graph[:, None].expand_as(nodes), nodes, reduce="mean", include_self=False)
        return self.leave(pooled).squeeze(1)


model = Network(args.width).to(device)
optimizer = torch.optim.Adamax(model.parameters(), lr=1e-3)
for step in range(args.steps):
    count = args.batch_size * NODES
    kinds = torch.randint(0, 100, (count,), device=device)
    offsets = torch.arange(args.batch_size, device=device).repeat_interleave(EDGES) * NODES
    edges = torch.randint(0, NODES, (2, args.batch_size * EDGES), device=device) + offsets
    graph = torch.arange(args.batch_size, device=device).repeat_interleave(NODES)
    loss = nn.functional.smooth_l1_loss(
        model(kinds, edges, graph, args.batch_size), torch.randn(args.batch_size, device=device)
    )
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 5 == 0:
        print(f"step {step} loss {loss.item():.4f}")

print("max_memory_reserved", torch.cuda.max_memory_reserved())
