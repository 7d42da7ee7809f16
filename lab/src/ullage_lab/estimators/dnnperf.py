"""`dnnperf`: a graph network that reads the computation graph of a training step and predicts memory and step time.

After Gao, Gu, Zhang, Lin and Yang, "Runtime Performance Prediction for Deep Learning Models with Graph Neural Network",
ICSE-SEIP 2023: nodes are operators with hyper-parameters, sizes and FLOPs, edges are tensors with their sizes, and an
attention-based node-edge encoder reads both. The authors published no weights; these were trained on runs that this
project measured (`data/dnnperf.md`), by `ullage lab train dnnperf`.

In every round an edge is encoded again from itself and its two ends; then a node gathers its incoming edges, weighted
by attention. The prediction is a sum over operators: the network predicts the share of an operator's output that is
live at the peak, and the factor of its time on what arithmetic and bandwidth allow.
"""

import functools
import json
import time
from dataclasses import astuple, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._pytree import tree_leaves

from ullage.errors import InvalidValue, UllageError
from ullage.estimation.estimators.answer import answer
from ullage.estimation.estimators.registry import estimator
from ullage.estimation.result import Estimate
from ullage.hardware import GPU
from ullage.hardware import gpu as find_gpu
from ullage.jobs.job import JobRequest
from ullage.jobs.model import Model
from ullage.jobs.training import train
from ullage.sandbox.protocol import error_text
from ullage.units import format_duration
from ullage.virtual import VirtualGPU
from ullage_lab.estimators.graph import ComputationGraph, GraphRecorder

WEIGHTS = Path(__file__).parent / "data" / "dnnperf.safetensors"
MEASURED_ON = "H200"

WIDTH = 24
ROUNDS = 2
# One H200: what the measured step times come from (NVIDIA's data sheet; a launch is a round figure).
FLOPS_A_SECOND = {4: 67e12, 2: 990e12, 1: 990e12, 8: 34e12}
BYTES_A_SECOND = 4.8e12
SECONDS_A_LAUNCH = 5e-6
OUTSIDE_OF_GRAPH = 64 * 2**20  # bytes: libraries' workspaces and the allocator's rounding, before learning

# An operator belongs to the first kind whose word is in its name.
KINDS: dict[str, tuple[str, ...]] = {
    "parameter": (),
    "input": (),
    "convolution": ("convolution",),
    "attention": ("attention",),
    "matrix product": ("addmm", "bmm", "mm", "linear", "dot"),
    "normalization": ("norm", "var_mean"),
    "pooling": ("pool",),
    "softmax": ("softmax", "nll_loss", "cross_entropy"),
    "embedding": ("embedding", "index", "gather", "scatter"),
    "dropout": ("dropout", "bernoulli"),
    "activation": ("relu", "gelu", "silu", "sigmoid", "tanh", "hardswish", "threshold", "elu", "hardtanh"),
    "copy": ("_to_copy", "copy", "clone", "contiguous"),
    "join": ("cat", "stack", "pad", "roll"),
    "reduction": ("sum", "mean", "amax", "max", "min"),
    "fill": ("zeros", "ones", "empty", "full", "fill", "arange", "zero"),
    "other": ("",),
}
NODE_FEATURES = ("inputs", "outputs", "weights", "flops", "saved", "kernel", "stride", "groups", "backward")
EDGE_FEATURES = ("size", "width", "weight", "saved", "backward")
GRAPH_FEATURES = ("parameters", "gradients", "state", "live", "fp32", "amp", "low", "checkpointing", "foreach", "fused")
_KIND_NUMBERS = {kind: number for number, kind in enumerate(KINDS)}


@dataclass
class NodeFeatures:
    """The network's input for one operator call, or for a tensor that existed before; sizes are bytes."""

    kind: int
    inputs: int = 0
    outputs: int = 0
    weights: int = 0
    flops: int = 0
    saved: int = 0
    kernel: int = 0
    stride: int = 0
    groups: int = 0
    backward: bool = False


@dataclass
class StepGraph:
    """The graph of a step, with plain sizes; `tensors_of` scales them."""

    nodes: list[NodeFeatures] = field(default_factory=list)
    edges: list[tuple[int, int, int, int]] = field(default_factory=list)  # from, to, bytes, bytes an element
    parameters: int = 0
    gradients: int = 0
    state: int = 0
    live: int = 0  # the most bytes of activations alive at once, by the lifetimes of the tensors
    precision: str = "fp32"
    checkpointing: bool = False
    foreach: bool = False
    fused: bool = False


def kind_number(name: str) -> int:
    for kind, words in KINDS.items():
        if any(word in name for word in words):
            return _KIND_NUMBERS[kind]
    return _KIND_NUMBERS["other"]


def graph_of(configuration: Model, gpu: str = "H200") -> StepGraph:
    """Return the computation graph of the first training step of a configuration, without a GPU."""
    recorder = _StepRecorder()
    handles = [
        nn.modules.module.register_module_forward_pre_hook(recorder.begin),
        register_optimizer_step_pre_hook(recorder.end),
        register_optimizer_step_post_hook(recorder.measure_state),
    ]
    try:
        with VirtualGPU(find_gpu(gpu), limited=False), recorder:
            train(configuration, 1)
    finally:
        for handle in handles:
            handle.remove()
    graph = step_graph(recorder.graph)
    graph.precision, graph.checkpointing = configuration.precision or "fp32", configuration.checkpointing
    graph.gradients, graph.state = recorder.gradients, recorder.state
    graph.foreach, graph.fused = recorder.foreach, recorder.fused
    return graph


class _StepRecorder(GraphRecorder):
    """Records from the first forward pass to the first optimizer step."""

    def __init__(self) -> None:
        super().__init__(recording=False)
        self.gradients = self.state = 0
        self.foreach = self.fused = False
        self._done = False

    def begin(self, module: nn.Module, inputs: Any) -> None:
        """Record the weights at the first call of the outermost module."""
        if self.recording or self._done:
            return
        self.recording = True
        self.add_weights(module)
        self.gradients = sum(p.numel() * p.element_size() for p in module.parameters() if p.requires_grad)

    def end(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """End the recording at the optimizer's step, when gradients exist and activations are freed."""
        self.recording, self._done = False, True

    def measure_state(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Measure the optimizer's state on the GPU after its first step, and how it iterates over the weights."""
        state = [leaf for leaf in tree_leaves(dict(optimizer.state)) if isinstance(leaf, torch.Tensor) and leaf.is_cuda]
        self.state = sum(tensor.untyped_storage().nbytes() for tensor in state)
        self.fused = bool(optimizer.defaults.get("fused"))
        self.foreach = "foreach" in optimizer.defaults and not self.fused


def step_graph(recorded: ComputationGraph) -> StepGraph:
    """Return operators and existing tensors as nodes, and tensors between them as edges.

    Operators that only return a view of their input are left out: they do no work and allocate no memory.
    """
    graph = StepGraph(parameters=sum(recorded.sizes[weight] for weight in recorded.weights), live=recorded.live)
    producers: dict[int, int] = {}  # by the number of a storage, the place of the node that made it
    for operator in recorded.operators:
        if not operator.works:
            continue
        place = len(graph.nodes) + sum(number not in producers for number in operator.reads)
        node = NodeFeatures(
            kind_number(operator.name),
            outputs=sum(recorded.sizes[number] for number in operator.new_results),
            flops=operator.flops,
            kernel=operator.kernel,
            stride=operator.stride,
            groups=operator.groups,
            backward=operator.backward,
        )
        for number, (size, width) in zip(operator.reads, operator.views, strict=True):
            is_weight = number in recorded.weights
            if number not in producers:
                producers[number] = len(graph.nodes)
                kind = _KIND_NUMBERS["parameter" if is_weight else "input"]
                graph.nodes.append(NodeFeatures(kind, weights=size if is_weight else 0))
            producer = graph.nodes[producers[number]]
            if node.backward and not producer.backward:
                producer.saved = max(producer.saved, size)
            node.inputs += size
            node.weights += size if is_weight else 0
            graph.edges.append((producers[number], place, size, width))
        graph.nodes.append(node)
        producers.update(dict.fromkeys(operator.results, place))
    return graph


@dataclass
class GraphTensors:
    """A graph as input of the network, or several side by side."""

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


def tensors_of(graph: StepGraph) -> GraphTensors:
    """Return the features of a graph: sizes on a logarithmic scale, flags as 0 and 1."""
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
    return GraphTensors(
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


def joined(graphs: list[GraphTensors]) -> GraphTensors:
    """Join several graphs side by side, so that the network reads them at once."""
    starts = torch.tensor([0, *(len(graph.kinds) for graph in graphs)]).cumsum(0).tolist()
    names = ("kinds", "nodes", "edges", "whole", "sizes", "seconds", "fixed", "counts")
    return GraphTensors(
        **{name: torch.cat([getattr(graph, name) for graph in graphs]) for name in names},
        ends=torch.cat([graph.ends + start for graph, start in zip(graphs, starts, strict=False)], dim=1),
        owner=torch.cat([torch.full_like(graph.kinds, place) for place, graph in enumerate(graphs)]),
    )


def folded(graph: GraphTensors, rounds: int = ROUNDS) -> GraphTensors:
    """Merge the nodes that the network cannot tell apart, which changes no prediction.

    After `rounds` rounds of encoding, a node depends only on nodes within as many edges before it. Nodes that agree in
    all of these, as in repeated layers of a transformer, get the same encoding; one with their number is enough.
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
    edges = [place for place, target in enumerate(targets) if first[colours[target]] == target]
    ends = [[row[colours[end[place]]] for place in edges] for end in (sources, targets)]
    counts = torch.zeros(len(first)).index_add(0, torch.tensor([row[colour] for colour in colours]), graph.counts)
    by_node = {name: getattr(graph, name)[chosen] for name in ("kinds", "nodes", "sizes", "seconds", "owner")}
    return replace(graph, **by_node, edges=graph.edges[edges], ends=torch.tensor(ends, dtype=torch.long), counts=counts)


def _numbered(things: list[Any]) -> list[int]:
    numbers: dict[Any, int] = {}
    return [numbers.setdefault(thing, len(numbers)) for thing in things]


class NodeEdgeEncoder(nn.Module):
    """One round of the attention-based node-edge encoder."""

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
        source, target = nodes[ends[0]], nodes[ends[1]]
        together = torch.cat([source, target, edges], dim=1)
        edges = edges + functional.leaky_relu(self.edge(together))
        score = functional.leaky_relu(self.attention(together)).squeeze(1)
        share = _softmax_by_target(score, ends[1], len(nodes))
        sent = share.unsqueeze(1) * self.message(torch.cat([source, edges], dim=1))
        gathered = torch.zeros_like(nodes).index_add(0, ends[1], sent)
        update = functional.leaky_relu(self.node(torch.cat([nodes, gathered], dim=1)))
        return self.norm(nodes + update), edges


class GraphNetwork(nn.Module):
    """Predicts the logarithms of reserved memory (bytes) and step time (seconds) from graphs."""

    def __init__(self, width: int = WIDTH, rounds: int = ROUNDS) -> None:
        super().__init__()
        self.kind = nn.Embedding(len(KINDS), width)
        self.node = nn.Linear(len(NODE_FEATURES), width)
        self.edge = nn.Linear(len(EDGE_FEATURES), width)
        self.whole = nn.Linear(len(GRAPH_FEATURES), width)
        self.rounds = nn.ModuleList(NodeEdgeEncoder(width) for _ in range(rounds))
        self.alive = nn.Linear(width, 1)
        self.slower = nn.Linear(width, 1)
        self.correction = nn.Sequential(nn.Linear(2 * width, width), nn.LeakyReLU(), nn.Linear(width, 2))

    def forward(self, graph: GraphTensors) -> torch.Tensor:
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
    most = score.new_full((count,), -torch.inf).scatter_reduce(0, target, score.detach(), "amax")
    weight = torch.exp(score - most[target])
    return weight / score.new_zeros(count).index_add(0, target, weight)[target].clamp_min(1e-12)


@dataclass(frozen=True)
class StepPrediction:
    """The network's prediction: bytes of reserved memory, seconds per training step."""

    peak_reserved: int
    step_seconds: float


def supports(request: JobRequest) -> str | None:
    """Support training runs of a named model."""
    if request.model is None:
        return "it needs the computation graph of a training step: a model by name"
    return "it was trained on training steps; this is inference" if request.model.inference else None


@functools.cache
def network(path: Path = WEIGHTS) -> tuple[GraphNetwork, dict[str, Any]]:
    """Return the trained network and the facts of its training (data, versions, errors on held-out families)."""
    from safetensors import safe_open

    made = GraphNetwork()
    try:
        with safe_open(path, "pt") as file:
            card = json.loads(file.metadata()["card"])
            made.load_state_dict({name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118
    except (OSError, RuntimeError, KeyError, TypeError) as error:
        raise InvalidValue(f"cannot read the weights of dnnperf in {path}: {error}") from None
    return made.eval(), card


def predict_graph(graph: StepGraph, path: Path = WEIGHTS) -> StepPrediction:
    made, _ = network(path)
    with torch.no_grad():
        memory, seconds = made(folded(tensors_of(graph)))[0].exp().tolist()
    return StepPrediction(int(memory), seconds)


def _graph(configuration: Model) -> StepGraph:
    try:
        graph = graph_of(configuration)
    except UllageError:
        raise
    except Exception as error:
        raise InvalidValue(f"{configuration.name} gave no graph: {error_text(error)}") from error
    if not graph.nodes:
        raise InvalidValue(f"{configuration.name} gave an empty graph: no operator ran between input and loss")
    return graph


@estimator(
    "dnnperf",
    title="a graph network with an attention-based node-edge encoder on the computation graph",
    source="Gao et al.: Runtime Performance Prediction for Deep Learning Models with Graph Neural Network, "
    "ICSE-SEIP 2023; trained here (lab/src/ullage_lab/estimators/data/dnnperf.md)",
    needs="the model by name; no GPU",
    supports=supports,
)
def run(request: JobRequest, gpu: GPU) -> Estimate:
    begin = time.perf_counter()
    assert request.model is not None
    graph = _graph(request.model)
    predicted = predict_graph(graph)
    held_out = network()[1]["held_out"]
    return answer(
        "dnnperf",
        gpu,
        "reserved",
        _parts(graph, predicted.peak_reserved),
        seconds=time.perf_counter() - begin,
        notes=_notes(gpu, predicted, held_out),
    )


def _parts(graph: StepGraph, total: int) -> dict[str, int]:
    """Split a prediction: weights, gradients and optimizer state are counted in the graph, the rest is activations."""
    counted = {"parameters": graph.parameters, "gradients": graph.gradients, "optimizer": graph.state}
    if sum(counted.values()) > total:
        return {"activations": total}  # the prediction is below the count: no split is possible
    return counted | {"activations": total - sum(counted.values())}


def _notes(gpu: GPU, predicted: StepPrediction, held_out: dict[str, float]) -> list[str]:
    notes = [
        "the figure stands for reserved memory, without the CUDA context; it is a trained network's prediction",
        f"on model families that it was not trained on its median error is {held_out['memory_median_error']:.0%} for "
        f"memory and {held_out['time_median_error']:.0%} for step time, over {held_out['runs']:.0f} runs",
        f"step time {format_duration(predicted.step_seconds)} on an {MEASURED_ON}; the step times it learned from were "
        "measured while other processes used the GPU",
    ]
    if gpu.name != MEASURED_ON:
        notes.append(f"trained on an {MEASURED_ON} alone: the figures are those of an {MEASURED_ON}, not of {gpu.name}")
    return notes
