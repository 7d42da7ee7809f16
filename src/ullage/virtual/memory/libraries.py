"""Memory that cuBLAS, cuBLASLt and cuDNN allocate at first use and keep.

Their code lies outside PyTorch's allocator and enlarges the CUDA context. The workspaces of cuBLAS and cuBLASLt come
from the allocator, one per stream and thread that multiplies matrices (aten/src/ATen/cuda/CublasHandlePool.cpp).
Whether they stay after the product depends on the release of PyTorch (`releases.py`).
"""

import os
import re
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ullage.hardware import GPU
from ullage.units import KIB, MIB
from ullage.virtual.call.native import thread_on_gpu
from ullage.virtual.call.plan import CONVOLUTION, CUBLAS, CUBLAS_LT, CUDNN, tf32_for_convolutions
from ullage.virtual.cudnn.formulas import ConvolutionProblem, Trial
from ullage.virtual.memory.allocations import WORKSPACE
from ullage.virtual.memory.nccl import Communicator
from ullage.virtual.memory.tensors import DeviceMemory
from ullage.virtual.releases import KEPT, SHARED, TAKEN_EACH_TIME, Release

_LT_DEFAULT = 1 * MIB

# Bytes of code outside the allocator, read off 641 runs on an H200 (CUDA 13.0, cuDNN 9.19): a bare context has
# 612 MiB, with PyTorch's own kernels 614, with matrix products 742, with cuDNN's attention or recurrent networks 758,
# with convolutions too 760 (758 to 766), with convolutions and no matrix product 632. The driver alone has 518 of the
# 612: the first kernel of PyTorch's own library adds 92, an empty custom kernel nothing. With
# CUDA_MODULE_LOADING=EAGER it is 1250 before any kernel, and 1934 with convolutions.
CODE = {CUBLAS: 128 * MIB, CUDNN: 16 * MIB, CONVOLUTION: 2 * MIB}
_PARTS = {CUBLAS: (CUBLAS,), CUBLAS_LT: (CUBLAS,), CUDNN: (CUDNN,), CONVOLUTION: (CUDNN, CONVOLUTION)}

# Measured on an H200 too (NCCL 2.28): PyTorch's pool of side streams, made with the first of them, has 70 MiB; NCCL's
# kernels 100, messages to the process itself 248 more. Communicators are in `nccl.py`.
SIDE_STREAMS, NCCL, NCCL_TO_ITSELF = "side streams", "NCCL", "NCCL to itself"
BEYOND = {SIDE_STREAMS: 70 * MIB, NCCL: 100 * MIB, NCCL_TO_ITSELF: 248 * MIB}

TRIALS_NOTE = (
    "torch.backends.cudnn.benchmark is on: at the first call of each convolution PyTorch tries cuDNN's plans, in as "
    "much memory as is free, and keeps the fastest"
)


class Libraries:
    """The libraries that one virtual GPU has loaded. `take_outside` gets the bytes of a library's code, `note` a kind
    and a line for the notes of the run; `free` returns the free bytes of the card."""

    def __init__(
        self,
        spec: GPU,
        release: Release,
        memory: DeviceMemory,
        environment: Mapping[str, str],
        take_outside: Callable[[int], None],
        note: Callable[[str, str], None],
        free: Callable[[], int],
    ) -> None:
        self._free = free
        self._spec, self._release, self._memory, self._environment = spec, release, memory, environment
        self._take_outside, self._note = take_outside, note
        self._workspaces: dict[Any, Any] = {}
        self._not_loaded = dict(CODE)
        self.beyond = 0  # bytes outside the allocator that most trainings do not need
        self.of_connections = 0  # bytes that NCCL may need in addition
        self._taken_beyond: set[str] = set()
        self._peers: set[tuple[str, int]] = set()
        self._plans: dict[Any, int] = {}  # bytes of the plan that `cudnn.benchmark` has kept, by problem and thread

    @property
    def not_loaded(self) -> int:
        """The bytes of code that the run has not needed yet."""
        return sum(self._not_loaded.values())

    @property
    def tries_plans(self) -> bool:
        """Whether a convolution has run with `torch.backends.cudnn.benchmark`."""
        return bool(self._plans)

    def need(self, library: str) -> None:
        """Load a library's code and take its workspace for the current thread and stream, at first use."""
        for part in _PARTS[library]:
            if part in self._not_loaded:
                self._take_outside(self._not_loaded.pop(part))
                if part == CONVOLUTION:
                    self._note_switches()
        release = self._release
        if library == CUBLAS or (library == CUBLAS_LT and release.cublas_workspace == KEPT):
            self._take_workspace("cublas", self.cublas_size, release.cublas_workspace)
        if library == CUBLAS_LT and release.cublas_lt_workspace != SHARED:
            self._take_workspace("cublaslt", self.cublas_lt_size, release.cublas_lt_workspace)

    def need_beyond(self, what: str) -> None:
        """Take an entry of `BEYOND`, which most trainings do not need, at first use."""
        if what not in self._taken_beyond:
            self._taken_beyond.add(what)
            self._take_more_outside(BEYOND[what])

    def make_communicator(self, ranks: int, machines: int) -> None:
        self.need_beyond(SIDE_STREAMS)
        self.need_beyond(NCCL)
        made = Communicator(self._spec, os.environ, ranks, machines)
        self._take_more_outside(made.size)
        self.of_connections += made.more

    def connect_to(self, peer: int, group: str, ranks: int, machines: int) -> None:
        """Take the memory of a connection to one rank of a group, at first use."""
        if (group, peer) not in self._peers:
            self._peers.add((group, peer))
            self._take_more_outside(Communicator(self._spec, os.environ, ranks, machines).of_a_peer)

    def _take_more_outside(self, size: int) -> None:
        self.beyond += size
        self._take_outside(size)

    def _take_workspace(self, library: str, size_of: Callable[[], int], until: str) -> None:
        if until == TAKEN_EACH_TIME:
            if size := size_of():
                self._memory.take_in_turn(size, kind=WORKSPACE)
            return
        key = (library, thread_on_gpu(), self._memory.stream)
        if key not in self._workspaces:
            size = size_of()
            self._workspaces[key] = self._memory.take(size, WORKSPACE) if size else None

    def convolve(self, problem: ConvolutionProblem, trial: Trial) -> None:
        """Take the workspace of a convolution under `cudnn.benchmark`, after trying its plans at the first call in a
        thread (Conv_v8.cpp, run_single_conv). A plan without enough memory gives way to a smaller one."""
        memory, key = self._memory, (problem, trial, thread_on_gpu())
        if key not in self._plans:
            if not self._plans:
                self._note("trials", TRIALS_NOTE)
            memory.try_out(trial.sizes, self._free(), trial.larger)
            self._plans[key] = trial.winner.size
        size = self._plans[key]
        if trial.winner.larger > size:
            memory.requests.note_possible_size(trial.winner.larger)
        while size:
            try:
                memory.take_in_turn(size)
                break
            except torch.OutOfMemoryError:
                memory.out_of_memory = None
                size = max((other for other in trial.sizes if other < size), default=0)
        self._plans[key] = size

    def _note_switches(self) -> None:
        """Note the switches that make PyTorch refuse plans, so that plans run that were not measured."""
        get: Any = torch._C
        switches = {
            "deterministic is on": get._get_cudnn_deterministic(),
            "allow_tf32 is off": not tf32_for_convolutions(),
        }
        for switch, changed in switches.items():
            if changed and not get._get_cudnn_benchmark():
                self._note("cudnn", f"torch.backends.cudnn.{switch}: which plans cuDNN then takes is guessed")

    def cublas_size(self) -> int:
        """Return the bytes of a cuBLAS workspace, by `CUBLAS_WORKSPACE_CONFIG` or by the release and the GPU's
        generation."""
        written = self._environment.get("CUBLAS_WORKSPACE_CONFIG", "")
        pairs = re.findall(r":(\d+):(\d+)", written)
        if pairs:
            return sum(int(kib) * int(count) for kib, count in pairs) * KIB
        return self._release.cublas_workspace_size(self._spec.told_capability)

    def cublas_lt_size(self) -> int:
        """Return the bytes of a cuBLASLt workspace, 1 MiB unless `CUBLASLT_WORKSPACE_SIZE` (KiB) is set."""
        written = self._environment.get("CUBLASLT_WORKSPACE_SIZE", "")
        return int(written) * KIB if written.isdecimal() else _LT_DEFAULT

    def clear_workspaces(self) -> None:
        """Free all workspaces: `torch._C._cuda_clearCublasWorkspaces()`."""
        for taken in self._workspaces.values():
            if taken is not None:
                self._memory.give_back(taken)
        self._workspaces.clear()
