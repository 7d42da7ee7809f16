"""torch.cuda's memory functions, answered by the model of the allocator."""

import os
import time
from typing import Any

import torch

from ullage.virtual.call.replacements import Replacements
from ullage.virtual.memory.allocations import Allocation
from ullage.virtual.state import GPUState

_ACTIONS = ("alloc", "free_requested", "free_completed", "segment_alloc", "segment_free")


class MemoryFunctions:
    def __init__(self, gpu: GPUState) -> None:
        self._gpu = gpu
        self._fraction = gpu.config.memory_fraction
        self._raw: dict[int, Allocation] = {}
        self._history: list[dict[str, Any]] | None = None
        self._before_history: Any = None
        self._limit = 0

    def stats(self, device: int = 0) -> dict[str, Any]:
        """Return the nested dictionary from which PyTorch makes `memory_stats()`."""
        nested: dict[str, Any] = {}
        memory = self._gpu.memory
        figures = memory.allocator.memory_stats()
        for name, tried in zip(("allocated_bytes", "reserved_bytes"), memory.tried, strict=True):
            figures[f"{name}.all.peak"] = max(figures[f"{name}.all.peak"], tried)
        for key, value in figures.items():
            *path, last = key.split(".")
            table = nested
            for part in path:
                table = table.setdefault(part, {})
            table[last] = value
        return nested

    def reset_peak(self, device: int = 0) -> None:
        """`reset_peak_memory_stats`; the virtual GPU itself keeps the highest peaks."""
        self._gpu.reset_peaks()

    def empty_cache(self, *pool: Any) -> None:
        self._gpu.memory.empty_cache(*pool[:1])

    def set_fraction(self, fraction: float, device: int = 0) -> None:
        self._fraction = fraction
        self._gpu.memory.allocator.set_memory_fraction(fraction)

    def fraction(self, device: int = 0) -> float:
        return self._fraction

    def raw_alloc(self, size: int, stream: int = 0) -> int:
        taken = self._gpu.memory.take(size)
        address = taken.block.address if taken.block is not None else 0
        self._raw[address] = taken
        return address

    def raw_delete(self, address: int) -> None:
        taken = self._raw.pop(address, None)
        if taken is not None:
            self._gpu.memory.give_back(taken)

    def snapshot(self, pool: Any = None) -> dict[str, Any]:
        """`torch.cuda.memory._snapshot()`: segments, blocks and any recorded history; no stack traces."""
        segments: list[dict[str, Any]] = []
        for segment in self._gpu.memory.allocator.snapshot():
            blocks = [{**block, "frames": []} for block in segment["blocks"]]
            segments.append({**segment, "device": 0, "blocks": blocks, "frames": []})
        return {
            "segments": segments,
            "device_traces": [list(self._history or ())],
            "external_annotations": [],
            "allocator_settings": {"PYTORCH_ALLOC_CONF": os.environ.get("PYTORCH_ALLOC_CONF", "")},
        }

    def record_history(self, enabled: Any = "all", *options: Any, **named: Any) -> None:
        """`torch.cuda.memory._record_memory_history()`: every allocation and free, without stack traces."""
        allocator = self._gpu.memory.allocator
        if not enabled:
            if self._history is not None:
                allocator.on_event, self._history = self._before_history, None
            return
        limit = named.get("max_entries", options[2] if len(options) > 2 else None)
        self._limit = limit if isinstance(limit, int) and limit > 0 else 1 << 62
        if self._history is None:
            self._before_history, self._history = allocator.on_event, []
            allocator.on_event = self._record
        self._gpu.note("history", "a memory history was recorded without stack traces")

    def _record(self, action: int, address: int, size: int) -> None:
        if self._before_history is not None:
            self._before_history(action, address, size)
        history = self._history
        if history is None:
            return
        entry = {"action": _ACTIONS[action], "addr": address, "size": size, "stream": self._gpu.memory.stream}
        history.append({**entry, "time_us": time.time_ns() // 1000, "frames": []})
        if len(history) > self._limit:
            del history[0]


def memory_info(gpu: GPUState) -> tuple[int, int]:
    """Return free and total bytes of the card, as `torch.cuda.mem_get_info()`."""
    return gpu.free_on_card(), gpu.memory.total


def install(gpu: GPUState, replacements: Replacements) -> None:
    memory = MemoryFunctions(gpu)
    metadata = [""]

    replacements.put_all(
        torch._C,
        {
            "_cuda_memoryStats": memory.stats,
            "_cuda_resetPeakMemoryStats": memory.reset_peak,
            "_cuda_resetAccumulatedMemoryStats": lambda device=0: gpu.memory.allocator.reset_accumulated_stats(),
            "_cuda_emptyCache": memory.empty_cache,
            "_cuda_setMemoryFraction": memory.set_fraction,
            "_cuda_getMemoryFraction": memory.fraction,
            "_cuda_memorySnapshot": memory.snapshot,
            "_cuda_record_memory_history": memory.record_history,
            "_cuda_record_memory_history_legacy": memory.record_history,
            "_cuda_isHistoryEnabled": lambda: memory._history is not None,
            "_cuda_allocationTraceback": lambda address: None,
            "_cuda_setMemoryMetadata": lambda text: metadata.__setitem__(0, text),
            "_cuda_getMemoryMetadata": lambda: metadata[0],
            "_cuda_cudaCachingAllocator_raw_alloc": memory.raw_alloc,
            "_cuda_cudaCachingAllocator_raw_delete": memory.raw_delete,
            "_cuda_cudaCachingAllocator_is_enabled": lambda: True,
            "_cuda_cudaCachingAllocator_enable": lambda enabled: None,
            "_cuda_getAllocatorBackend": lambda: "native",
            "_cuda_clearCublasWorkspaces": gpu.libraries.clear_workspaces,
            "_cuda_getCublasWorkspaceSize": gpu.libraries.cublas_size,
            "_cuda_hostMemoryStats": dict,
            "_cuda_resetPeakHostMemoryStats": lambda: None,
            "_cuda_resetAccumulatedHostMemoryStats": lambda: None,
            "_cuda_customAllocator": gpu.refusing(
                "a custom allocator", "the model of PyTorch's own allocator is all there is"
            ),
            "_cuda_changeCurrentAllocator": gpu.refusing(
                "a custom allocator", "remove torch.cuda.memory.change_current_allocator"
            ),
            "_accelerator_isAllocatorInitialized": lambda: True,
            "_accelerator_emptyCache": memory.empty_cache,
            "_accelerator_emptyHostCache": lambda: None,
            "_accelerator_getDeviceStats": memory.stats,
            "_accelerator_resetPeakStats": memory.reset_peak,
            "_accelerator_resetAccumulatedStats": lambda device=0: gpu.memory.allocator.reset_accumulated_stats(),
            "_accelerator_getMemoryInfo": lambda device=0: memory_info(gpu),
            "_accelerator_setAllocatorSettings": lambda text: gpu.note(
                "allocator", f"allocator settings given at run time were not applied: {text}"
            ),
        },
    )
    replacements.on_undo(lambda: memory.record_history(None))
