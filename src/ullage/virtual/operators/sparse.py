"""CUDA's own kernels for sparse tensors (aten/src/ATen/native/sparse/cuda/SparseCUDATensor.cu,
SparseCUDATensorMath.cu, SparseBlasLegacy.cpp)."""

from typing import Any

import torch

from ullage.units import ceil_div
from ullage.virtual.operators import sorting
from ullage.virtual.operators.compressed import products, take_for_product
from ullage.virtual.operators.gradient_sums import adds_in_place
from ullage.virtual.operators.layouts import coo, own_kernel
from ullage.virtual.state import GPUState

_aten = torch.ops.aten
_INDEX = 8  # bytes of an index


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
    gpu.memory.take_in_turn(sorting.merge_sort(count, _INDEX, _INDEX))
    gpu.memory.take_in_turn(sorting.unique_by_key_in_place(count, _INDEX, gpu.spec))
    known = None if gpu.values.is_supposed(flat) else gpu.values.known(flat)
    if known is not None:
        distinct = torch.unique(known)
        different = len(distinct)
    else:
        different = min(count, _rows(source))
        distinct = None
        gpu.note("shapes", f"coalescing {count} sparse values is assumed to leave {different} different indices")
    flat.resize_((1, different))
    if distinct is not None:
        gpu.values.set(flat, distinct.unsqueeze(0))
    summed = torch.empty((different, *values.shape[1:]), dtype=values.dtype, device=values.device)
    if summed.numel():
        values = values.contiguous()
    indices = flat
    if sparse_dim > 1:
        indices = torch.empty((sparse_dim, different), dtype=torch.int64, device=flat.device)
        if distinct is not None:
            gpu.values.set(indices, _unflattened(distinct, source.shape[:sparse_dim]))
    made = coo(indices, summed, source.shape, coalesced=True)
    del values, indices, summed, offsets, places, flat
    return made


def _flat_indices(gpu: GPUState, source: Any, clone: bool) -> Any:
    """SparseTensorUtils.cpp, flatten_indices: one number an element."""
    indices, sparse_dim = source._indices(), source.sparse_dim()
    if sparse_dim == 1:
        flat = indices.squeeze(0)
        return flat.clone(memory_format=torch.contiguous_format) if clone else flat
    flat = torch.empty(indices.shape[1], dtype=torch.int64, device=indices.device)
    known = gpu.values.known(indices)
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
    """Return the largest number of different indices."""
    return int(source.shape[: source.sparse_dim()].numel())


@own_kernel("aten.clone.default")
def clone(gpu: GPUState, source: Any, memory_format: Any = None) -> Any:
    """accumulate_grad.h: a leaf takes over its first gradient if that is contiguous, except under a dispatch mode."""
    indices, values = source._indices(), source._values()
    is_first = not torch.is_grad_enabled() and type(torch._C._current_autograd_node()).__name__ == "AccumulateGrad"
    if not (is_first and indices.is_contiguous() and values.is_contiguous()):
        return NotImplemented
    return coo(indices, values, source.shape, source.is_coalesced())


@own_kernel("aten.add.Tensor")
def add(gpu: GPUState, first: Any, second: Any, alpha: Any = 1) -> Any:
    """Add two tensors; autograd adds a sparse gradient to a dense one in place, except under a dispatch mode."""
    if first.layout is torch.strided and alpha == 1 and adds_in_place((first, second), frames_up=5):
        return first.add_(second)
    return NotImplemented


@own_kernel("aten.add.out")
def add_out(gpu: GPUState, first: Any, second: Any, alpha: Any = 1, *, out: Any) -> Any:
    """SparseCUDATensorMath.cu, add_out_sparse_cuda: indices and values are concatenated."""
    if second.layout is not torch.sparse_coo:
        return NotImplemented
    if first.layout is torch.strided:
        return _add_to_dense(gpu, first, second, alpha, out)
    if not second._nnz():
        return out.copy_(first)
    if not first._nnz():
        out.data = coo(second._indices().clone(), second._values().mul(alpha), second.shape, second.is_coalesced())
        return out
    common = torch.result_type(first, second)
    old_indices, old, new = first._indices(), first._values().to(common), second._values().to(common)
    if alpha != 1:
        new = new.mul(alpha)
    indices = torch.cat([old_indices, second._indices()], 1)
    values = torch.cat([old, new], 0)
    made = coo(indices, values, second.shape)
    del indices, values
    if out.dtype is not common or made._nnz() > made.numel():
        made = made.coalesce()
    out.data = coo(made._indices(), made._values().to(out.dtype), made.shape)
    del made, new, old, old_indices
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


@own_kernel("aten.addmm.default", "aten.addmm.out")
def addmm(gpu: GPUState, start: Any, first: Any, second: Any, *, beta: Any = 1, alpha: Any = 1, out: Any = None) -> Any:
    """SparseCUDATensorMath.cu, addmm_sparse_dense_cuda and addmm_out_sparse_dense_cuda."""
    out = torch.empty(0, dtype=start.dtype, device=start.device) if out is None else out
    return _multiply(gpu, out, start, first, second, beta)


@own_kernel("aten.addmm_.default")
def addmm_in_place(gpu: GPUState, out: Any, first: Any, second: Any, *, beta: Any = 1, alpha: Any = 1) -> Any:
    """s_addmm_sparse_dense_cuda_"""
    return _multiply(gpu, out, out, first, second, beta)


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
    dense = second if second.stride() in ((1, second.shape[0]), (columns, 1)) else second.contiguous()
    gpu.memory.take_in_turn(spmm_buffer(count, columns, out.element_size()))
    del dense, by_column, columns_of, compressed
    gpu.memory.written(out)
    return out


def spmm_buffer(count: int, columns: int, itemsize: int) -> int:
    """Return the bytes that cusparseSpMM requests with CUSPARSE_SPMM_CSR_ALG1, measured with CUDA 13.0."""
    elements_a_block = 256 if columns > 1 else 4096 if itemsize == 4 else 3584
    return 4 * ceil_div(count, elements_a_block) + 7


@own_kernel("aten.hspmm.default")
def hspmm(gpu: GPUState, first: Any, second: Any) -> Any:
    """SparseCUDATensorMath.cu, hspmm_out_sparse_cuda: rows with values, each a product of its own."""
    coalesced = first.coalesce()
    count, device = coalesced._nnz(), second.device
    indices = torch.empty((1, count), dtype=torch.int64, device=device)
    values = torch.empty((second.shape[1], count), dtype=second.dtype, device=device).t()
    copied = coalesced.clone()
    rows = coo(copied._indices(), copied._values(), (count, first.shape[1]), coalesced=True)
    _multiply(gpu, values, values, rows, second, 0)
    return coo(indices, values, (first.shape[0], second.shape[1]))


@own_kernel("aten.bmm.default")
def bmm(gpu: GPUState, first: Any, second: Any) -> Any:
    """SparseCUDATensorMath.cu, bmm_out_sparse_cuda: 32-bit indices, and where each matrix ends."""
    matrices, rows, _ = first.shape
    out = torch.empty((matrices, second.shape[2], rows), dtype=second.dtype, device=second.device)
    dense = second.contiguous()
    coalesced = first.coalesce()
    indices = coalesced._indices()
    narrow = indices[1].to(torch.int32), indices[2].to(torch.int32)
    gpu.memory.take_in_turn(matrices * _INDEX)
    del narrow, indices, coalesced, dense
    return out.transpose(1, 2)


@own_kernel("aten._sparse_sparse_matmul.default")
def sparse_sparse_matmul(gpu: GPUState, first: Any, second: Any) -> Any:
    """SparseMatMul.cu, sparse_sparse_matmul_cuda_kernel, with cusparseSpGEMM."""
    other, one = second.coalesce(), first.coalesce()
    rows, columns, device = first.shape[0], second.shape[1], first.device
    inner = [_compressed_rows(matrix) for matrix in (one, other)]
    known = gpu.values.known(other._indices())
    lengths = None if known is None else torch.bincount(known[0], minlength=second.shape[0])
    columns_of_one = gpu.values.known(one._indices())
    count = products(gpu, None if columns_of_one is None else columns_of_one[1], lengths, (rows, columns))
    pointers = torch.empty(rows + 1, dtype=torch.int32, device=device)
    buffers = take_for_product(gpu, one._nnz(), count, rows)
    values = torch.empty(count, dtype=first.dtype, device=device)
    places = torch.empty(count, dtype=torch.int32, device=device)
    for buffer in reversed(buffers):
        gpu.memory.give_back(buffer)
    indices = torch.empty((2, count), dtype=torch.int64, device=device)
    del pointers, places, inner
    return coo(indices, values, (rows, columns), coalesced=True)


def _compressed_rows(matrix: Any) -> Any:
    """Pointers to rows, and columns, in 32 bits."""
    pointers = torch.empty(matrix.shape[0] + 1, dtype=torch.int32, device=matrix.device)
    matrix._indices()[0].to(torch.int32)
    return pointers, matrix._indices()[1].to(torch.int32)


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
    """SparseTensorMath.cpp, intersection_binary_op_sparse_dense_out: the dense tensor is read at the indices."""
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
    """SparseBinaryOpIntersectionCommon.h: the indices of one are searched among the sorted indices of the other."""
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
    order: Any = None
    if not known.is_coalesced():
        order = hashed.sort()
    pairs = torch.empty((2, count), dtype=torch.int64, device=device)
    torch.empty(1, dtype=torch.int64, device=device)
    indices = source._indices().clone()
    values = torch.empty_like(source._values(), dtype=torch.result_type(first, second)).to(dtype)
    made = coo(indices, values, source.shape, source.is_coalesced())
    del values, indices, pairs, order, hashed, places
    return made


_MOST_COPIES = 50  # MAX_COPIES_PER_THREAD


@own_kernel("aten.index_select.default")
def index_select(gpu: GPUState, source: Any, dim: int, index: Any) -> Any:
    """Indexing.cu, index_select_sparse_cuda: each requested index may match every element."""
    dim = dim % source.dim()
    indices, values, sparse_dim = source._indices(), source._values(), source.sparse_dim()
    size = [*source.shape[:dim], len(index), *source.shape[dim + 1 :]]
    if dim >= sparse_dim:
        return coo(indices, values.index_select(dim - sparse_dim + 1, index), size)
    device, count = source.device, source._nnz()
    wanted = torch.empty_like(index)
    row = indices[dim].contiguous()
    numbers, places = torch.arange(len(index), device=device), torch.arange(count, device=device)
    ordered: Any = None if dim == 0 and source.is_coalesced() else row.sort()
    counts, matches = torch.zeros_like(wanted), torch.zeros_like(wanted)
    total = counts.sum()
    known_row, known_index = gpu.values.known(row), gpu.values.known(index)
    if known_row is None or known_index is None:
        length = count * len(index) if gpu.values.known(index) is None else count
        gpu.note("unbounded shapes", f"index_select of a sparse tensor is assumed to have {length} elements")
    else:
        length = int((known_row.unsqueeze(0) == (known_index % source.shape[dim]).unsqueeze(1)).sum())
    del total
    positions = torch.empty(length, dtype=torch.int64, device=device)
    chosen = torch.empty_like(positions)
    if length:
        offsets = counts.cumsum(0).sub_(counts)
        torch.empty(1, dtype=torch.int64, device=device)
        del offsets
    picked = torch.empty((sparse_dim, length), dtype=torch.int64, device=device)
    made = coo(picked, values.index_select(0, chosen), size)
    del picked, chosen, positions, matches, counts, ordered, numbers, places, row, wanted
    return made


@own_kernel(
    "aten._sparse_softmax.default",
    "aten._sparse_log_softmax.default",
    "aten._sparse_softmax_backward_data.default",
    "aten._sparse_log_softmax_backward_data.default",
)
def softmax(gpu: GPUState, source: Any, *rest: Any) -> Any:
    """SoftMax.cu: the elements are sorted into pools, one for each place in the other dimensions."""
    backward = isinstance(rest[0], torch.Tensor)
    dim = (rest[1] if backward else rest[0]) % source.dim()
    coalesced = source.coalesce()
    others = [rest[0].coalesce()] if backward else []
    indices, values = coalesced._indices(), coalesced._values()
    new_values = torch.empty_like(values)
    new_indices = indices.clone()
    count, sparse_dim = coalesced._nnz(), source.sparse_dim()
    if dim < sparse_dim and count:
        _add_pools(gpu, source, dim, count, values[0].numel() * values.element_size(), backward)
    del others
    return coo(new_indices, new_values, source.shape, coalesced=True)


def _add_pools(gpu: GPUState, source: Any, dim: int, count: int, width: int, backward: bool) -> None:
    sparse_dim = source.sparse_dim()
    pools = min(count, _rows(source) // max(1, source.shape[dim]))
    known = gpu.values.known(source._indices())
    if known is not None and sparse_dim > 1:
        pools = torch.unique(torch.cat([known[:dim], known[dim + 1 :]]), dim=1).shape[1]
    sizes = gpu.memory.take(sparse_dim * _INDEX)
    taken = [gpu.memory.take(count * _INDEX)]
    gpu.memory.give_back(sizes)
    taken.append(gpu.memory.take(count * _INDEX))
    gpu.memory.take_in_turn(sorting.merge_sort(count, _INDEX, 0))
    taken.append(gpu.memory.take(count * _INDEX))
    gpu.memory.take_in_turn(sorting.unique_by_key_in_place(count, _INDEX, gpu.spec))
    taken.append(gpu.memory.take(pools * _INDEX))
    gpu.memory.take_in_turn(sorting.scan(pools, _INDEX))
    if not backward:
        taken.append(gpu.memory.take(pools * width))
    for span in taken:
        gpu.memory.give_back(span)


@own_kernel("aten._sparse_sum_backward.default")
def sum_backward(gpu: GPUState, grad: Any, source: Any, dims: Any) -> Any:
    """SparseCUDATensorMath.cu, _sparse_sum_backward_cuda."""
    coalesced = source.coalesce()
    indices, values, sparse_dim = coalesced._indices(), coalesced._values(), source.sparse_dim()
    summed = {dim % source.dim() for dim in dims}
    if grad.layout is torch.sparse_coo and not summed.isdisjoint(range(sparse_dim)):
        mine = grad.coalesce()
        made = torch.empty_like(values, dtype=grad.dtype)
        positions = [torch.zeros(size, dtype=torch.int64, device=grad.device) for size in (mine._nnz(), len(values))]
        positions.append(torch.empty_like(positions[1]))
        del positions, mine
    else:
        made = torch.empty_like(values, dtype=grad.dtype)
    return coo(indices.clone(), made, source.shape, source.is_coalesced())
