"""Kernels in Triton as people write them: its compiler reads their source, so they stand in a file of their own."""

import torch
import triton
import triton.language as tl


@triton.jit
def add_kernel(x_ptr, y_ptr, out_ptr, n, BLOCK: tl.constexpr = 1024):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    tl.store(out_ptr + offsets, tl.load(x_ptr + offsets, mask=mask) + tl.load(y_ptr + offsets, mask=mask), mask=mask)


def add(x, y, grid=None):
    out = torch.empty_like(x)
    add_kernel[grid or (lambda meta: (triton.cdiv(x.numel(), meta["BLOCK"]),))](x, y, out, x.numel(), BLOCK=256)
    return out


@triton.autotune(
    configs=[triton.Config({"COLUMNS": 256}, num_warps=4), triton.Config({"COLUMNS": 512}, num_warps=8)],
    key=["n_columns"],
    restore_value=["scale_ptr"],
)
@triton.heuristics({"EVEN": lambda arguments: arguments["n_columns"] % arguments["COLUMNS"] == 0})
@triton.jit
def softmax_kernel(out_ptr, x_ptr, scale_ptr, n_columns, COLUMNS: tl.constexpr, EVEN: tl.constexpr):
    columns = tl.arange(0, COLUMNS)
    start = tl.program_id(0) * n_columns
    row = tl.load(x_ptr + start + columns, mask=columns < n_columns, other=-float("inf"))
    row = tl.exp((row - tl.max(row, axis=0)) * tl.load(scale_ptr))
    tl.store(out_ptr + start + columns, row / tl.sum(row, axis=0), mask=columns < n_columns)


class Softmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, scale):
        out = torch.empty_like(x)
        softmax_kernel[(x.shape[0],)](out, x, scale, x.shape[1])
        ctx.save_for_backward(out)
        return out

    @staticmethod
    def backward(ctx, gradient):
        (out,) = ctx.saved_tensors
        return out * (gradient - (out * gradient).sum(-1, keepdim=True)), None


@triton.jit
def described_kernel(x_ptr, n, BLOCK: tl.constexpr):
    x = tl.make_tensor_descriptor(x_ptr, shape=[n, BLOCK], strides=[BLOCK, 1], block_shape=[1, BLOCK])
    row = tl.program_id(0)
    x.store([row, 0], x.load([row, 0]))
