"""Matrix products. The workspace belongs to cuBLAS, which keeps it: see `virtual/libraries.py`."""

from __future__ import annotations

from typing import Any

import torch

from ullage.virtual.kernels.plan import (
    CUBLAS,
    CUBLAS_LT,
    Call,
    New,
    Plan,
    Same,
    Steps,
    ceil_div,
    kernel,
    new,
)

_POINTER, _STRIDE, _PROBLEM_SIZE = 8, 8, 12  # bytes; three 32-bit sizes make a problem
_TENSOR_MAPS = 4 * 128  # bytes a multiprocessor: descriptors of the operands
_FLOAT8_SINCE = (8, 9)  # compute capability
_LT_TYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def _copy_for_cublas(matrix: torch.Tensor) -> int:
    """Blas.cpp, prepare_matrix_for_cublas: bytes of a copy, unless rows or columns lie together in memory.

    cuBLAS conjugates as it transposes: a conjugate view is copied where it would not be transposed.
    """
    rows, columns = matrix.shape[-2:]
    down, along = matrix.stride()[-2:]
    by_columns, by_rows = down == 1 and along >= max(1, rows), along == 1 and down >= max(1, columns)
    conjugated = matrix.is_conj() and (by_rows if matrix.dim() == 3 else not by_columns)
    return 0 if (by_columns or by_rows) and not conjugated else matrix.numel() * matrix.element_size()


def _with_copies(plan: Plan, *matrices: torch.Tensor) -> Plan:
    copies = [size for matrix in matrices if (size := _copy_for_cublas(matrix))]
    if copies:
        plan.steps = Steps().output(0).temporary(*copies).steps
    return plan


def _inferred(call: Call, left: torch.Tensor, right: torch.Tensor, *dtype: Any) -> Plan:
    """The result of a product; PyTorch's own inference fails where `out_dtype` asks for another type."""
    if not (dtype and isinstance(dtype[0], torch.dtype)):
        return call.infer()
    size = (*left.shape[:-1], right.shape[-1])
    return Plan([Same("out") if "out" in call.kwargs else new(size, dtype[0])], single=True)


@kernel("aten.mm.default", "aten.bmm.default", "aten.mm.out", "aten.bmm.out", "aten.mm.dtype", "aten.bmm.dtype",
        "aten.mm.dtype_out", "aten.bmm.dtype_out")  # fmt: skip
def product(call: Call) -> Plan:
    """Blas.cpp: every product needs a cuBLAS handle with its workspace; the right factor is looked at first."""
    plan = _inferred(call, *call.args)
    plan.library = CUBLAS
    return _with_copies(plan, call.args[1], call.args[0])


@kernel("aten.mv.default", "aten.mv.out")
def product_with_vector(call: Call) -> Plan:
    """Blas.cpp, addmv_out_cuda: as a product of matrices."""
    plan = call.infer()
    plan.library = CUBLAS
    return _with_copies(plan, call.args[0])


@kernel("aten.dot.default", "aten.vdot.default", "aten.dot.out", "aten.vdot.out")
def product_of_vectors(call: Call) -> Plan:
    """Blas.cpp, dot_cuda and vdot_cuda: cuBLAS, with its handle."""
    plan = call.infer()
    plan.library = CUBLAS
    return plan


@kernel("aten.addmv.default", "aten.addmv_.default", "aten.addmv.out")
def sum_with_vector(call: Call) -> Plan:
    """Blas.cpp, addmv_out_cuda."""
    plan = call.infer()
    plan.library = CUBLAS
    return plan if plan.outputs[0] == Same(0) else _with_copies(plan, call.args[1])


@kernel("aten.baddbmm.default", "aten.addbmm.default", "aten.baddbmm.out", "aten.addbmm.out", "aten.baddbmm.dtype",
        "aten.baddbmm.dtype_out")  # fmt: skip
def sum_of_products(call: Call) -> Plan:
    """Blas.cpp, baddbmm_out_cuda_impl."""
    plan = _inferred(call, *call.args[1:])
    plan.library = CUBLAS
    return _with_copies(plan, call.args[2], call.args[1])


@kernel("aten.addmm.default", "aten.addmm_.default", "aten.addmm.out", "aten._addmm_activation.default",
        "aten.addmm.dtype", "aten.addmm.dtype_out")  # fmt: skip
def product_with_bias(call: Call) -> Plan:
    """Blas.cpp, addmm_out_cuda_impl: a contiguous row of biases is added by cuBLASLt itself."""
    plan = _inferred(call, *call.args[1:])
    bias, _, right = call.args[:3]
    scaled = call.kwargs.get("beta", 1) != 1
    fused = bias.dim() == 1 and bias.is_contiguous() and bias.dtype in _LT_TYPES and not scaled
    plan.library = CUBLAS_LT if fused and right.shape[0] > 1 and right.shape[1] > 1 else CUBLAS
    return plan if plan.outputs[0] == Same(0) else _with_copies(plan, right, call.args[1])


@kernel("aten._grouped_mm.default")
def grouped_product(call: Call) -> Plan:
    """GroupMM.cu, bf16bf16_grouped_gemm_impl_sm90_sm100: pointers and strides of each group, and CUTLASS's workspace.

    Other types and older GPUs multiply one group after another.
    """
    left, right = call.args[:2]
    offsets = call.argument(2, "offs")
    groups = offsets.shape[0] if offsets is not None else (left if left.dim() == 3 else right).shape[0]
    plan = Plan([_grouped_output(left, right, groups)], single=True)
    generation = (call.gpu.compute_capability or (0, 0))[0]
    if left.dtype is not torch.bfloat16 or generation not in (9, 10):
        return plan
    pointers = (groups + groups % 2) * 3 * _POINTER
    arguments = pointers + groups * (3 * _STRIDE + _PROBLEM_SIZE)
    workspace = _TENSOR_MAPS * (call.gpu.sms or 1)
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


@kernel("aten._scaled_mm.default", "aten._int_mm.default")
def product_of_eight_bits(call: Call) -> Plan:
    """Blas.cpp, _scaled_mm_out_cuda and _int_mm_out_cuda: cuBLASLt alone multiplies float8 and int8."""
    capability = call.gpu.compute_capability
    if call.func._schema.name == "aten::_scaled_mm" and capability is not None and capability < _FLOAT8_SINCE:
        raise RuntimeError(
            "torch._scaled_mm is only supported on CUDA devices with compute capability >= 9.0 or 8.9, or ROCm MI300+"
        )
    plan = call.infer()
    plan.library = CUBLAS_LT
    return plan
