"""The computation graph of a model: its operators, and the storages that they read and create.

Recorded on a virtual GPU, so that autocast and the choice of kernels are those of a GPU. `dnnmem` walks over the graph
of a forward pass, `dnnperf` reads the graph of a whole training step.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from ullage.allocator import CachingAllocator


@dataclass(frozen=True, slots=True)
class Operator:
    """One operator call. Storages are numbers; sizes are bytes.

    `makes` are new storages, `results` those of all outputs. `ephemeral` is the memory that the call allocates and
    frees. `views` has, for each storage of `reads`, the bytes of the largest tensor read from it and of one of its
    elements.
    """

    name: str
    reads: tuple[int, ...]
    makes: tuple[int, ...]
    ephemeral: int = 0
    views: tuple[tuple[int, int], ...] = ()
    results: tuple[int, ...] = ()
    in_place: bool = False
    backward: bool = False
    flops: int = 0
    kernel: int = 0
    stride: int = 0
    groups: int = 0

    @property
    def new_results(self) -> tuple[int, ...]:
        """Return the outputs that are not views of the operator's inputs."""
        return tuple(number for number in self.results if number not in self.reads)

    @property
    def works(self) -> bool:
        """Whether the operator does more than return a view of its input."""
        return bool(self.results) and (self.in_place or bool(self.new_results))


@dataclass(slots=True)
class ComputationGraph:
    """Operators in the order of their calls; `sizes` in bytes by the number of a storage.

    `live` is the most bytes of made storages alive at once, by the lifetimes of the tensors.
    """

    operators: list[Operator] = field(default_factory=list)
    sizes: dict[int, int] = field(default_factory=dict)
    weights: set[int] = field(default_factory=set)
    trained: set[int] = field(default_factory=set)
    inputs: set[int] = field(default_factory=set)
    floating: set[int] = field(default_factory=set)
    live: int = 0


class GraphRecorder(TorchDispatchMode):
    """Records operator calls while `recording` is set.

    With an `allocator`, it also records the bytes that a call allocates and frees, and keeps storages alive.
    """

    def __init__(self, allocator: CachingAllocator | None = None, recording: bool = True) -> None:
        super().__init__()
        self.graph = ComputationGraph()
        self.recording = recording
        self._allocator = allocator
        self._numbers: dict[int, int] = {}
        self._references: list[StorageWeakRef] = []  # a referenced address is not reused
        self._storages: list[torch.UntypedStorage] = []
        self._alive: dict[int, int] = {}
        self._known: set[int] = set()  # storages that a working operator has read or made
        self._places = 0  # working operators, and the storages that they found there

    def add_weights(self, module: nn.Module) -> None:
        for tensor in [*module.parameters(), *module.buffers()]:
            self.graph.weights.add(self.number(tensor))
        self.graph.trained |= {self.number(weight) for weight in module.parameters() if weight.requires_grad}

    def add_inputs(self, values: Any) -> None:
        self.graph.inputs.update(self.number(tensor) for tensor in _on_gpu(values))

    def number(self, tensor: torch.Tensor) -> int:
        storage = tensor.untyped_storage()
        reference = StorageWeakRef(storage)
        number = self._numbers.get(reference.cdata)
        if number is None:
            number = self._numbers[reference.cdata] = len(self._references)
            self._references.append(reference)
            if self._allocator is not None:
                self._storages.append(storage)
            self.graph.sizes[number] = storage.nbytes()
            if tensor.is_floating_point():
                self.graph.floating.add(number)
        return number

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self.recording:
            return func(*args, **kwargs)
        reads = self._largest_by_storage(_on_gpu((args, kwargs)))
        known, before = len(self._references), 0
        if self._allocator is not None:
            self._allocator.reset_peak_stats()
            before = self._allocator.allocated
        out = func(*args, **kwargs)
        results = tuple(self.number(tensor) for tensor in _on_gpu(out))
        ephemeral = 0
        if self._allocator is not None:
            ephemeral = max(0, self._allocator.peak_allocated - max(before, self._allocator.allocated))
        operator = Operator(
            str(func),
            tuple(reads),
            tuple(dict.fromkeys(number for number in results if number >= known)),
            ephemeral,
            tuple((tensor.numel() * tensor.element_size(), tensor.element_size()) for tensor in reads.values()),
            results,
            func._schema.is_mutable,
            torch._C._current_autograd_node() is not None,
            _flops(func, args, kwargs, out),
            **_hyperparameters(func, args, kwargs),
        )
        self.graph.operators.append(operator)
        if operator.works:
            self._follow_lifetimes(operator)
        return out

    def _largest_by_storage(self, tensors: Iterable[torch.Tensor]) -> dict[int, torch.Tensor]:
        """Return the largest tensor of each storage, in the order of the arguments."""
        largest: dict[int, torch.Tensor] = {}
        for tensor in tensors:
            number = self.number(tensor)
            if number not in largest or tensor.numel() > largest[number].numel():
                largest[number] = tensor
        return largest

    def _follow_lifetimes(self, operator: Operator) -> None:
        """Update the sum of the storages that are live after this call."""
        self._places += 1 + sum(number not in self._known for number in operator.reads)
        self._known.update(operator.reads, operator.results)
        for number in operator.new_results:
            self._alive[number] = self.graph.sizes[number]
        if self._places % 16 == 0 or len(self._alive) < 64:  # looking through all of them costs time
            for number in [number for number in self._alive if self._references[number].expired()]:
                del self._alive[number]
            self.graph.live = max(self.graph.live, sum(self._alive.values()))


def _on_gpu(values: Any) -> list[torch.Tensor]:
    return [value for value in tree_leaves(values) if isinstance(value, torch.Tensor) and value.is_cuda]


def _flops(func: Any, args: Any, kwargs: Any, out: Any) -> int:
    counted = flop_registry.get(func._overloadpacket)
    if counted is None:
        return 0
    try:
        return int(counted(*args, **kwargs, out_val=out))
    except (TypeError, ValueError, AssertionError, AttributeError, IndexError):
        return 0  # PyTorch's formula does not cover this form of the call


def _hyperparameters(func: Any, args: Any, kwargs: Any) -> dict[str, int]:
    """Return the elements of a filter, the product of the strides and the groups, as far as the operator has them."""
    named = {argument.name: value for argument, value in zip(func._schema.arguments, args, strict=False)} | kwargs
    weight, stride, groups = named.get("weight"), named.get("stride"), named.get("groups", 0)
    has_filter = isinstance(weight, torch.Tensor) and weight.dim() > 2
    return {
        "kernel": math.prod(weight.shape[2:]) if has_filter else 0,
        "stride": math.prod(stride) if isinstance(stride, list | tuple) and stride else 0,
        "groups": groups if isinstance(groups, int) else 0,
    }
