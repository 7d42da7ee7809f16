"""The computation graph of one training step, as DNNPerf sees a job: operators are nodes, tensors are edges.

The step runs on a virtual GPU, so that autocast and the choice of attention kernels are those of a GPU. Operators that
only give a view of their input are left out: they do no work and take no memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from ullage.virtual import VirtualGPU
from ullage.workloads.configuration import Configuration

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
class Node:
    """One operator call; sizes are bytes."""

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
class Graph:
    """The graph of a step, with plain sizes; `dnnperf_network` scales them.

    >>> graph = graph_of(Configuration(model="mlp:x", widths=[8, 16, 4], batch_size=2, optimizer="sgd"))
    >>> graph.parameters, len(graph.nodes) > 4, len(graph.edges) > 4
    (848, True, True)
    """

    nodes: list[Node] = field(default_factory=list)
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
    """The kind of an operator by its name.

    >>> list(KINDS)[kind_number("aten.convolution_backward.default")]
    'convolution'
    """
    for kind, words in KINDS.items():
        if any(word in name for word in words):
            return _KIND_NUMBERS[kind]
    return _KIND_NUMBERS["other"]


def graph_of(configuration: Configuration, gpu: str = "H200") -> Graph:
    """The computation graph of the first training step of a configuration, found without a GPU."""
    from ullage.workloads.training import train

    return graph_of_function(lambda: train(configuration, 1), configuration, gpu)


def graph_of_function(function: Callable[[], Any], configuration: Configuration, gpu: str) -> Graph:
    """The graph of what a function trains, until its first optimizer step."""
    from ullage.hardware import gpu as find_gpu

    graph = Graph(precision=configuration.precision, checkpointing=configuration.checkpointing)
    recorder = _Recorder(graph)
    handles = [
        nn.modules.module.register_module_forward_pre_hook(recorder.begin),
        register_optimizer_step_pre_hook(recorder.end),
        register_optimizer_step_post_hook(recorder.measure_state),
    ]
    try:
        with VirtualGPU(find_gpu(gpu), limited=False), recorder:
            function()
    finally:
        for handle in handles:
            handle.remove()
    return graph


class _Recorder(TorchDispatchMode):
    """Watches operator calls from the first forward pass to the first optimizer step."""

    def __init__(self, graph: Graph) -> None:
        super().__init__()
        self.graph = graph
        self.recording = False
        self.done = False
        self.weights: set[int] = set()
        self.producers: dict[int, int] = {}
        self.references: dict[int, StorageWeakRef] = {}  # held, so that no address is used twice
        self.alive: dict[int, int] = {}

    def begin(self, module: nn.Module, inputs: Any) -> None:
        """The outermost module is called for the first time: what it owns are the weights."""
        if self.recording or self.done:
            return
        self.recording = True
        for tensor in [*module.parameters(), *module.buffers()]:
            key = self._key(tensor)
            if key not in self.weights:
                self.weights.add(key)
                self.graph.parameters += tensor.untyped_storage().nbytes()
        self.graph.gradients = sum(p.numel() * p.element_size() for p in module.parameters() if p.requires_grad)

    def end(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """The step begins: gradients are there, activations are gone."""
        self.recording, self.done = False, True

    def measure_state(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """What the optimizer keeps on the GPU after its first step, and how it works through the weights."""
        kept = [leaf for leaf in tree_leaves(dict(optimizer.state)) if isinstance(leaf, torch.Tensor) and leaf.is_cuda]
        self.graph.state = sum(tensor.untyped_storage().nbytes() for tensor in kept)
        self.graph.fused = bool(optimizer.defaults.get("fused"))
        self.graph.foreach = "foreach" in optimizer.defaults and not self.graph.fused

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if self.recording:
            self._record(func, args, kwargs or {}, out)
        return out

    def _record(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        before = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor) and leaf.is_cuda]
        after = [leaf for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor) and leaf.is_cuda]
        known = {self._key(tensor) for tensor in before}
        made = [tensor for tensor in after if self._key(tensor) not in known]
        in_place = func._schema.is_mutable
        if not after or (not made and not in_place):
            return
        node = Node(kind_number(str(func)), backward=torch._C._current_autograd_node() is not None)
        node.outputs = sum(tensor.untyped_storage().nbytes() for tensor in made)
        _read_hyperparameters(node, func, args, kwargs, out)
        number = len(self.graph.nodes) + sum(
            self._key(tensor) not in self.producers for tensor in _unique(before, self)
        )
        for tensor in _unique(before, self):
            self._link(tensor, node, number)
        self.graph.nodes.append(node)
        for tensor in after:
            self.producers[self._key(tensor)] = number
        self._follow_lifetimes(made)

    def _link(self, tensor: torch.Tensor, node: Node, number: int) -> None:
        key = self._key(tensor)
        size = tensor.numel() * tensor.element_size()
        is_weight = key in self.weights
        if key not in self.producers:
            self.producers[key] = len(self.graph.nodes)
            kind = "parameter" if is_weight else "input"
            self.graph.nodes.append(Node(_KIND_NUMBERS[kind], weights=size if is_weight else 0))
        producer = self.graph.nodes[self.producers[key]]
        if node.backward and not producer.backward:
            producer.saved = max(producer.saved, size)
        node.inputs += size
        node.weights += size if is_weight else 0
        self.graph.edges.append((self.producers[key], number, size, tensor.element_size()))

    def _follow_lifetimes(self, made: list[torch.Tensor]) -> None:
        """The sum of the storages alive after this call."""
        for tensor in made:
            self.alive[self._key(tensor)] = tensor.untyped_storage().nbytes()
        if len(self.graph.nodes) % 16 == 0 or len(self.alive) < 64:  # looking through all of them costs time
            gone = [key for key in self.alive if self.references[key].expired()]
            for key in gone:
                del self.alive[key]
            self.graph.live = max(self.graph.live, sum(self.alive.values()))

    def _key(self, tensor: torch.Tensor) -> int:
        reference = StorageWeakRef(tensor.untyped_storage())
        key: int = reference.cdata
        self.references.setdefault(key, reference)
        return key


def _unique(tensors: list[torch.Tensor], recorder: _Recorder) -> list[torch.Tensor]:
    """One tensor a storage, the largest, in the order of the arguments."""
    largest: dict[int, torch.Tensor] = {}
    for tensor in tensors:
        key = recorder._key(tensor)
        if key not in largest or tensor.numel() > largest[key].numel():
            largest[key] = tensor
    return list(largest.values())


def _read_hyperparameters(node: Node, func: Any, args: Any, kwargs: Any, out: Any) -> None:
    counted = flop_registry.get(func._overloadpacket)
    if counted is not None:
        try:
            node.flops = int(counted(*args, **kwargs, out_val=out))
        except (TypeError, ValueError, AssertionError, AttributeError, IndexError):
            node.flops = 0  # PyTorch's formula does not cover this form of the call
    named = {argument.name: value for argument, value in zip(func._schema.arguments, args, strict=False)} | kwargs
    weight = named.get("weight")
    if isinstance(weight, torch.Tensor) and weight.dim() > 2:
        node.kernel = math.prod(weight.shape[2:])
    stride = named.get("stride")
    node.stride = math.prod(stride) if isinstance(stride, list | tuple) and stride else 0
    groups = named.get("groups", 0)
    node.groups = groups if isinstance(groups, int) else 0
