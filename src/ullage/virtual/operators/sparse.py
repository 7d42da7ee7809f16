"""What CUDA does with sparse tensors in kernels of its own.

aten/src/ATen/native/sparse/cuda/SparseCUDATensor.cu, SparseCUDATensorMath.cu, SparseBlasLegacy.cpp
"""

from __future__ import annotations

from typing import Any

import torch

from ullage.virtual.kernels import sorting
from ullage.virtual.operators.gradient_sums import adds_in_place
from ullage.virtual.operators.layouts import coo, own_kernel
from ullage.virtual.state import GPUState

_aten = torch.ops.aten
_INDEX = 8  # bytes of an index


def _taken(gpu: GPUState, *sizes: int) -> None:
    """Temporaries that are taken and given back in turn."""
    for size in sizes:
        gpu.memory.give_back(gpu.memory.take(size))


@own_kernel("aten._coalesce.default")
def coalesce(gpu: GPUState, source: Any) -> Any:
    """SparseCUDATensor.cu, _coalesce_sparse_cuda: flat indices are sorted with their places, equal ones are summed."""
    count, sparse_dim = source._nnz(), source.sparse_dim()
    if count < 2:
        return source.clone()._coalesced_(True)
    values = source._values()
    flat = _flat_indices(gpu, source, clone=True)
    places = torch.empty(count, dtype=torch.int64, device=flat.device)
    offsets = torch.empty(count, dtype=torch.int64, device=flat.device)
    _taken(gpu, sorting.merge_sort(count, _INDEX, _INDEX))
    _taken(gpu, sorting.unique_by_key_in_place(count, _INDEX, gpu.spec))
    known = gpu.values.known(flat)
    if known is not None:
        kept = torch.unique(known)
        different = len(kept)
    else:
        different = min(count, _rows(source))
        kept = None
        gpu.note("shapes", f"coalescing a sparse tensor of {count} values taken as {different} different indices")
    flat.resize_((1, different))
    if kept is not None:
        gpu.values.set(flat, kept.unsqueeze(0))
    summed = torch.empty((different, *values.shape[1:]), dtype=values.dtype, device=values.device)
    if summed.numel():
        values = values.contiguous()
    indices = flat
    if sparse_dim > 1:
        indices = torch.empty((sparse_dim, different), dtype=torch.int64, device=flat.device)
        if kept is not None:
            gpu.values.set(indices, _unflattened(kept, source.shape[:sparse_dim]))
    made = coo(indices, summed, source.shape, coalesced=True)
    del values, indices, summed, offsets, places, flat
    return made


def _flat_indices(gpu: GPUState, source: Any, clone: bool) -> Any:
    """SparseTensorUtils.cpp, flatten_indices: one number an element."""
    indices, sparse_dim = source._indices(), source.sparse_dim()
    if sparse_dim == 1:
        flat = indices.squeeze(0)
        return flat.clone(memory_format=torch.contiguous_format) if clone else flat
    hashed = torch.arange(indices.shape[1], device=indices.device)
    known = gpu.values.known(indices)
    flat = torch.empty_like(hashed)
    del hashed
    if known is not None:
        number = torch.zeros(indices.shape[1], dtype=torch.int64)
        for row, size in zip(known, source.shape, strict=False):
            number = number * size + row
        gpu.values.set(flat, number)
    return flat


def _unflattened(flat: torch.Tensor, sizes: Any) -> torch.Tensor:
    rows = []
    for size in reversed(sizes):
        rows.append(flat % size)
        flat = flat // size
    return torch.stack(rows[::-1])


def _rows(source: Any) -> int:
    """How many different indices there can be."""
    return int(source.shape[: source.sparse_dim()].numel())


@own_kernel("aten.add.Tensor")
def add(gpu: GPUState, first: Any, second: Any, alpha: Any = 1) -> Any:
    """A dense gradient to which autograd adds a sparse one is added to in place, except under a dispatch mode."""
    if first.layout is torch.strided and alpha == 1 and adds_in_place((first, second), frames_up=5):
        return first.add_(second)
    return NotImplemented


@own_kernel("aten.add.out")
def add_out(gpu: GPUState, first: Any, second: Any, alpha: Any = 1, *, out: Any) -> Any:
    """SparseCUDATensorMath.cu, add_out_sparse_cuda: indices and values are put behind one another."""
    if second.layout is not torch.sparse_coo:
        return NotImplemented
    if first.layout is torch.strided:
        return _add_to_dense(gpu, first, second, alpha, out)
    if not second._nnz():
        return out.copy_(first)
    if not first._nnz():
        return NotImplemented
    common = torch.result_type(first, second)
    old, new = first._values().to(common), second._values().to(common)
    if alpha != 1:
        new = new.mul(alpha)
    indices = torch.cat([first._indices(), second._indices()], 1)
    values = torch.cat([old, new], 0)
    del new, old
    made = coo(indices, values, second.shape)
    del indices, values
    if out.dtype is not common or made._nnz() > made.numel():
        made = made.coalesce()
    if out.dtype is not common:
        made = coo(made._indices(), made._values().to(out.dtype), made.shape)
    out.data = made
    return out


def _add_to_dense(gpu: GPUState, dense: Any, sparse: Any, alpha: Any, out: Any) -> Any:
    """add_out_dense_sparse_cuda: coalesced ones by a kernel, others by index_add_."""
    if not sparse._nnz():
        out.resize_as_(dense)
        return out.copy_(dense)
    common = torch.result_type(dense, sparse)
    target = out if out.dtype is common else torch.empty_like(dense, dtype=common)
    before = dense.to(common)
    values = sparse._values().to(common)
    if target is not before and target.data_ptr() != before.data_ptr():
        target.resize_as_(dense)
        target.copy_(before)
    if not values.numel():
        return out
    if sparse.is_coalesced():
        if sparse.dense_dim():
            values = values.contiguous()
    else:
        flat = _flat_indices(gpu, sparse, clone=False)
        rows = _rows(sparse)
        values = values.reshape(sparse._nnz(), -1)
        target.view(rows, -1).index_add_(0, flat, values, alpha=alpha)
        del flat
    if target is not out:
        out.copy_(target)
    gpu.memory.written(out)
    return out


@own_kernel("aten.addmm.default")
def addmm(gpu: GPUState, start: Any, first: Any, second: Any, *, beta: Any = 1, alpha: Any = 1) -> Any:
    """SparseCUDATensorMath.cu, addmm_sparse_dense_cuda."""
    if first.layout is not torch.sparse_coo:
        return NotImplemented
    out = torch.empty(0, dtype=start.dtype, device=start.device)
    return _multiply(gpu, out, start, first, second, beta)


@own_kernel("aten.addmm.out")
def addmm_out(gpu: GPUState, start: Any, first: Any, second: Any, *, beta: Any = 1, alpha: Any = 1, out: Any) -> Any:
    """addmm_out_sparse_dense_cuda"""
    return _multiply(gpu, out, start, first, second, beta) if first.layout is torch.sparse_coo else NotImplemented


@own_kernel("aten.addmm_.default")
def addmm_in_place(gpu: GPUState, out: Any, first: Any, second: Any, *, beta: Any = 1, alpha: Any = 1) -> Any:
    """s_addmm_sparse_dense_cuda_"""
    return _multiply(gpu, out, out, first, second, beta) if first.layout is torch.sparse_coo else NotImplemented


def _multiply(gpu: GPUState, out: Any, start: Any, first: Any, second: Any, beta: Any) -> Any:
    """s_addmm_out_sparse_dense_cuda and its workers: compressed rows with 32-bit indices, column by column."""
    rows, columns = first.shape[0], second.shape[1]
    out.resize_((rows, columns))
    coalesced = first.coalesce()
    indices, count = coalesced._indices(), coalesced._nnz()
    if not count:
        return out.copy_(start * beta)
    compressed = torch.empty(rows + 1, dtype=torch.int32, device=out.device)
    torch.empty(count, dtype=torch.int32, device=out.device).copy_(indices[0])
    columns_of = torch.empty(count, dtype=torch.int32, device=out.device)
    by_column = out if out.stride() == (1, rows) else out.t().clone(memory_format=torch.contiguous_format)
    dense = second if _is_packed(second) else second.contiguous()
    buffer = spmm_buffer(rows, count, columns)
    if buffer:
        _taken(gpu, buffer)
    del dense, by_column, columns_of, compressed
    gpu.memory.written(out)
    return out


def _is_packed(matrix: Any) -> bool:
    rows, columns = matrix.shape
    return matrix.stride() in ((1, rows), (columns, 1))


def spmm_buffer(rows: int, count: int, columns: int) -> int:
    """Bytes that cusparseSpMM asks for."""
    return 0


@own_kernel("aten.mul.out")
def mul_out(gpu: GPUState, first: Any, second: Any, *, out: Any) -> Any:
    """SparseCUDATensorMath.cu, mul_out_sparse_cuda."""
    if second.layout is torch.sparse_coo and first.layout is torch.sparse_coo and first.dim() and second.dim():
        made = _intersection(gpu, first, second, out.dtype)
    elif second.layout is torch.sparse_coo:
        made = _with_dense(first, second, out.dtype)
    else:
        made = _with_dense(second, first, out.dtype)
    out.data = made
    return out


def _with_dense(dense: Any, sparse: Any, dtype: torch.dtype) -> Any:
    """SparseTensorMath.cpp, intersection_binary_op_sparse_dense_out: the dense one is looked up at the indices."""
    if dense.layout is torch.sparse_coo:  # a single number
        dense = dense.coalesce()._values().squeeze(0)
    dense = dense.to(sparse.device) if dense.dim() else dense
    if dense.dim() > sparse.dim():
        return torch.mul(dense, sparse.to_dense()).to_sparse(sparse.sparse_dim() + dense.dim() - sparse.dim())
    indices, values = sparse._indices(), sparse._values()
    if dense.dim() > sparse.dense_dim():
        shape = torch.broadcast_shapes(dense.shape, sparse.shape)[sparse.dim() - dense.dim() :]
        first = sparse.dim() - dense.dim()
        dense = dense.expand(shape)[tuple(indices[row] for row in range(first, sparse.sparse_dim()))]
    copied = indices.clone()
    return coo(copied, torch.mul(dense, values).to(dtype), sparse.shape, sparse.is_coalesced())


def _intersection(gpu: GPUState, first: Any, second: Any, dtype: torch.dtype) -> Any:
    """SparseBinaryOpIntersectionCommon.h: the indices of one are looked for among the sorted ones of the other."""
    if not first._nnz() or not second._nnz():
        return torch.zeros_like(first, dtype=dtype)
    if first.is_coalesced() != second.is_coalesced():
        known, source = (first, second) if first.is_coalesced() else (second, first)
    else:
        known, source = (first, second) if first._nnz() >= second._nnz() else (second, first)
        if known._nnz() // _rows(known) > _MOST_COPIES:
            known = known.coalesce()
    device, count = source.device, source._nnz()
    places = torch.arange(max(known._nnz(), count), device=device)
    hashed = torch.empty(known._nnz(), dtype=torch.int64, device=device)
    order = hashed, places
    if not known.is_coalesced():
        order = tuple(hashed.sort())
    found = torch.empty((2, count), dtype=torch.int64, device=device)
    torch.empty(1, dtype=torch.int64, device=device)
    indices = source._indices().clone()
    values = torch.empty_like(source._values(), dtype=torch.result_type(first, second)).to(dtype)
    made = coo(indices, values, source.shape, source.is_coalesced())
    del values, indices, found, order, hashed, places
    return made


_MOST_COPIES = 50  # MAX_COPIES_PER_THREAD


@own_kernel("aten.index_select.default")
def index_select(gpu: GPUState, source: Any, dim: int, index: Any) -> Any:
    """Indexing.cu, index_select_sparse_cuda: each wanted index may be found at every element."""
    if source.layout is not torch.sparse_coo:
        return NotImplemented
    dim = dim % source.dim()
    indices, values, sparse_dim = source._indices(), source._values(), source.sparse_dim()
    size = [*source.shape[:dim], len(index), *source.shape[dim + 1 :]]
    if dim >= sparse_dim:
        return coo(indices, values.index_select(dim - sparse_dim + 1, index), size)
    device, count = source.device, source._nnz()
    wanted = torch.empty_like(index)
    row = indices[dim].contiguous()
    numbers, places = torch.arange(len(index), device=device), torch.arange(count, device=device)
    ordered = (row, places) if dim == 0 and source.is_coalesced() else tuple(row.sort())
    counts, matches = torch.zeros_like(wanted), torch.zeros_like(wanted)
    total = counts.sum()
    known, asked = gpu.values.known(row), gpu.values.known(index)
    if known is None or asked is None:
        length = count * len(index) if gpu.values.known(index) is None else count
        gpu.note("unbounded shapes", f"index_select of a sparse tensor taken as {length} elements")
    else:
        length = int((known.unsqueeze(0) == (asked % source.shape[dim]).unsqueeze(1)).sum())
    del total
    found = torch.empty(length, dtype=torch.int64, device=device)
    chosen = torch.empty_like(found)
    if length:
        offsets = counts.cumsum(0).sub_(counts)
        torch.empty(1, dtype=torch.int64, device=device)
        del offsets
    picked = torch.empty((sparse_dim, length), dtype=torch.int64, device=device)
    made = coo(picked, values.index_select(0, chosen), size)
    del picked, chosen, found, matches, counts, ordered, numbers, places, row, wanted
    return made
