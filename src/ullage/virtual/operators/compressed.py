"""CUDA's own kernels for compressed sparse tensors (CSR and CSC), most of them cuSPARSE's.

aten/src/ATen/native/sparse/cuda/SparseBlas.cpp, SparseBlasImpl.cpp, aten/src/ATen/native/TensorConversions.cpp
"""

from typing import Any

import torch

from ullage.units import ceil_div
from ullage.virtual.operators.layouts import compressed, inner_indices, own_kernel
from ullage.virtual.state import GPUState

_BY_ROWS, _BY_COLUMNS = torch.sparse_csr, torch.sparse_csc


@own_kernel("aten._to_sparse_csr.default", "aten._to_sparse_csc.default", compressed=True)
def flip(gpu: GPUState, source: Any, dense_dim: int | None = None) -> Any:
    """TensorConversions.cpp, sparse_compressed_to_flipped: by coordinates, sorted the other way, compressed again."""
    pointers, indices = inner_indices(source)
    if pointers.dim() != 1 or source.layout not in (_BY_ROWS, _BY_COLUMNS):
        return NotImplemented
    values, narrow = source.values(), pointers.dtype is torch.int32
    count, major = len(indices), source.shape[0 if source.layout is _BY_ROWS else 1]
    wrapped = torch.full((1,), count, dtype=pointers.dtype, device=pointers.device)
    offset = wrapped.expand(1).cumsum(-1).sub_(wrapped)
    del wrapped
    moved = pointers[:-1].add(offset)
    whole = torch.empty(len(moved) + 1, dtype=pointers.dtype, device=pointers.device)
    del moved
    both = torch._convert_indices_from_csr_to_coo(whole, indices, out_int32=narrow, transpose=True)
    batch = both[1].div(major, rounding_mode="trunc")
    batch * 1
    del batch
    hashed = torch.empty(count, dtype=torch.int64, device=indices.device)
    order = hashed.sort()[1]
    sorted_indices = both.index_select(1, order)
    new_values = values.index_select(0, order)
    other = source.shape[1 if source.layout is _BY_ROWS else 0]
    flat = torch._convert_indices_from_coo_to_csr(sorted_indices[0], other, out_int32=narrow)
    new_pointers = torch.empty_like(flat)
    torch.empty(other, dtype=flat.dtype, device=flat.device)
    del flat
    layout = _BY_COLUMNS if source.layout is _BY_ROWS else _BY_ROWS
    made = compressed(new_pointers, sorted_indices[1], new_values, source.shape, layout)
    del new_pointers, new_values, sorted_indices, order, hashed, both, whole, offset
    return made


@own_kernel("aten.addmm.out", compressed=True)
def addmm_out(gpu: GPUState, start: Any, first: Any, second: Any, *, beta: Any = 1, alpha: Any = 1, out: Any) -> Any:
    """SparseBlas.cpp, addmm_out_sparse_compressed_cuda, and SparseBlasImpl.cpp, addmm_out_sparse_csr."""
    if out.layout is not torch.strided:
        gpu.refuse("a sum with a product of two compressed sparse matrices", "multiply first, and add then")
    if out is not start:
        out.resize_((first.shape[0], second.shape[1]))
        if beta != 0:
            out.copy_(start)
    if first.layout is torch.strided:
        rows = second.transpose(0, 1)
        if second.layout is _BY_ROWS:
            rows = rows.to_sparse_csr()
        _multiply(gpu, rows, first.transpose(0, 1), out.transpose(0, 1))
    else:
        _multiply(gpu, first if first.layout is _BY_ROWS else first.to_sparse_csr(), second, out)
    gpu.memory.written(out)
    return out


@own_kernel("aten.addmm.default", compressed=True)
def addmm(gpu: GPUState, start: Any, first: Any, second: Any, *, beta: Any = 1, alpha: Any = 1) -> Any:
    """SparseBlasImpl.cpp, spgemm, for a product of two sparse matrices: with indices of 32 bits, which it keeps."""
    if torch.strided in (first.layout, second.layout) or start.layout is torch.strided or start._nnz():
        return NotImplemented
    size, device = (first.shape[0], second.shape[1]), first.device
    one, other = (each if each.layout is _BY_ROWS else each.to_sparse_csr() for each in (first, second))
    narrow = [part.to(torch.int32) for each in (one, other) for part in inner_indices(each)]
    pointers = inner_indices(start)[0].to(torch.int32)
    known = gpu.values.known(other.crow_indices())
    lengths = None if known is None else known.diff()
    count = products(gpu, gpu.values.known(one.col_indices()), lengths, size)
    buffers = take_for_product(gpu, one._nnz(), count, size[0])
    indices = torch.empty(count, dtype=torch.int32, device=device)
    values = torch.empty(count, dtype=first.dtype, device=device)
    for buffer in reversed(buffers):
        gpu.memory.give_back(buffer)
    del narrow
    return compressed(pointers, indices, values, size, _BY_ROWS)


def products(gpu: GPUState, columns: Any, lengths: Any, size: tuple[int, int]) -> int:
    """Return the elements of a product of two sparse matrices: at most one for each product of an element of the first
    with one in the row of the second that its column selects; all elements if the columns or lengths are unknown."""
    most = size[0] * size[1]
    if columns is not None and lengths is not None:
        return min(most, int(lengths[columns].sum()))
    gpu.note("products", f"a product of sparse matrices is assumed to have all {most} elements")
    return most


def take_for_product(gpu: GPUState, count: int, products: int, rows: int) -> list[Any]:
    """Allocate the buffers that cusparseSpGEMM requests, by a fitted formula."""
    gpu.note("operators", "buffers of a product of two sparse matrices follow a formula for cuSPARSE")
    return [gpu.memory.take(12 * count + 1079), gpu.memory.take(20 * products + 18 * rows + 4900)]


def _multiply(gpu: GPUState, rows: Any, dense: Any, out: Any) -> None:
    """SparseBlasImpl.cpp, spmm: matrices that are neither by rows nor by columns are copied."""
    target, other = _prepared(out), _prepared(dense)
    gpu.memory.take_in_turn(spmm_buffer(rows._nnz(), out.shape[1]))
    del other, target


def _prepared(matrix: Any) -> Any:
    """prepare_dense_matrix_for_cusparse"""
    rows, columns = matrix.shape
    steps = matrix.stride()
    if (steps[1] == 1 and steps[0] >= max(1, columns)) or (steps[0] == 1 and steps[1] >= max(1, rows)):
        return matrix
    return matrix.clone(memory_format=torch.contiguous_format)


@own_kernel("aten.addmv.out", compressed=True)
def addmv_out(gpu: GPUState, start: Any, matrix: Any, vector: Any, *, beta: Any = 1, alpha: Any = 1, out: Any) -> Any:
    """SparseBlas.cpp, addmv_out_sparse_compressed_cuda."""
    if matrix.layout is _BY_COLUMNS:
        matrix = matrix.to_sparse_csr()
    if out is not start:
        out.resize_((matrix.shape[0],))
        if beta != 0:
            out.copy_(start)
    target, other = (x if x.is_contiguous() else x.contiguous() for x in (out, vector))
    gpu.memory.take_in_turn(spmm_buffer(matrix._nnz(), columns=1))
    del other, target
    gpu.memory.written(out)
    return out


@own_kernel("aten.sparse_sampled_addmm.default", compressed=True)
def sampled_addmm(gpu: GPUState, source: Any, first: Any, second: Any, *, beta: Any = 1, alpha: Any = 1) -> Any:
    """SparseBlas.cpp, sparse_sampled_addmm_sparse_csr_cuda."""
    pointers, indices = inner_indices(source)
    torch.empty(1, dtype=pointers.dtype, device=pointers.device)
    copied = pointers.clone(), indices.clone(), source.values().clone()
    one, other = _prepared(first), _prepared(second)
    gpu.memory.take_in_turn(1)
    del other, one
    return compressed(*copied, source.shape, source.layout)


def spmm_buffer(count: int, columns: int) -> int:
    """Return the bytes for cusparseSpMM with CUSPARSE_SPMM_CSR_ALG2, and cusparseSpMV; measured with CUDA 13.0."""
    return 8 * (ceil_div(count, 24) if columns > 1 else 1 + ceil_div(count, 3072)) + 7
