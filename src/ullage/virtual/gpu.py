"""The virtual GPU itself, and the `with` statement that puts it in the place of "cuda"."""

from __future__ import annotations

import gc
import os
import sys
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch

from ullage.allocator import AllocatorConfig, AllocatorConfigError, CachingAllocator
from ullage.allocator.config import ENVIRONMENT_NAMES
from ullage.errors import NestedGPUError, UnsupportedOperation
from ullage.hardware import GPU
from ullage.hardware import gpu as find_gpu
from ullage.units import MIB
from ullage.virtual import kernels
from ullage.virtual.dispatch import VirtualMode
from ullage.virtual.host import Host
from ullage.virtual.kernels.matmul import CODE, Workspaces
from ullage.virtual.memory import PARAMETERS, WITHOUT_LIMIT, DeviceMemory
from ullage.virtual.native import backward_in_calling_thread, cuda_stand_in
from ullage.virtual.operators import autocast, decompositions, memory_sharing
from ullage.virtual.shared_card.process import SharedCard
from ullage.virtual.torch_api import install
from ullage.virtual.tracking import progress
from ullage.virtual.tracking.places import Place, Places
from ullage.virtual.tracking.uncertainty import SPREAD_SHARE, SURPRISES, largest_reserved, watch_autocast
from ullage.virtual.values import Values

_storage_of: Any = torch._C.TensorBase.untyped_storage  # the one that fills nothing
LARGE_SEGMENT = 20 * MIB
UNMEASURED_SHARE = 20  # a twentieth: libraries choose other kernels on other generations

_in_use = threading.RLock()
_active: list[VirtualGPU] = []


class VirtualGPU:
    """A GPU that has shapes, an allocator and no arithmetic. Made by `virtual_gpu`.

    >>> with virtual_gpu("H200") as gpu:
    ...     x = torch.zeros(1000, 1000, device="cuda")
    >>> gpu.peak_allocated
    4000256
    """

    def __init__(
        self,
        spec: GPU,
        config: AllocatorConfig | None = None,
        limited: bool = True,
        shared: SharedCard | None = None,
    ) -> None:
        self.spec, self.shared = spec, shared
        self.config = config or AllocatorConfig.from_environment()
        self.context = max(0, (spec.context or 0) - sum(CODE.values()))  # grows as libraries are loaded
        self._total = spec.usable if limited else WITHOUT_LIMIT
        if shared is not None:
            shared.take_context(self.context)
        self.memory = DeviceMemory(self._allocator(), self.context, spec.usable, keeps_history=shared is None)
        self.host = Host()
        self.values = Values(self)
        self.workspaces = Workspaces(self)
        self.progress = progress.Progress(self)
        self.places = Places(self)
        if self.memory.keeps_history:
            self.memory.place = self.places.current
        self.operator = ""
        self.refused: str | None = None  # what was last refused; code may have caught the exception
        self.unsure: set[str] = set()  # why another run, or the real one, may reserve a little more
        self.uncertain = 0  # bytes by which the most doubtful temporary of the run could be larger
        self.surprise = 0  # bytes by which the least sure guess of a workspace may fail beyond that
        self.list_plans: dict[Any, Any] = {}
        self.environment = dict(os.environ)
        self._notes: dict[tuple[str, str], int] = {}
        self._mode = VirtualMode(self)
        self._restore: Any = None
        self._kept_peaks = 0, 0

    def _allocator(self) -> CachingAllocator:
        room = self._total - self.context
        return CachingAllocator(room, self.config, total_memory=self._total, driver=self.shared)

    def configure(self, config: AllocatorConfig) -> None:
        """Other settings for the allocator, as long as nothing was asked of it: PyTorch reads them at first use."""
        if not self.memory.clock:
            self.config = config
            self.memory.allocator = self._allocator()

    # What the run showed; the names are those of the estimate.

    @property
    def peak_allocated(self) -> int:
        """The most bytes that tensors held at once, as `torch.cuda.max_memory_allocated()`."""
        return max(self._kept_peaks[0], self.memory.allocator.peak_allocated)

    @property
    def peak_reserved(self) -> int:
        """The most bytes that the allocator held at once, as `torch.cuda.max_memory_reserved()`."""
        return max(self._kept_peaks[1], self.memory.allocator.peak_reserved)

    @property
    def process_memory(self) -> int:
        """What `nvidia-smi` shows for the process at its peak: the context and the reserved memory."""
        return self.context + self.peak_reserved

    @property
    def upper(self) -> int:
        """The bound for `process_memory` that placement may use.

        It has the largest context seen on such a card, and one segment more (two runs of the same job differ by as
        much) above what the run reserves if every kernel whose choice is doubtful takes the largest workspace that
        is not unlikely. Where a kernel's choice was guessed at all, or autocast was used, a fortieth more, or what the
        least sure guess may fail by; on GPUs whose kernels were not measured a twentieth too.
        """
        context = max(self.context, (self.spec.context_upper or 0) - self.workspaces.not_loaded)
        largest = max(self.peak_reserved, largest_reserved(self.memory, self.config))
        unmeasured = 0 if self.spec.context_measured else self.peak_reserved // UNMEASURED_SHARE
        spread = max(self.peak_reserved // SPREAD_SHARE, SURPRISES * self.surprise) if self.unsure else 0
        return context + largest + unmeasured + spread + LARGE_SEGMENT

    @property
    def notes(self) -> list[str]:
        """Every assumption made on the way, in the order of its first use."""
        return [text + (f" ({count} times)" if count > 1 else "") for (_, text), count in self._notes.items()]

    @property
    def timeline(self) -> list[tuple[int, int, int]]:
        """Allocator calls, each with the bytes allocated and reserved after it."""
        return self.memory.timeline

    @property
    def peak_place(self) -> Place | None:
        """Who asked when the most bytes were allocated."""
        return self._place_at(self.memory.peak_clock)

    @property
    def peak_reserved_place(self) -> Place | None:
        """Who asked when the allocator last took more from the card than ever before."""
        return self._place_at(self.memory.peak_reserved_clock)

    def _place_at(self, clock: int) -> Place | None:
        number = self.memory.place_at(clock)
        return None if number is None else self.places.place(number)

    def note(self, kind: str, text: str) -> None:
        """Add a line to the notes; the same line again is counted."""
        self._notes[kind, text] = self._notes.get((kind, text), 0) + 1

    def refuse(self, what: str, advice: str) -> None:
        """Say that something cannot be followed."""
        self.refused = f"the virtual GPU cannot follow {what}: {advice}"
        raise UnsupportedOperation(self.refused)

    def take_outside(self, size: int) -> None:
        """Something besides the allocator takes memory of the card: the code of a library."""
        if self.spec.context:
            if self.shared is not None:
                self.shared.take_context(size)
            self.context += size
            self.memory.context = self.context
            self.memory.allocator.capacity -= size

    def keep_peaks(self) -> None:
        """The code is about to reset PyTorch's peaks; those of the whole run must not be lost."""
        self._kept_peaks = self.peak_allocated, self.peak_reserved

    def mark_parameter(self, tensor: torch.Tensor) -> None:
        """A tensor on the GPU holds a parameter."""
        self.memory.mark(tensor, PARAMETERS)

    def pin(self, tensor: torch.Tensor) -> None:
        """Take a CPU tensor for pinned."""
        _storage_of(tensor).ullage_pinned = True

    def pinned(self, tensor: torch.Tensor) -> bool:
        """Whether a CPU tensor is taken for pinned."""
        return not tensor.is_cuda and getattr(_storage_of(tensor), "ullage_pinned", False)

    def counting(self) -> VirtualMode:
        """Inside this `with`, operators that a handler calls are counted like the user's."""
        return self._mode

    def settings(self) -> tuple[Any, ...]:
        """The switches that decide which kernel PyTorch takes; part of what a plan is remembered by."""
        return kernels.settings()

    def __enter__(self) -> VirtualGPU:
        if not _in_use.acquire(blocking=False):
            raise NestedGPUError(
                "another thread is using a virtual GPU; needed: one thread at a time in a process. "
                "Use one process an estimate, or wait for the other thread."
            )
        memory_sharing.measure(lambda function: _run_once(VirtualGPU(self.spec, AllocatorConfig()), function))
        try:
            self._restore = _Restore()
            if not _active:
                self._restore.add(cuda_stand_in().remove)
                cuda_stand_in().install()
            calling_thread = backward_in_calling_thread()
            self._restore.add(lambda: calling_thread.__exit__(None, None, None))
            self._restore.add(_lift_only_cpu_tensors())
            self._restore.add(_spare_the_collector())
            self._restore.add(install.install(self))
            self._restore.add(decompositions.install(self))
            self._restore.add(autocast.install())
            self._restore.add(watch_autocast(self))
            if self.memory.keeps_history:
                self._restore.add(self.progress.install())
                self._restore.add(self.places.install())
            self._mode.__enter__()
            self._restore.add(lambda: self._mode.__exit__(None, None, None))
            _active.append(self)
        except BaseException:
            if self._restore is not None:
                self._restore.run()
            _in_use.release()
            raise
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            _active.remove(self)
            self._restore.run()
            self.host.close()
            self.memory.closed = True
        finally:
            _in_use.release()


def _lift_only_cpu_tensors() -> Callable[[], None]:
    """`torch.tensor(..., device="cuda")` then copies to the GPU by an operator that the mode sees."""
    before = torch._C._only_lift_cpu_tensors()
    torch._C._set_only_lift_cpu_tensors(True)
    return lambda: torch._C._set_only_lift_cpu_tensors(before)


def _spare_the_collector() -> Callable[[], None]:
    """What is alive now is no garbage: looking through it again and again would double the time of a run."""
    gc.freeze()
    return gc.unfreeze


def _run_once(card: VirtualGPU, function: Callable[[], None]) -> None:
    with card:
        function()


class _Restore:
    """What has to be undone, the last first."""

    def __init__(self) -> None:
        self._actions: list[Any] = []

    def add(self, action: Any) -> None:
        self._actions.append(action)

    def run(self) -> None:
        while self._actions:
            self._actions.pop()()


def virtual_gpu(name: str | GPU = "H200", config: AllocatorConfig | None = None) -> VirtualGPU:
    """A virtual GPU of that name, to be used in a `with` statement: inside, "cuda" is that GPU.

    `config` are the allocator's settings; by default those of `PYTORCH_ALLOC_CONF`.

    >>> with virtual_gpu("A100-40GB") as gpu:
    ...     torch.cuda.get_device_name()
    'NVIDIA A100-SXM4-40GB'

    Not covered: more than one GPU, and tensors that go on being used outside the `with`.
    """
    return VirtualGPU(find_gpu(name), config)


def current() -> VirtualGPU | None:
    """The virtual GPU in use, the innermost one."""
    return _active[-1] if _active else None


# Settings of the allocator that a script makes itself: PyTorch reads PYTORCH_ALLOC_CONF when it first uses the GPU.


def follow_allocator_settings(gpu: VirtualGPU) -> Callable[[], None]:
    """Take over what the process puts into its environment from now on; returns what ends it."""
    watching = [True]

    def audit(event: str, args: tuple[Any, ...]) -> None:
        if event == "os.putenv" and watching and os.fsdecode(args[0]) in ENVIRONMENT_NAMES:
            try:
                gpu.configure(AllocatorConfig.parse(os.fsdecode(args[1])))
            except AllocatorConfigError as error:
                gpu.note("settings", f"{os.fsdecode(args[0])} was not understood: {error}")

    sys.addaudithook(audit)  # which cannot be removed
    return watching.clear
