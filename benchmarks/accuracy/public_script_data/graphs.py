"""Graphs of citations, molecules, and small graphs."""

import pickle
from pathlib import Path

import numpy as np

from .maker import Maker

CORA_PLACES = ["pytorch+examples/gat/cora", "tkipf+pygcn/data/cora", "Diego999+pyGAT/data/cora"]


def graphs(maker: Maker) -> None:
    """A citation graph as large as Cora in two forms, and 188 molecules as in MUTAG."""
    import scipy.sparse

    nodes, features, classes = 2708, 1433, 7
    values = (maker.random.random((nodes, features)) < 0.0127).astype(np.int32)
    values[np.arange(nodes), maker.random.integers(0, features, nodes)] = 1
    label = maker.random.integers(0, classes, nodes)
    edges = maker.random.integers(0, nodes, (5429, 2))
    edges = edges[edges[:, 0] != edges[:, 1]]
    rows = ("\t".join([str(1000 + i), *map(str, values[i]), f"Class_{label[i]}"]) for i in range(nodes))
    content, cites = "\n".join(rows) + "\n", "\n".join(f"{1000 + a}\t{1000 + b}" for a, b in edges) + "\n"
    for place in CORA_PLACES:
        maker.write(maker.src / place / "cora.content", content)
        maker.write(maker.src / place / "cora.cites", cites)
    x, y = scipy.sparse.csr_matrix(values.astype(np.float32)), np.eye(classes, dtype=np.int32)[label]
    graph: dict[int, list[int]] = {node: [] for node in range(nodes)}
    for a, b in edges.tolist():
        graph[a].append(b)
        graph[b].append(a)
    raws = [maker.src / f"pyg-team+pytorch_geometric/data/{name}/Cora/raw" for name in ("Planetoid", "Cora")]
    parts = {
        "x": x[:140],
        "y": y[:140],
        "tx": x[1708:],
        "ty": y[1708:],
        "allx": x[:1708],
        "ally": y[:1708],
        "graph": graph,
    }
    for raw in raws:
        for name, part in parts.items():
            maker.write(raw / f"ind.cora.{name}", pickle.dumps(part, protocol=2))
        maker.write(raw / "ind.cora.test.index", "\n".join(map(str, range(1708, 2708))) + "\n")
    molecules(maker, maker.src / "pyg-team+pytorch_geometric/data/TU/MUTAG/raw")


def molecules(maker: Maker, raw: Path) -> None:
    """Rings with chords, with labels for graphs, nodes and edges."""
    sizes = [int(size) for size in maker.random.integers(10, 29, 188)]
    edges, first = [], 1
    for size in sizes:
        for a in range(size):
            for b in ((a + 1) % size, (a + 2) % size):
                edges += [(first + a, first + b), (first + b, first + a)]
        first += size
    columns = {
        "A": [f"{a}, {b}" for a, b in edges],
        "edge_labels": maker.random.integers(0, 4, len(edges)),
        "graph_indicator": [i + 1 for i, size in enumerate(sizes) for _ in range(size)],
        "graph_labels": [2 * (i % 2) - 1 for i in range(len(sizes))],
        "node_labels": maker.random.integers(0, 7, sum(sizes)),
    }
    for name, column in columns.items():
        maker.write(raw / f"MUTAG_{name}.txt", "\n".join(map(str, column)) + "\n")


def small_graphs(maker: Maker) -> None:
    """188 graphs in the form of the paper on how powerful graph networks are."""
    graphs = ["188"]
    for index in range(188):
        nodes = int(maker.random.integers(10, 29))
        graphs.append(f"{nodes} {index % 2}")
        graphs.extend(f"{n % 7} 2 {(n - 1) % nodes} {(n + 1) % nodes}" for n in range(nodes))
    maker.write(maker.src / "weihua916+powerful-gnns/dataset/MUTAG/MUTAG.txt", "\n".join(graphs) + "\n")
