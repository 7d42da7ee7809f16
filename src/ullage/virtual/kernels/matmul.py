"""Matrix products: the outputs are plain, the workspace is the library's (see `workspaces`)."""

from __future__ import annotations

import re
import threading
from typing import TYPE_CHECKING, Any

import torch

from ullage.units import KIB, MIB
from ullage.virtual.kernels.plan import (
    CONVOLUTION,
    CUBLAS,
    CUBLAS_LT,
    CUDNN,
    Call,
    New,
    Plan,
    Same,
    Steps,
    ceil_div,
    kernel,
)
from ullage.virtual.memory import WORKSPACE
from ullage.virtual.native import in_backward

if TYPE_CHECKING:
    from ullage.virtual.gpu import VirtualGPU


_POINTER, _STRIDE, _PROBLEM_SIZE = 8, 8, 12  # bytes; three 32-bit sizes make a problem
_TENSOR_MAPS = 4 * 128  # bytes a multiprocessor: descriptors of the operands
_LT_TYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def _copy_for_cublas(matrix: torch.Tensor) -> int:
    """Blas.cpp, prepare_matrix_for_cublas: bytes of a copy, unless rows or columns lie together in memory."""
    rows, columns = matrix.shape[-2:]
    down, along = matrix.stride()[-2:]
    usable = (down == 1 and along >= max(1, rows)) or (along == 1 and down >= max(1, columns))
    return 0 if usable else matrix.numel() * matrix.element_size()


def _with_copies(plan: Plan, *matrices: torch.Tensor) -> Plan:
    copies = [size for matrix in matrices if (size := _copy_for_cublas(matrix))]
    if copies:
        plan.steps = Steps().output(0).temporary(*copies).steps
    return plan


@kernel("aten.mm.default", "aten.bmm.default")
def product(call: Call) -> Plan:
    """Blas.cpp: every product needs a cuBLAS handle with its workspace; the right factor is looked at first."""
    plan = call.infer()
    plan.library = CUBLAS
    return _with_copies(plan, call.args[1], call.args[0])


@kernel("aten.mv.default")
def product_with_vector(call: Call) -> Plan:
    """Blas.cpp, addmv_out_cuda: as a product of matrices."""
    plan = call.infer()
    plan.library = CUBLAS
    return _with_copies(plan, call.args[0])


@kernel("aten.baddbmm.default", "aten.addbmm.default")
def sum_of_products(call: Call) -> Plan:
    """Blas.cpp, baddbmm_out_cuda_impl."""
    plan = call.infer()
    plan.library = CUBLAS
    return _with_copies(plan, call.args[2], call.args[1])


@kernel("aten.addmm.default", "aten.addmm_.default", "aten._addmm_activation.default")
def product_with_bias(call: Call) -> Plan:
    """Blas.cpp, addmm_out_cuda_impl: a contiguous row of biases is added by cuBLASLt itself."""
    plan = call.infer()
    bias, _, right = call.args[:3]
    scaled = call.kwargs.get("beta", 1) != 1
    fused = bias.dim() == 1 and bias.is_contiguous() and bias.dtype in _LT_TYPES and not scaled
    plan.library = CUBLAS_LT if fused and right.shape[0] > 1 and right.shape[1] > 1 else CUBLAS
    return plan if isinstance(plan.outputs[0], Same) else _with_copies(plan, right, call.args[1])


@kernel("aten._grouped_mm.default")
def grouped_product(call: Call) -> Plan:
    """GroupMM.cu, bf16bf16_grouped_gemm_impl_sm90_sm100: pointers and strides of each group, and CUTLASS's workspace.

    Other types and older GPUs multiply one group after another.
    """
    left, right = call.args[:2]
    offsets = call.argument(2, "offs")
    groups = offsets.shape[0] if offsets is not None else (left if left.dim() == 3 else right).shape[0]
    plan = Plan([_grouped_output(left, right, groups)], single=True)
    generation = (call.gpu.spec.compute_capability or (0, 0))[0]
    if left.dtype is not torch.bfloat16 or generation not in (9, 10):
        return plan
    pointers = (groups + groups % 2) * 3 * _POINTER
    arguments = pointers + groups * (3 * _STRIDE + _PROBLEM_SIZE)
    workspace = _TENSOR_MAPS * (call.gpu.spec.sms or 1)
    plan.steps = Steps().output(0).temporary(arguments, workspace).steps
    return plan


def _grouped_output(left: torch.Tensor, right: torch.Tensor, groups: int) -> New:
    """GroupedMMUtils.h, create_grouped_gemm_output_tensor: rows begin at multiples of 16 bytes."""
    size: tuple[int, ...] = (left.shape[-2], right.shape[-1])
    if left.dim() == right.dim():
        size = (groups, *size)
    row = ceil_div(size[-1] * left.element_size(), 16) * 16 // left.element_size()
    stride = (row, 1) if len(size) == 2 else (size[1] * row, row, 1)
    return New(size, stride, left.dtype, size[0] * stride[0] * left.element_size())


# Memory that libraries take at first use and keep: their code, and the workspaces of cuBLAS and cuBLASLt.
#
# aten/src/ATen/cuda/CublasHandlePool.cpp: one workspace a handle and stream, and a handle for every thread that
# multiplies matrices. The thread that runs the backward pass therefore has its own.

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
