"""Matrix products. The workspace belongs to cuBLAS, which keeps it: see `virtual/memory/libraries.py`."""

from typing import NamedTuple

import torch

from ullage.units import round_up
from ullage.virtual.call.plan import CUBLAS, CUBLAS_LT, Call, New, Plan, Same, Steps, bytes_of, kernel, new

_POINTER, _STRIDE, _PROBLEM_SIZE = 8, 8, 12  # bytes; three 32-bit sizes make a problem
_TENSOR_MAPS = 4 * 128  # bytes a multiprocessor: descriptors of the operands
_FLOAT8_SINCE = (8, 9)  # compute capability
_LT_TYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def _copy_for_cublas(matrix: torch.Tensor) -> int:
    """Blas.cpp, prepare_matrix_for_cublas: bytes of a copy, unless rows or columns lie together in memory. cuBLAS
    conjugates as it transposes: a conjugate view is copied if it would not be transposed."""
    rows, columns = matrix.shape[-2:]
    down, along = matrix.stride()[-2:]
    by_columns, by_rows = down == 1 and along >= max(1, rows), along == 1 and down >= max(1, columns)
    conjugated = matrix.is_conj() and (by_rows if matrix.dim() == 3 else not by_columns)
    return 0 if (by_columns or by_rows) and not conjugated else bytes_of(matrix)


class Product(NamedTuple):
    """An operator that multiplies: the arguments that may be copied for cuBLAS, the right factor first."""

    operators: str  # without "aten."
    copied: tuple[int, ...]
    factors: tuple[int, int] | None = None  # those whose sizes give that of the result, for operators with `out_dtype`

    def plan(self, call: Call) -> Plan:
        plan = self._inferred(call)
        plan.library = CUBLAS
        copies = [_copy_for_cublas(call.args[place]) for place in self.copied]
        if any(copies) and plan.outputs[0] != Same(0):  # else the sum overwrites its first term
            plan.steps = Steps().output(0).temporary(*copies).steps
        return plan

    def _inferred(self, call: Call) -> Plan:
        """Return the result of a product; PyTorch's own inference fails if `out_dtype` is another type."""
        kind = call.args[-1]
        if self.factors is None or not isinstance(kind, torch.dtype):
            return call.infer()
        left, right = (call.args[place] for place in self.factors)
        made = new((*left.shape[:-1], right.shape[-1]), kind)
        return Plan([Same("out") if "out" in call.kwargs else made], single=True)


# Blas.cpp: products of matrices; addmv_out_cuda; dot_cuda and vdot_cuda; baddbmm_out_cuda_impl; addmm_out_cuda_impl
_PRODUCTS = (
    Product("mm.default mm.out mm.dtype mm.dtype_out bmm.default bmm.out bmm.dtype bmm.dtype_out", (1, 0), (0, 1)),
    Product("mv.default mv.out", (0,)),
    Product("dot.default dot.out vdot.default vdot.out", ()),
    Product("addmv.default addmv_.default addmv.out", (1,)),
    Product("baddbmm.default baddbmm.out baddbmm.dtype baddbmm.dtype_out addbmm.default addbmm.out", (2, 1), (1, 2)),
)
_WITH_BIAS = Product(
    "addmm.default addmm_.default addmm.out addmm.dtype addmm.dtype_out _addmm_activation.default", (2, 1), (1, 2)
)


def product_with_bias(call: Call) -> Plan:
    """Blas.cpp, addmm_out_cuda_impl: a contiguous row of biases is added by cuBLASLt itself."""
    plan = _WITH_BIAS.plan(call)
    bias, _, right = call.args[:3]
    scaled = call.kwargs.get("beta", 1) != 1
    fused = bias.dim() == 1 and bias.is_contiguous() and bias.dtype in _LT_TYPES and not scaled
    if fused and right.shape[0] > 1 and right.shape[1] > 1:
        plan.library = CUBLAS_LT
    return plan


for _row in (*_PRODUCTS, _WITH_BIAS):
    _names = [f"aten.{name}" for name in _row.operators.split()]
    kernel(*_names)(product_with_bias if _row is _WITH_BIAS else _row.plan)


@kernel("aten._grouped_mm.default")
def grouped_product(call: Call) -> Plan:
    """GroupMM.cu, bf16bf16_grouped_gemm_impl_sm90_sm100: pointers and strides of each group, and CUTLASS's workspace.
    Other types and older GPUs multiply one group after another."""
    left, right = call.args[:2]
    offsets = call.argument(2, "offs")
    groups = offsets.shape[0] if offsets is not None else (left if left.dim() == 3 else right).shape[0]
    steps = Steps().output(0)
    out = _grouped_output(left, right, groups)
    generation = call.gpu.capability[0]
    if left.dtype is not torch.bfloat16 or generation not in (9, 10):
        return steps.plan(out)
    pointers = (groups + groups % 2) * 3 * _POINTER
    arguments = pointers + groups * (3 * _STRIDE + _PROBLEM_SIZE)
    workspace = _TENSOR_MAPS * call.gpu.multiprocessors
    return steps.temporary(arguments, workspace).plan(out)


def _grouped_output(left: torch.Tensor, right: torch.Tensor, groups: int) -> New:
    """GroupedMMUtils.h, create_grouped_gemm_output_tensor: rows begin at multiples of 16 bytes."""
    size: tuple[int, ...] = (left.shape[-2], right.shape[-1])
    if left.dim() == right.dim():
        size = (groups, *size)
    row = round_up(size[-1] * left.element_size(), 16) // left.element_size()
    stride = (row, 1) if len(size) == 2 else (size[1] * row, row, 1)
    return New(size, stride, left.dtype, size[0] * stride[0] * left.element_size())


@kernel("aten._scaled_mm.default", "aten._int_mm.default")
def product_of_eight_bits(call: Call) -> Plan:
    """Blas.cpp, _scaled_mm_out_cuda and _int_mm_out_cuda: cuBLASLt alone multiplies float8 and int8."""
    if call.func._schema.name == "aten::_scaled_mm" and call.gpu.capability < _FLOAT8_SINCE:
        raise RuntimeError(
            "torch._scaled_mm is only supported on CUDA devices with compute capability >= 9.0 or 8.9, or ROCm MI300+"
        )
    plan = call.infer()
    plan.library = CUBLAS_LT
    return plan
