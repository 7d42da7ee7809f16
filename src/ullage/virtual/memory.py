"""The virtual GPU's memory: tensors whose storages are blocks of the allocator, and what happened to each.

A block lives as long as the storage behind its tensor. PyTorch keeps the Python side of a storage alive as long as
the storage itself, so a weak reference to it tells the moment of the free, in whichever thread it happens.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any

import torch

from ullage.allocator import Block, CachingAllocator, OutOfMemory
from ullage.units import format_bytes
from ullage.virtual.native import tensor_without_data

ACTIVATIONS, PARAMETERS, GRADIENTS, OPTIMIZER, WORKSPACE = range(5)
KINDS = ("activations", "parameters", "gradients", "optimizer", "workspace")

_storage_of = torch._C.TensorBase.untyped_storage  # type: ignore[attr-defined]


class Span:
    """One allocation: when it began and ended (in allocator calls), its rounded size and what it was for."""

    __slots__ = ("begin", "end", "kind", "size")

    def __init__(self, begin: int, size: int, kind: int) -> None:
        self.begin, self.end, self.size, self.kind = begin, -1, size, kind


class _Watch(weakref.ref):  # type: ignore[type-arg]
    """A weak reference to a storage that knows the block behind it."""

    __slots__ = ("block", "key", "span", "writes")
    block: Block
    key: int
    span: Span
    writes: int


class DeviceMemory:
    """Tensors and workspaces over one caching allocator.

    >>> memory = DeviceMemory(CachingAllocator(1 << 30))
    >>> tensor = memory.tensor((2, 3), (3, 1), torch.float32, 24)
    >>> memory.allocator.allocated
    512
    """

    def __init__(self, allocator: CachingAllocator, context: int = 0, total: int = 0) -> None:
        self.allocator = allocator
        self.context, self.total = context, total
        self.stream = 0
        self.kind = ACTIVATIONS
        self.spans: list[Span] = []
        self.clock = 0
        self.peak_clock = 0
        self.timeline: list[tuple[int, int, int]] = []
        self.closed = False
        self._watches: dict[int, _Watch] = {}
        self._lock = threading.RLock()
        self._peak = -1

    def tensor(self, size: Any, stride: Any, dtype: torch.dtype, nbytes: int) -> torch.Tensor:
        """A new tensor; `torch.OutOfMemoryError` where the card is full."""
        tensor = tensor_without_data(size, stride, dtype)
        if nbytes:
            block, span = self._take(nbytes, self.kind)
            storage = _storage_of(tensor)
            watch = _Watch(storage, self._storage_died)
            watch.block, watch.span, watch.key, watch.writes = block, span, id(watch), 0
            self._watches[watch.key] = watch
            storage.ullage = watch
        return tensor

    def take(self, nbytes: int, kind: int | None = None) -> tuple[Block, Span]:
        """A bare block, to be given back with `give_back`: a temporary or a library's workspace."""
        return self._take(nbytes, self.kind if kind is None else kind)

    def give_back(self, taken: tuple[Block, Span]) -> None:
        """Free a bare block."""
        with self._lock:
            self.allocator.free(taken[0])
            self.clock += 1
            taken[1].end = self.clock

    def span_of(self, tensor: torch.Tensor) -> Span | None:
        """What is known of the memory behind a tensor; `None` for one that is not on this GPU."""
        watch = getattr(_storage_of(tensor), "ullage", None)
        return watch.span if watch is not None else None

    def address_of(self, tensor: torch.Tensor) -> int:
        """The address of a tensor's storage on the virtual card; 0 for one without elements."""
        watch = getattr(_storage_of(tensor), "ullage", None)
        return watch.block.address if watch is not None else 0

    def written(self, tensor: torch.Tensor) -> None:
        """Something wrote to a tensor's memory."""
        watch = getattr(_storage_of(tensor), "ullage", None)
        if watch is not None:
            watch.writes += 1

    def writes(self, tensor: torch.Tensor) -> int:
        """How often something wrote to a tensor's memory."""
        watch = getattr(_storage_of(tensor), "ullage", None)
        return watch.writes if watch is not None else 0

    def mark(self, tensor: torch.Tensor, kind: int) -> None:
        """Say what a tensor's memory is for."""
        span = self.span_of(tensor)
        if span is not None:
            span.kind = kind

    def live_at_peak(self) -> dict[str, int]:
        """Rounded bytes by kind at the moment of the highest `allocated`."""
        totals = [0] * len(KINDS)
        moment = self.peak_clock
        for span in self.spans:
            if span.begin <= moment and (span.end == -1 or span.end > moment):
                totals[span.kind] += span.size
        return dict(zip(KINDS, totals, strict=True))

    def _take(self, nbytes: int, kind: int) -> tuple[Block, Span]:
        with self._lock:
            allocator = self.allocator
            try:
                block = allocator.malloc(nbytes, self.stream)
            except OutOfMemory as error:
                raise torch.OutOfMemoryError(self._message(error)) from None
            self.clock += 1
            span = Span(self.clock, block.size, kind)
            self.spans.append(span)
            allocated = allocator.allocated
            if allocated > self._peak:
                self._peak = allocated
                self.peak_clock = self.clock
            self.timeline.append((self.clock, allocated, allocator.reserved))
            return block, span

    def _storage_died(self, watch: _Watch) -> None:
        if self.closed:
            return
        with self._lock:
            self._watches.pop(watch.key, None)
            self.allocator.free(watch.block)
            self.clock += 1
            watch.span.end = self.clock

    def _message(self, error: OutOfMemory) -> str:
        """PyTorch's own words (c10/cuda/CUDACachingAllocator.cpp)."""
        allocator = self.allocator
        in_use = self.context + allocator.reserved
        free = max(0, self.total - in_use)
        reserved_unused = allocator.reserved - allocator.allocated
        return (
            f"CUDA out of memory. Tried to allocate {format_bytes(error.requested)}. GPU 0 has a total capacity of "
            f"{format_bytes(self.total)} of which {format_bytes(free)} is free. Including non-PyTorch memory, this "
            f"process has {format_bytes(in_use)} memory in use. Of the allocated memory "
            f"{format_bytes(allocator.allocated)} is allocated by PyTorch, and {format_bytes(reserved_unused)} is "
            "reserved by PyTorch but unallocated. If reserved but unallocated memory is large try setting "
            "PYTORCH_ALLOC_CONF=expandable_segments:True to avoid fragmentation.  See documentation for Memory "
            "Management  (https://docs.pytorch.org/docs/stable/notes/cuda.html#optimizing-memory-usage-with-pytorch-alloc-conf)"
        )
