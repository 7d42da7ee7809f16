"""Operators with which FSDP gathers and scatters (aten/src/ATen/native/cuda/TensorShape.cu): a table of addresses and
sizes goes to the GPU before the kernel starts."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from ullage.units import ceil_div
from ullage.virtual.call.plan import Call, Plan, Steps, is_dense, kernel

_BLOCK, _TILE, _ENTRY = 128, 2048, 8  # threads of a block; bytes that it moves; bytes of an entry of a table


@kernel("aten.split_with_sizes_copy.out")
def split_copy(call: Call) -> Plan:
    """split_with_sizes_copy_out_cuda_contiguous_no_cast, if layouts and types allow it."""
    plan, source, sizes = call.infer(), call.args[0], call.args[1]
    out = call.kwargs["out"]
    if not _dense([source, *out]) or any(tensor.dtype is not source.dtype for tensor in out):
        return plan
    dim = call.argument(2, "dim", 0) % source.dim()
    chunks = source.shape[:dim].numel()
    lengths = [size * source.stride(dim) * source.element_size() for size in sizes]
    most = call.gpu.multiprocessors * call.gpu.threads_per_sm // _BLOCK * 2
    factor = ceil_div(sum(ceil_div(length, _TILE) for length in lengths) * chunks, most)
    rounds = ceil_div(factor, max(1, min(math.ceil(math.sqrt(factor)), chunks)))
    blocks = sum(ceil_div(length, _TILE * max(1, rounds)) for length in lengths)
    return replace(plan, steps=Steps().temporary((4 * len(sizes) + 1 + blocks) * _ENTRY).steps)


@kernel("aten._chunk_cat.default", "aten._chunk_cat.out")
def chunk_cat(call: Call) -> Plan:
    """get_chunk_cat_metadata; without an `out` the table comes before the result."""
    plan, tensors, out = call.infer(), call.args[0], call.kwargs.get("out")
    dim, chunks = call.args[1] % tensors[0].dim(), call.args[2]
    kind = tensors[0].dtype if out is None else out.dtype
    cast = (torch.bfloat16, torch.float32)
    if not _dense(tensors) or (kind is not tensors[0].dtype and (tensors[0].dtype, kind) != cast):
        return plan
    blocks = 0
    for tensor in tensors:
        trailing = tensor.shape[dim + 1 :].numel()
        blocks += ceil_div(ceil_div(tensor.shape[dim], chunks) * trailing * kind.itemsize, _TILE)
    steps = Steps().temporary((6 * len(tensors) + 2 + blocks) * _ENTRY)
    return replace(plan, steps=(steps.output(0) if out is None else steps).steps)


def _dense(tensors: Sequence[Any]) -> bool:
    return all(is_dense(tensor.shape, tensor.stride()) for tensor in tensors)
