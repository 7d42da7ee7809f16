"""The computation graph of a model's forward pass: operators, the storages they read and make, and their temporaries.

Recorded by one forward pass and the loss on a virtual GPU, without running the backward pass.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ullage.errors import InvalidValue, UllageError
from ullage.estimators.summary import moved
from ullage.gpus import GPU
from ullage.virtual import VirtualGPU
from ullage.workload.building import prepare
from ullage.workload.configuration import Configuration


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

    >>> from ullage.gpus import gpu
    >>> graph = record(Configuration(model="mlp:x", widths=[8, 4], batch=2), gpu("T4"))
    >>> sum(graph.sizes[weight] for weight in graph.weights)
    144
    """
    graph = Graph()
    low = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(configuration.precision)
    cast = {"amp_bf16": torch.bfloat16, "amp_fp16": torch.float16}.get(configuration.precision)
    try:
        with VirtualGPU(gpu, limited=False) as card:
            model, task = prepare(configuration)
            model = (model if low is None else model.to(low)).to("cuda").train()
            inputs, targets = (moved(part) for part in task.batch(configuration.batch))
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
