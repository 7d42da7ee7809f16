"""`dnnmem`: the computation graph and the framework's allocator, after Gao et al. 2020.

Weights, gradients of weights, optimizer states, inputs and outputs of operators, ephemeral tensors (workspaces),
resident buffers (the CUDA context) and the allocator's rounding and segments. The forward pass goes over the graph in
order, the backward pass against it: an operator's backward makes the gradients of what it read, then the gradient and
the value of what it made are freed. Its code was never published and
the paper's full text was not at hand: this follows its published outline, and details are choices made here.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ullage.allocator import CachingAllocator
from ullage.allocator.blocks import Block
from ullage.errors import InvalidValue, UllageError
from ullage.estimation.estimators.answer import answer
from ullage.estimation.estimators.deepspeed import supports_names
from ullage.estimation.estimators.registry import estimator
from ullage.estimation.estimators.summary import moved
from ullage.estimation.result import Estimate
from ullage.hardware import GPU
from ullage.virtual import VirtualGPU
from ullage.workloads.configuration import Configuration
from ullage.workloads.optimizers import OPTIMIZER_ALIASES
from ullage.workloads.sources.build import prepare
from ullage.workloads.training import autocast_type, low_precision
from ullage.workloads.workload import Workload

# The computation graph of a model's forward pass: operators, the storages they read and make, and their temporaries.
#
# Recorded by one forward pass and the loss on a virtual GPU, without running the backward pass.


@dataclass(frozen=True, slots=True)
class Node:
    """One operator: numbers of the storages that it reads and makes, and the bytes that it takes and gives back."""

    operator: str
    reads: tuple[int, ...]
    makes: tuple[int, ...]
    ephemeral: int


@dataclass(slots=True)
class Graph:
    """Nodes in the order of the forward pass; `sizes` in bytes and `differentiable` by the number of a storage."""

    nodes: list[Node] = field(default_factory=list)
    sizes: dict[int, int] = field(default_factory=dict)
    weights: set[int] = field(default_factory=set)
    trained: set[int] = field(default_factory=set)
    inputs: set[int] = field(default_factory=set)
    floating: set[int] = field(default_factory=set)


class _Recorder(TorchDispatchMode):
    """Numbers storages as they come; it holds them, so that no two get the same address."""

    def __init__(self, graph: Graph, card: VirtualGPU) -> None:
        super().__init__()
        self.graph, self._card = graph, card
        self._numbers: dict[int, int] = {}
        self._held: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        reads = self._of((args, kwargs or {}))
        known = len(self._held)
        allocator = self._card.memory.allocator
        allocator.reset_peak_stats()
        before = allocator.allocated
        out = func(*args, **(kwargs or {}))
        made = tuple(number for number in self._of(out) if number >= known)
        ephemeral = max(0, allocator.peak_allocated - max(before, allocator.allocated))
        self.graph.nodes.append(Node(str(func), reads, made, ephemeral))
        return out

    def number(self, tensor: torch.Tensor) -> int:
        """The number of a tensor's storage."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._numbers:
            self._numbers[key] = len(self._held)
            self._held.append(storage)
            self.graph.sizes[self._numbers[key]] = storage.nbytes()
            if tensor.is_floating_point():
                self.graph.floating.add(self._numbers[key])
        return self._numbers[key]

    def _of(self, values: Any) -> tuple[int, ...]:
        found = (value for value in tree_leaves(values) if isinstance(value, torch.Tensor) and value.is_cuda)
        return tuple(dict.fromkeys(self.number(tensor) for tensor in found))


def record(configuration: Configuration, gpu: GPU) -> Graph:
    """The graph of one forward pass with its loss.

    >>> from ullage.hardware import gpu
    >>> graph = record(Configuration(model="mlp:x", widths=[8, 4], batch_size=2), gpu("T4"))
    >>> sum(graph.sizes[weight] for weight in graph.weights)
    144
    """
    graph = Graph()
    low = low_precision(configuration)
    cast = autocast_type(configuration)
    try:
        with VirtualGPU(gpu, limited=False) as card:
            model, task = prepare(configuration)
            model = (model if low is None else model.to(low)).to("cuda").train()
            inputs, targets = (moved(part) for part in task.batch(configuration.batch_size))
            if low is not None and isinstance(inputs, torch.Tensor) and inputs.is_floating_point():
                inputs = inputs.to(low)
            recorder = _Recorder(graph, card)
            for tensor in [*model.parameters(), *model.buffers()]:
                graph.weights.add(recorder.number(tensor))
            graph.trained |= {recorder.number(weight) for weight in model.parameters() if weight.requires_grad}
            graph.inputs |= set(recorder._of((inputs, targets)))
            with recorder, torch.autocast("cuda", dtype=cast, enabled=cast is not None):
                task.loss(task.forward(model, inputs, targets), targets)
    except (UllageError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        line = next((line for line in str(error).splitlines() if line.strip()), "")
        raise InvalidValue(f"{configuration.model} has no graph: {type(error).__name__}: {line[:200]}") from error
    return graph


WITHOUT_LIMIT = 1 << 46
STEPS = 2  # the optimizer's states come with the first step; the peak is in the second
# Values of the optimizer's state a parameter; an optimizer that is not here counts as Adam.
STATES = {"SGD": 0, "sgd": 0, "sgdm": 1, "rmsprop": 1, "adagrad": 1, "adam": 2, "adamw": 2}


class Walk:
    """A training run over the graph, on the allocator."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.allocator = CachingAllocator(WITHOUT_LIMIT)
        self.peak: dict[str, int] = {}
        self._now = dict.fromkeys(("parameters", "gradients", "optimizer", "activations"), 0)
        self._highest = 0
        self._last_read = {number: place for place, node in enumerate(graph.nodes) for number in node.reads}
        self._needs_gradient = _reached(graph)

    def run(self, states: int, training: bool = True) -> None:
        """Weights, then some steps; `states` is the number of the optimizer's values a parameter."""
        graph = self.graph
        for number in sorted(graph.weights):
            self._take(number, "parameters")
        for step in range(STEPS if training else 1):
            values = {number: self._take(number, "activations") for number in sorted(graph.inputs)}
            self._forward(values, training)
            gradients = self._backward(values) if training else {}
            if step == 0 and training:
                for number in sorted(graph.trained):
                    for _ in range(states):
                        self._take(number, "optimizer")
            for number, block in gradients.items():
                self._give(number, block, "gradients")
            for number, block in values.items():
                self._give(number, block, "activations")

    def _forward(self, values: dict[int, Block], training: bool) -> None:
        for place, node in enumerate(self.graph.nodes):
            for number in node.makes:
                values[number] = self._take(number, "activations")
            self._pass_through(node.ephemeral)
            done = [] if training else [n for n in node.reads if self._last_read[n] == place and n in values]
            for number in done:
                self._give(number, values.pop(number), "activations")

    def _backward(self, values: dict[int, Block]) -> dict[int, Block]:
        gradients: dict[int, Block] = {}  # of values between the operators
        of_weights: dict[int, Block] = {}
        for node in reversed(self.graph.nodes):
            if any(number in self._needs_gradient for number in node.makes):
                self._node_backward(node, gradients, of_weights)
            for number in node.makes:
                if number in gradients:
                    self._give(number, gradients.pop(number), "activations")
                if number in values:
                    self._give(number, values.pop(number), "activations")
        for number, block in gradients.items():
            self._give(number, block, "activations")
        return of_weights

    def _node_backward(self, node: Node, gradients: dict[int, Block], of_weights: dict[int, Block]) -> None:
        self._pass_through(node.ephemeral)
        for number in node.reads:
            if number not in self._needs_gradient:
                continue
            trained = number in self.graph.trained
            held = of_weights if trained else gradients
            if number in held:
                self._pass_through(self.graph.sizes[number])  # a second gradient, added to the first
            else:
                held[number] = self._take(number, "gradients" if trained else "activations")

    def _take(self, number: int, kind: str) -> Block:
        block = self.allocator.malloc(self.graph.sizes[number])
        self._now[kind] += block.size
        if self.allocator.allocated > self._highest:
            self._highest, self.peak = self.allocator.allocated, dict(self._now)
        return block

    def _give(self, number: int, block: Block, kind: str) -> None:
        self._now[kind] -= block.size
        if block.size:
            self.allocator.free(block)

    def _pass_through(self, size: int) -> None:
        """An ephemeral tensor."""
        if size:
            block = self.allocator.malloc(size)
            if self.allocator.allocated > self._highest:
                self._highest = self.allocator.allocated
                self.peak = self._now | {"activations": self._now["activations"] + block.size}
            self.allocator.free(block)


def _reached(graph: Graph) -> set[int]:
    """Storages that a trained weight has a part in: those have gradients."""
    reached = set(graph.trained)
    for node in graph.nodes:
        if any(number in reached for number in node.reads):
            reached.update(number for number in node.makes if number in graph.floating)
    return reached


def states_of(optimizer: str) -> int:
    """How many values an optimizer keeps a parameter.

    >>> states_of("adamw_fused"), states_of("momentum")
    (2, 1)
    """
    name = OPTIMIZER_ALIASES.get(optimizer, optimizer)
    for form in ("_fused", "_foreach", "_single"):
        name = name.removesuffix(form)
    return STATES.get(name, STATES.get(name.casefold(), 2))


@estimator(
    "dnnmem",
    title="the computation graph on the caching allocator",
    source="Gao et al., Estimating GPU Memory Consumption of Deep Learning Models, ESEC/FSE 2020",
    needs="the model's computation graph",
    supports=supports_names,
)
def run(workload: Workload, gpu: GPU) -> Estimate:
    """The estimate over the graph; the figure is the process's memory, or reserved memory if the context is unknown."""
    begin = time.perf_counter()
    assert workload.configuration is not None
    configuration = workload.configuration
    walk = Walk(record(configuration, gpu))
    walk.run(states_of(configuration.optimizer), training=not configuration.inference)
    reserved = walk.allocator.peak_reserved
    parts = {name: size for name, size in walk.peak.items() if size}
    parts["fragmentation"] = reserved - sum(parts.values())
    known: dict[str, int | None] = {"peak_allocated": walk.allocator.peak_allocated, "peak_reserved": reserved}
    notes = [
        "every value of the forward pass is kept until its operator's backward pass, also where PyTorch keeps less",
        "workspaces of the forward pass follow this project's rules for cuDNN; those of the backward pass count alike",
    ]
    if gpu.context is None:
        notes.append(f"the context of {gpu.name} is not known: the figure is reserved memory")
    else:
        parts["context"] = gpu.context
    kind = "reserved" if gpu.context is None else "process"
    return answer("dnnmem", gpu, kind, parts, seconds=time.perf_counter() - begin, notes=notes, known=known)
