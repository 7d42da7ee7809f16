"""Fused attention: outputs, tensors saved for the backward pass, and temporaries."""

import math
from typing import Any, NamedTuple

import torch

from ullage.hardware import GPU
from ullage.units import ceil_div, round_up
from ullage.virtual.call.plan import CUDNN, Call, New, Output, Plan, Steps, bytes_of, is_contiguous, kernel, new

_MUCH_SHARED = 164  # KiB of shared memory a multiprocessor: data-centre cards since the A100


def _like_layout(size: tuple[int, ...], source: torch.Tensor, dtype: torch.dtype) -> New:
    """Return an output with the source's order of dimensions (MHA.cpp, alloc_with_matching_layout)."""
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
    outputs: list[Output] = [out, sums, None, None, None, None, number, number, None]
    steps = Steps().output(6, 7, 0)
    if needs_sums:
        steps.output(1)
    if length > 1:  # a single row is another kernel, without workspace
        steps.temporary(256)
    plan = steps.plan(*outputs, library=CUDNN)
    plan.defaults = {4: length, 5: key.shape[2]}
    return plan


@kernel("aten._scaled_dot_product_cudnn_attention_backward.default")
def cudnn_backward(call: Call) -> Plan:
    """MHA.cpp, run_cudnn_SDP_bprop: sums of the gradient in single precision, and one number a row."""
    query, key, value = call.args[1:4]
    outputs = [_like_layout(tuple(tensor.shape), tensor, tensor.dtype) for tensor in (query, key, value)]
    batch, heads, length, size = query.shape
    accumulated = query.numel() * 4 + batch * heads * length * 4 + 256
    if key.shape[1] != heads:  # grouped heads: dK and dV of every query head, summed afterwards
        accumulated += batch * heads * key.shape[2] * (size + value.shape[3]) * query.element_size()
    return Steps().output(0, 1, 2).temporary(accumulated).plan(*outputs)


@kernel("aten._scaled_dot_product_flash_attention.default")
def flash_forward(call: Call) -> Plan:
    """flash_api.cpp, mha_fwd: short runs split the keys among blocks and keep their partial results."""
    query, key, value = call.args[:3]
    batch, heads, length, size = query.shape
    out = _transposed((batch, heads, length, value.shape[3]), query.dtype)
    sums = new((batch, heads, length), torch.float32)
    state = [new((2,), torch.uint64), new((), torch.uint64)]
    steps = Steps().output(0, 1)
    splits = 1
    if not call.argument(3, "dropout_p", 0.0):
        splits = _splits(batch * heads * ceil_div(length, 64), key.shape[2], size, 2 * call.gpu.multiprocessors)
    if splits > 1:
        rows = splits * batch * heads * length
        steps.temporary(rows * 4, rows * _rounded_head(size) * 4)
    steps.output(6, 7, 8)
    if splits > 1:
        steps.free(0, 1)
    plan = steps.plan(out, sums, None, None, None, None, *state, new((0,), query.dtype))
    plan.defaults = {4: length, 5: key.shape[2]}
    return plan


def _rounded_head(size: int) -> int:
    """Flash attention's tiles: multiples of 32 up to 128, of 64 above."""
    return round_up(size, 32 if size <= 128 else 64)


def _splits(blocks: int, keys: int, size: int, slots: int) -> int:
    """flash_api.cpp, num_splits_heuristic: as many splits as bring the multiprocessors near their best use."""
    if blocks >= 0.8 * slots:
        return 1
    key_blocks = ceil_div(keys, 256 if size <= 64 else 128 if size <= 128 else 64)
    use: dict[int, float] = {}
    for splits in range(1, min(128, slots, key_blocks) + 1):
        if splits == 1 or ceil_div(key_blocks, splits) != ceil_div(key_blocks, splits - 1):
            waves = blocks * splits / slots
            use[splits] = waves / math.ceil(waves)
    return next(splits for splits, value in use.items() if value >= 0.85 * max(use.values()))


@kernel("aten._scaled_dot_product_flash_attention_backward.default")
def flash_backward(call: Call) -> Plan:
    """flash_api.cpp, mha_bwd: gradients, one number a row and the sum of dQ in single precision; in deterministic
    mode, every multiprocessor has its own sum."""
    query, key, value = call.args[1:4]
    batch, heads, length, size = query.shape
    outputs = [_transposed(tuple(tensor.shape), tensor.dtype) for tensor in (query, key, value)]
    copies = [_transposed_copy(tensor) for tensor in (call.args[0], call.args[4])]  # of the gradient and the output
    rows = round_up(length, 128)
    padded = _rounded_head(size)
    sums = ceil_div(call.gpu.multiprocessors, batch * heads) if is_deterministic() else 1
    steps = Steps().temporary(*copies).output(0, 1, 2)
    steps.temporary(batch * heads * rows * 4, sums * batch * rows * heads * padded * 4)
    if key.shape[1] != heads:  # grouped heads: dK and dV of every query head, summed afterwards
        expanded = batch * key.shape[2] * heads * size * query.element_size()
        steps.temporary(expanded, expanded)
    return steps.plan(*outputs)


def is_deterministic() -> bool:
    return bool(torch._C._get_deterministic_algorithms() and not torch._C._get_deterministic_algorithms_warn_only())


def _transposed(size: tuple[int, ...], dtype: torch.dtype) -> New:
    """Return an output written as (batch, length, heads, size) and seen as (batch, heads, length, size)."""
    batch, heads, length, last = size
    return new(size, dtype, (length * heads * last, last, heads * last, 1))


def _transposed_copy(tensor: torch.Tensor) -> int:
    """Return the bytes of a copy in the order (batch, length, heads, size); none if the tensor has this order."""
    order = (0, 2, 1, 3)
    lies_so = is_contiguous([tensor.shape[dim] for dim in order], [tensor.stride(dim) for dim in order])
    return 0 if lies_so else bytes_of(tensor)


@kernel("aten._scaled_dot_product_efficient_attention.default")
def efficient_forward(call: Call) -> Plan:
    """attention.cu, _efficient_attention_forward: rows of the sums are padded to 32."""
    query, _, value = call.args[:3]
    needs_sums = call.argument(4, "compute_log_sumexp", False)
    batch, heads, length, _ = query.shape
    out = _transposed((batch, heads, length, value.shape[3]), query.dtype)
    rows = round_up(length, 32) if needs_sums else 0
    sums = new((batch, heads, rows), torch.float32)
    steps = Steps().output(0, 1)
    if query.dtype is not torch.float32 and value.shape[3] > 128:  # too large for registers: summed in memory
        steps.temporary(batch * heads * length * value.shape[3] * 4)
    plan = steps.plan(out, sums, None, None)
    plan.host_outputs = {2: torch.int64, 3: torch.int64}
    return plan


class _Tiling(NamedTuple):
    """The tiles of the backward kernel's matrices: rows of queries, columns of keys."""

    rows: int
    columns: int
    in_registers: bool  # sums of dK and dV; else they are in memory, in single precision
    sums_rows: bool  # of grad * out; else that is left to PyTorch

    def workspace(self, query: torch.Tensor, value: torch.Tensor, splits: int) -> int:
        """kernel_backward.h, workspace_strideBH: bytes a head, for tiles of dQ with a lock, a counter and padding."""
        length, size = query.shape[2:]
        tiles = ceil_div(length, self.rows) * ceil_div(size, self.columns) * (16 + self.rows * self.columns * 4)
        if query.dtype is torch.float32 or self.in_registers:
            return int(tiles)
        heads = sum(round_up(head, self.rows) for head in (size, value.shape[3]))
        return int(tiles + splits * self.columns * heads * 4)

    def splits(self, heads: int, keys: int, half: bool) -> int:
        """Return the number of parts of the keys: fewer if each part needs memory for its sums."""
        if is_deterministic():
            return 1
        parts = ceil_div(keys, self.columns)
        return max(1, min(parts, 200 // heads)) if half and not self.in_registers else parts


def backward_tiling(size: int, dtype: torch.dtype, gpu: GPU, dropout: bool) -> _Tiling:
    """Return the kernel that runs for heads of this size: the first that the GPU has the shared memory for.

    Kernels and their order are in mem_eff_attention/kernels/cutlassB.h. Tiles of 128 rows fit on data-centre cards of
    compute capability 8.0 and later and on Volta; Turing and the other cards have too little shared memory
    (kernels/generate_kernels.py says which). Compute capability 8.6 and 8.9 have one kernel more, for heads up to 96.
    """
    capability, half = gpu.capability, dtype is not torch.float32
    ampere, volta = capability >= (8, 0), (7, 0) <= capability < (7, 5)
    if size <= 64:
        return _Tiling(64, 64, half, half)
    if half and size <= 96 and capability in ((8, 6), (8, 9)) and not dropout:
        return _Tiling(128, 64, True, True)
    if ampere and gpu.shared_memory_kib < _MUCH_SHARED or not (ampere or (volta and half)):
        return _Tiling(64, 64, False, half and not volta)
    narrow = size <= 128 and half
    return _Tiling(128, 128 if narrow and ampere else 64, narrow, half and (narrow or not volta))


@kernel("aten._scaled_dot_product_efficient_attention_backward.default")
def efficient_backward(call: Call) -> Plan:
    """attention_backward.cu, _efficient_attention_backward; mem_eff_attention/kernel_backward.h"""
    grad, query, key, value, bias = call.args[:5]
    batch, heads, length, _ = query.shape
    outputs: list[Any] = [_transposed(tuple(tensor.shape), tensor.dtype) for tensor in (query, key, value)]
    steps = Steps().temporary(_transposed_copy(grad)).output(0, 1, 2)
    if bias is not None and call.args[10][3]:  # rows of the bias' gradient are padded to multiples of 16 elements
        padded = new((*bias.shape[:3], round_up(bias.shape[3], 16)), bias.dtype)
        outputs.append(padded._replace(size=tuple(bias.shape)))
        steps.output(3)
    else:
        outputs.append(None)
    row_numbers = batch * heads * length * 4
    half = query.dtype is not torch.float32
    tiling = backward_tiling(max(query.shape[3], value.shape[3]), query.dtype, call.gpu, bool(call.args[9]))
    if not tiling.sums_rows:  # the kernel leaves the row sums of grad * out, in single precision, to PyTorch
        whole = batch * heads * length * value.shape[3] * 4
        casts = [steps.take(whole) for _ in range(2 if half else 0)]
        steps.temporary(whole, row_numbers)
        if length > 1 and heads > 1:  # else the transposition needs no copy
            steps.temporary(row_numbers).free(-2, -3)
        else:
            steps.free(-2)
        steps.free(*reversed(casts))
    else:
        steps.temporary(row_numbers)
    splits = tiling.splits(batch * heads, key.shape[2], half)
    if half or call.gpu.capability >= (7, 0):
        steps.temporary(batch * heads * tiling.workspace(query, value, splits)).free(-2, -1)
    else:
        steps.free(-1)
    return steps.plan(*outputs)
