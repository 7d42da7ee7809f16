"""`VirtualGPU`, and the `with` statement that makes it the machine's "cuda"."""

import gc
import os
import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack
from types import TracebackType
from typing import Any, Self

import torch

from ullage.allocator import AllocatorConfig, AllocatorConfigError
from ullage.allocator.blocks import SMALL_BUFFER
from ullage.allocator.config import ENVIRONMENT_NAMES
from ullage.errors import NestedGPUError
from ullage.hardware import GPU
from ullage.hardware import gpu as find_gpu
from ullage.virtual.call.dispatch import VirtualMode
from ullage.virtual.call.native import backward_in_calling_thread, cuda_stand_in
from ullage.virtual.memory.allocations import origin_at, timeline
from ullage.virtual.operators.gradient_sums import measure_reference_counts
from ullage.virtual.releases import note_on
from ullage.virtual.shared_card.process import SharedCard
from ullage.virtual.state import GPUState, gpus_in_use
from ullage.virtual.torch_cuda.install import install_torch_api
from ullage.virtual.upper_bound import UNMEASURED_SHARE
from ullage.virtual.watching.own_loop import OwnLoop
from ullage.virtual.watching.progress import Progress
from ullage.virtual.watching.request_origins import RequestOrigin, RequestOrigins

_in_use = threading.RLock()


class VirtualGPU(GPUState):
    """A GPU on which tensors have shapes but no data, and memory is counted. Made by `virtual_gpu`.

    >>> with virtual_gpu("H200") as gpu:
    ...     x = torch.zeros(1000, 1000, device="cuda")
    >>> gpu.peak_allocated
    4000256
    """

    def __init__(
        self, spec: GPU, config: AllocatorConfig | None = None, limited: bool = True, shared: SharedCard | None = None
    ) -> None:
        super().__init__(spec, config, limited, shared)
        self.mode = VirtualMode(self)
        self.progress = Progress(self)
        self.values.steps = lambda: self.progress.optimizer_steps
        self.origins = RequestOrigins(self)
        if self.memory.keeps_history:
            self.memory.origin = self.origins.current
        self._restore = ExitStack()

    @property
    def process_memory(self) -> int:
        """Memory of the process at its peak, as in `nvidia-smi`: the CUDA context plus the reserved memory."""
        return self.context + self.peak_reserved

    @property
    def upper(self) -> int:
        """An upper bound for `process_memory`, for placing jobs.

        It is the largest context seen on such a GPU, plus the memory that the run reserves if every uncertain workspace
        has its largest likely size, plus one segment, because two runs of the same job differ by that much. With
        guessed workspaces or autocast it adds a fortieth, or the possible error of the least certain guess if that is
        more; on GPUs whose kernels were not measured, a twentieth; and the additions for the run's assumptions
        (`upper_bound.py`). With guesses it adds no segment, because these additions are at least a small one.
        Workspaces that `cudnn.benchmark` only tries need no more than the card has.
        """
        requests = self.memory.requests
        if not requests.tried_at:
            return self.needed_upper
        largest = max(self.peak_reserved, requests.largest_reserved(self.config, tried=True))
        return max(self.needed_upper, min(self._bound(self.peak_reserved, largest), self.spec.usable))

    @property
    def needed_upper(self) -> int:
        """An upper bound for the process without workspaces that `cudnn.benchmark` only tries."""
        requests = self.memory.requests
        largest = max(self.needed_reserved, requests.largest_reserved(self.config))
        doubtful = requests.possible_sizes or self.uncertainty.guesses()
        if doubtful or any(kind == "ranks" for kind, _ in self.noted):
            largest = max(largest, requests.largest_reserved(self.config, rising=True))
        return self._bound(self.needed_reserved, largest)

    def _bound(self, reserved: int, largest: int) -> int:
        usual = (self.spec.context_upper or 0) - self.libraries.not_loaded
        context = max(self.context, usual + self.libraries.beyond)
        unmeasured = 0 if self.spec.context_measured else reserved // UNMEASURED_SHARE
        spread = self.uncertainty.spread(reserved)
        counted = self.uncertainty.guesses() and not self.memory.requests.tried_at
        spread = max(spread, SMALL_BUFFER) if counted else spread + self.config.large_segment_size
        assumptions: int = sum(entry["adds"] for entry in self.assumed + self.left_out)
        assumptions += self.memory.waiting.most_late
        return context + largest + unmeasured + spread + assumptions

    @property
    def timeline(self) -> list[tuple[int, int, int]]:
        """Return the bytes allocated and reserved after each allocator call."""
        return timeline(self.memory.spans, self.memory.reserved_at, self.memory.clock)

    @property
    def peak_place(self) -> RequestOrigin | None:
        """The origin of the request at the peak of allocated memory."""
        return self._origin_at(self.memory.peak_clock)

    @property
    def peak_reserved_place(self) -> RequestOrigin | None:
        """The origin of the last request that raised reserved memory to a new peak."""
        return self._origin_at(self.memory.peak_reserved_clock)

    def _origin_at(self, clock: int) -> RequestOrigin | None:
        number = origin_at(self.memory.spans, clock)
        return None if number is None else self.origins.origin(number)

    def begin_own_loop(self, model: Any, optimizer: Any) -> OwnLoop:
        self.progress.loop = OwnLoop(self.memory, self.calls, self.origins, self._notes, model, optimizer)
        return self.progress.loop

    def __enter__(self) -> Self:
        if not _in_use.acquire(blocking=False):
            raise NestedGPUError(
                "one thread of a process can use a virtual GPU at a time, and another one uses it. "
                "Use one process per estimate, or wait for the other thread."
            )
        measure_reference_counts(lambda function: _run_once(VirtualGPU(self.spec, AllocatorConfig()), function))
        restore = self._restore.callback
        try:
            if not gpus_in_use:
                restore(cuda_stand_in().remove)
                cuda_stand_in().install()
            gpus_in_use.append(self)
            restore(gpus_in_use.remove, self)
            self._restore.enter_context(backward_in_calling_thread())
            # `torch.tensor(..., device="cuda")` copies to the GPU by an operator that the mode sees.
            restore(torch._C._set_only_lift_cpu_tensors, torch._C._only_lift_cpu_tensors())
            torch._C._set_only_lift_cpu_tensors(True)
            restore(gc.unfreeze)
            gc.freeze()  # scanning live objects repeatedly would double a run's time
            restore(install_torch_api(self))
            if self.memory.keeps_history:
                restore(self.progress.install())
                restore(self.origins.install())
            if about_release := note_on(torch.__version__, self.release):
                self.note("version", about_release)
            self._restore.enter_context(self.mode)
        except BaseException:
            self._restore.close()
            _in_use.release()
            raise
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            if self.host.has_unfilled:
                self.memory.closed = True
                gc.collect()  # earlier objects are exempt; garbage need not be filled
            self._restore.close()
            self.host.close()
            self.memory.closed = True
        finally:
            _in_use.release()


def _run_once(gpu: VirtualGPU, function: Callable[[], None]) -> None:
    with gpu:
        function()


def virtual_gpu(name: str | GPU = "H200", config: AllocatorConfig | None = None) -> VirtualGPU:
    """Return a virtual GPU to use in a `with` statement; inside, "cuda" is that GPU.

    `name` is a GPU of the catalogue or a `GPU`. `config` sets up the allocator; the default is `PYTORCH_ALLOC_CONF`.

    >>> with virtual_gpu("A100-40GB") as gpu:
    ...     torch.cuda.get_device_name()
    'NVIDIA A100-SXM4-40GB'

    Not covered: more than one GPU, and tensors that are used after the `with`.
    """
    return VirtualGPU(find_gpu(name), config)


def current() -> VirtualGPU | None:
    gpu = gpus_in_use[-1] if gpus_in_use else None
    return gpu if isinstance(gpu, VirtualGPU) else None


def follow_allocator_settings(gpu: GPUState) -> Callable[[], None]:
    """Apply `PYTORCH_ALLOC_CONF` when a script sets it before it uses the GPU; return a function that ends that."""
    watching = [True]

    def audit(event: str, args: tuple[Any, ...]) -> None:
        if event == "os.putenv" and watching and os.fsdecode(args[0]) in ENVIRONMENT_NAMES:
            try:
                gpu.configure(AllocatorConfig.parse(os.fsdecode(args[1])))
            except AllocatorConfigError as error:
                gpu.note("settings", f"{os.fsdecode(args[0])} is not valid: {error}")

    sys.addaudithook(audit)  # which cannot be removed
    return watching.clear
