"""Matrix products: the outputs are plain, the workspace is the library's (see `workspaces`)."""

from __future__ import annotations

import torch

from ullage.virtual.kernels.plan import Plan
from ullage.virtual.kernels.registry import Call, kernel

_LT_TYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


@kernel("aten.mm.default", "aten.bmm.default", "aten.baddbmm.default", "aten.addbmm.default", "aten.mv.default")
def product(call: Call) -> Plan:
    """Blas.cpp: every product needs a cuBLAS handle with its workspace."""
    plan = call.infer()
    plan.library = "cublas"
    return plan


@kernel("aten.addmm.default", "aten.addmm_.default", "aten._addmm_activation.default")
def product_with_bias(call: Call) -> Plan:
    """Blas.cpp, addmm_out_cuda_impl: a contiguous row of biases is added by cuBLASLt itself."""
    plan = call.infer()
    bias, _, right = call.args[:3]
    scaled = call.kwargs.get("beta", 1) != 1
    fused = bias.dim() == 1 and bias.is_contiguous() and bias.dtype in _LT_TYPES and not scaled
    plan.library = "cublaslt" if fused and right.shape[0] > 1 and right.shape[1] > 1 else "cublas"
    return plan
