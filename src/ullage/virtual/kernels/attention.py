"""Fused attention: outputs, what is saved for the backward pass, and temporaries."""

from __future__ import annotations

from typing import Any

import torch

from ullage.virtual.kernels.plan import New, Plan, Steps, new
from ullage.virtual.kernels.registry import Call, kernel

_SEED = 8  # bytes: one 64-bit number


def _like_layout(size: tuple[int, ...], source: torch.Tensor, dtype: torch.dtype) -> New:
    """A tensor of this size whose dimensions lie in memory in the order of the source's (MHA.cpp, alloc_with_matching_layout)."""
    order = sorted(range(len(size)), key=lambda dim: source.stride(dim), reverse=True)
    if source.shape == torch.Size(size) and source.is_contiguous():
        return new(size, dtype)
    stride, step = [0] * len(size), 1
    for dim in reversed(order):
        stride[dim] = step
        step *= size[dim]
    return new(size, dtype, stride)


@kernel("aten._scaled_dot_product_cudnn_attention.default")
def cudnn_forward(call: Call) -> Plan:
    """attention.cu, _scaled_dot_product_cudnn_attention_cuda; MHA.cpp, run_cudnn_SDP_fprop"""
    query, key, value = call.args[:3]
    needs_sums = call.argument(4, "compute_log_sumexp", False)
    batch, heads, length, _ = query.shape
    out = _like_layout((batch, heads, length, value.shape[3]), query, query.dtype)
    sums = new((batch, heads, length, 1), torch.float32) if needs_sums else None
    number = new((), torch.int64)
    outputs = [out, sums, None, None, None, None, number, number, None]
    steps = Steps().output(6, 7, 0)
    if needs_sums:
        steps.output(1)
    plan = Plan(outputs, steps.temporary(256).steps)
    plan.defaults = {4: length, 5: key.shape[2]}
    return plan


@kernel("aten._scaled_dot_product_cudnn_attention_backward.default")
def cudnn_backward(call: Call) -> Plan:
    """MHA.cpp, run_cudnn_SDP_bprop: sums of the gradient in single precision, and one number a row."""
    query, key, value = call.args[1:4]
    outputs = [_like_layout(tuple(tensor.shape), tensor, tensor.dtype) for tensor in (query, key, value)]
    batch, heads, length, _ = query.shape
    accumulated = query.numel() * 4 + batch * heads * length * 4 + 256
    return Plan(list(outputs), Steps().output(0, 1, 2).temporary(accumulated).steps)


@kernel("aten._scaled_dot_product_flash_attention.default")
def flash_forward(call: Call) -> Plan:
    """flash_api.cpp, mha_fwd"""
    query, _, value = call.args[:3]
    batch, heads, length, _ = query.shape
    out = _transposed((batch, heads, length, value.shape[3]), query.dtype)
    sums = new((batch, heads, length), torch.float32)
    state = [new((2,), torch.uint64), new((), torch.uint64)]
    plan = Plan([out, sums, None, None, None, None, *state, new((0,), query.dtype)], Steps().output(0, 1, 6, 7, 8).steps)
    plan.defaults = {4: length, 5: call.args[1].shape[2]}
    return plan


@kernel("aten._scaled_dot_product_flash_attention_backward.default")
def flash_backward(call: Call) -> Plan:
    """flash_api.cpp, mha_bwd: gradients, one number a row and the sum of dQ in single precision."""
    query, key, value = call.args[1:4]
    batch, heads, length, size = query.shape
    outputs = [_transposed(tuple(tensor.shape), tensor.dtype) for tensor in (query, key, value)]
    rows = -(-length // 128) * 128
    padded = -(-size // 32) * 32 if size <= 128 else -(-size // 64) * 64
    steps = Steps().output(0, 1, 2).temporary(batch * heads * rows * 4, batch * rows * heads * padded * 4)
    return Plan(list(outputs), steps.steps)


def _transposed(size: tuple[int, ...], dtype: torch.dtype) -> New:
    """Kernels write (batch, length, heads, size); the caller sees (batch, heads, length, size)."""
    batch, heads, length, last = size
    return new(size, dtype, (length * heads * last, last, heads * last, 1))


@kernel("aten._scaled_dot_product_efficient_attention.default")
def efficient_forward(call: Call) -> Plan:
    """attention.cu, _efficient_attention_forward: rows of the sums are padded to 32."""
    query, _, value = call.args[:3]
    needs_sums = call.argument(4, "compute_log_sumexp", False)
    batch, heads, length, _ = query.shape
    out = _transposed((batch, heads, length, value.shape[3]), query.dtype)
    rows = -(-length // 32) * 32 if needs_sums else 0
    sums = new((batch, heads, rows), torch.float32)
    plan = Plan([out, sums, None, None])
    plan.host_outputs = {2: torch.int64, 3: torch.int64}
    return plan


@kernel("aten._scaled_dot_product_efficient_attention_backward.default")
def efficient_backward(call: Call) -> Plan:
    """attention_backward.cu, _efficient_attention_backward"""
    return _efficient_backward(call)


def _efficient_backward(call: Call) -> Plan:
    grad_out, query, key, value, bias = call.args[:5]
    mask: Any = call.args[10]
    outputs: list[Any] = [_transposed(tuple(tensor.shape), tensor.dtype) for tensor in (query, key, value)]
    outputs.append(None)
    steps = Steps().output(0, 1, 2)
    if bias is not None and mask[3]:
        outputs[3] = _bias_gradient(bias)
        steps.output(3)
    return Plan(outputs, steps.steps)


def _bias_gradient(bias: torch.Tensor) -> New:
    """Rows of the bias' gradient begin at multiples of 16 bytes' worth of elements."""
    batch, heads, length, last = bias.shape
    rows = -(-last // 8) * 8
    return new(tuple(bias.shape), bias.dtype, (heads * length * rows, length * rows, rows, 1))
