"""Memory that libraries take at first use and keep: their code, and the workspaces of cuBLAS and cuBLASLt.

aten/src/ATen/cuda/CublasHandlePool.cpp: one workspace a handle and stream, and a handle for every thread that
multiplies matrices. The thread that runs the backward pass therefore has its own.
"""

from __future__ import annotations

import re
import threading
from typing import TYPE_CHECKING, Any

import torch

from ullage.units import KIB, MIB
from ullage.virtual.kernels.plan import CONVOLUTION, CUBLAS, CUBLAS_LT, CUDNN
from ullage.virtual.memory import WORKSPACE
from ullage.virtual.native import in_backward

if TYPE_CHECKING:
    from ullage.virtual.gpu import VirtualGPU

_HOPPER_DEFAULT = 4096 * 8 * KIB  # ":4096:8" on compute capability 9 and 10: 32 MiB
_DEFAULT = 8_519_680  # ":4096:2:16:8" before: 2 * 4 MiB + 8 * 16 KiB
LT_DEFAULT = 1 * MIB

# What a library's code takes outside the allocator, read off 641 runs on an H200 (CUDA 13.0, cuDNN 9.19): a bare
# context has 612 MiB, with PyTorch's own kernels 614, with matrix products 742, with cuDNN's attention or recurrent
# networks 758, with convolutions too 760 (758 to 766), with convolutions and no matrix product 632.
CODE = {CUBLAS: 128 * MIB, CUDNN: 16 * MIB, CONVOLUTION: 2 * MIB}
_PARTS = {CUBLAS: (CUBLAS,), CUBLAS_LT: (CUBLAS,), CUDNN: (CUDNN,), CONVOLUTION: (CUDNN, CONVOLUTION)}


class Workspaces:
    """The workspaces of one virtual GPU."""

    def __init__(self, gpu: VirtualGPU) -> None:
        self._gpu = gpu
        self._taken: dict[Any, Any] = {}
        self._not_loaded = dict(CODE)

    @property
    def not_loaded(self) -> int:
        """Bytes of the code of libraries that nothing has used yet."""
        return sum(self._not_loaded.values())

    def need(self, library: str) -> None:
        """A call of this library is about to run in this thread and stream."""
        for part in _PARTS[library]:
            if part in self._not_loaded:
                self._gpu.take_outside(self._not_loaded.pop(part))
                if part == CONVOLUTION:
                    self._note_switches()
        if library in (CUBLAS, CUBLAS_LT):
            self.cublas()
        if library == CUBLAS_LT:
            self.cublas_lt()

    def _note_switches(self) -> None:
        """Switches by which cuDNN chooses other kernels than those that were measured."""
        get: Any = torch._C
        for name, on in (("benchmark", get._get_cudnn_benchmark()), ("deterministic", get._get_cudnn_deterministic())):
            if on:
                self._gpu.note(
                    "cudnn", f"torch.backends.cudnn.{name} is on: convolutions may take other workspaces than estimated"
                )

    def cublas(self) -> None:
        """A matrix product is about to run in this thread and stream."""
        key = ("cublas", _thread(), self._gpu.memory.stream)
        if key not in self._taken:
            size = self.cublas_size()
            self._taken[key] = self._gpu.memory.take(size, WORKSPACE) if size else None

    def cublas_lt(self) -> None:
        """A matrix product with cuBLASLt is about to run in this thread and stream."""
        key = ("cublaslt", _thread(), self._gpu.memory.stream)
        if key not in self._taken:
            self._taken[key] = self._gpu.memory.take(LT_DEFAULT, WORKSPACE)

    def cublas_size(self) -> int:
        """Bytes of one cuBLAS workspace, by `CUBLAS_WORKSPACE_CONFIG` or the GPU's generation."""
        written = self._gpu.environment.get("CUBLAS_WORKSPACE_CONFIG", "")
        pairs = re.findall(r":(\d+):(\d+)", written)
        if pairs:
            return sum(int(kib) * int(count) for kib, count in pairs) * KIB
        major = (self._gpu.spec.compute_capability or (0, 0))[0]
        return _HOPPER_DEFAULT if major in (9, 10) else _DEFAULT

    def clear(self) -> None:
        """`torch._C._cuda_clearCublasWorkspaces()`."""
        for taken in self._taken.values():
            if taken is not None:
                self._gpu.memory.give_back(taken)
        self._taken.clear()


def _thread() -> Any:
    return "backward" if in_backward() else threading.get_ident()
