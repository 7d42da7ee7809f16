"""Matrix decompositions and solvers, with the workspaces of cuSOLVER, cuBLAS and MAGMA.

aten/src/ATen/native/BatchLinearAlgebra.cpp makes the copies, in the order of columns, and
aten/src/ATen/native/cuda/linalg/BatchLinearAlgebra.cpp selects the library, by the conditions below. cuBLAS needs
arrays of pointers. MAGMA uses no memory of PyTorch's allocator. cuSOLVER's documentation names no sizes of workspaces,
since callers ask it for them. The formulas marked "fitted" were found by hand from 2,200 calls on an H200 with PyTorch
2.11, which are not kept. Of 109 other calls, drawn at random, 36 are equal in every request and 59 in their peak
(benchmarks/results/pytorch-lists.md).

Not covered: builds without MAGMA, and another choice by `torch.backends.cuda.preferred_linalg_library`.
"""

import math
from collections.abc import Sequence

import torch

from ullage.units import round_up
from ullage.virtual.call.plan import (
    CUBLAS,
    Call,
    New,
    Output,
    Plan,
    Steps,
    bytes_of,
    contiguous_strides,
    kernel,
    new,
    twin,
)

_POINTER, _INDEX, _PIVOT, _INFO = 8, 8, 4, 4  # bytes; the last of an error code


def _by_columns(size: Sequence[int], dtype: torch.dtype) -> New:
    """Return a batch of matrices, each in column-major order."""
    rows, columns = size[-2:]
    strides = (*contiguous_strides([*size[:-2], columns, rows])[:-2], 1, max(rows, 1))
    return new(tuple(size), dtype, strides)


def _batch(tensor: torch.Tensor) -> int:
    return math.prod(tensor.shape[:-2])


_FITTED = ("solvers", "cuSOLVER's memory follows fitted formulas; MAGMA's memory outside PyTorch is not counted")


def _plan(steps: Steps, *outputs: Output) -> Plan:
    return steps.plan(*outputs, library=CUBLAS, note=_FITTED)


# Requests of the libraries.


def _add_check(steps: Steps, infos: int) -> None:
    """_linalg_check_errors: whether any code is not zero; a single one is copied first."""
    flag = steps.take(1)
    if infos == 1:
        steps.temporary(1).free(-1)
    steps.free(flag)


def _add_triangular(steps: Steps, batch: int, columns: int) -> None:
    """triangular_solve_kernel: few large ones one by one, small ones by pointers, the others by MAGMA."""
    if (batch <= 8 and columns >= 64) or columns > 512:
        return
    steps.temporary(batch * _POINTER, batch * _POINTER).free(-1, -2)


def _add_factoring(steps: Steps, batch: int, rows: int, columns: int) -> None:
    """lu_factor: cuSOLVER for a single matrix, cuBLAS for few small ones, MAGMA for all others."""
    if rows != columns or not (batch == 1 or rows <= 16 or (rows <= 128 and batch <= 16)):
        return
    if batch > 1 and rows < 512:
        steps.temporary(batch * _POINTER).free(-1)
        return
    for _ in range(batch):
        steps.temporary(256 * max(3, columns // 13)).free(-1)  # getrf: fitted, right to a few kilobytes


def _add_solving(steps: Steps, batch: int, rows: int, right: int, itemsize: int, adjoint: bool) -> None:
    """lu_solve_kernel: cuBLAS or cuSOLVER for small matrices, two triangular ones for large."""
    by_pointers = rows <= 16 if rows == right else rows <= 8
    one_by_one = rows != right and (
        (8 < rows <= 64 and batch <= 2 and (right <= 64 or adjoint or rows <= 32))
        or (64 < rows <= 128 and batch <= 2 and right <= 2)
    )
    by_pointers = by_pointers or (
        rows != right and ((8 < rows <= 64 and right <= 8) or (64 < rows <= 128 and right <= 2))
    )
    if one_by_one:
        steps.temporary(_INFO).free(-1)
    elif by_pointers:
        steps.temporary(batch * _POINTER, batch * _POINTER).free(-1, -2)
    else:
        _solve_by_triangles(steps, batch, rows, rows * right * batch * itemsize, adjoint)


def _solve_by_triangles(steps: Steps, batch: int, rows: int, size: int, adjoint: bool) -> None:
    places = steps.take(rows * _INDEX)
    if batch > 1:
        single, places = places, steps.take(rows * batch * _INDEX)
        steps.free(single)
    if adjoint:
        for _ in range(2):
            _add_triangular(steps, batch, rows)
        steps.temporary(size).free(-1)
    else:
        taken = [steps.take(nbytes) for nbytes in (rows * _INDEX, rows * batch * _INDEX, size)]
        for _ in range(2):
            _add_triangular(steps, batch, rows)
        steps.free(*reversed(taken))
    steps.free(places)


def _add_geqrf(steps: Steps, batch: int, rows: int, columns: int, itemsize: int) -> None:
    """geqrf_kernel: pointers for many small matrices, else cuSOLVER's workspace for one after another."""
    if rows <= 256 and batch >= max(2, rows // 16):
        steps.temporary(batch * _POINTER, batch * _POINTER).free(-1, -2)
        return
    _one_by_one(steps, batch, _geqrf_workspace(columns, itemsize) + 128)


def _one_by_one(steps: Steps, batch: int, workspace: int) -> None:
    """Take cuSOLVER's workspace for one matrix after another, next to an error code."""
    info = steps.take(_INFO)
    for _ in range(batch):
        steps.temporary(workspace).free(-1)
    steps.free(info)


def _geqrf_workspace(columns: int, itemsize: int) -> int:
    return (512 + max(256, columns)) * 1024 * itemsize  # fitted


def _add_orgqr(steps: Steps, batch: int, rows: int, columns: int, reflectors: int, itemsize: int) -> None:
    """orgqr_helper_cusolver: one matrix after another."""
    if reflectors:
        _one_by_one(steps, batch, _orgqr_numbers(rows, columns, reflectors) * itemsize)


def _orgqr_numbers(rows: int, columns: int, reflectors: int) -> int:
    """Return the numbers of orgqr's workspace: fitted."""
    if reflectors == columns >= 100:
        return 16640 + 384 * columns
    return 33024 + round_up(rows * reflectors, 32)


def _add_ormqr(steps: Steps, batch: int, rows: int, reflectors: int, right: int, itemsize: int) -> None:
    """ormqr_cusolver: one matrix after another; the workspace is fitted."""
    numbers = 65792 + 256 * rows + rows * reflectors + reflectors**2 + 512 * right
    _one_by_one(steps, batch, numbers * itemsize)


def _add_eigh(steps: Steps, batch: int, length: int, dtype: torch.dtype) -> None:
    """linalg_eigh_cusolver: Jacobi's method in single precision, else divide and conquer; small ones at once."""
    numbers = 65611 + 768 * length + 3 * length**2  # fitted, as the next one
    if batch > 1 and length <= 32:
        steps.temporary(batch * numbers * dtype.itemsize).free(-1)
        return
    if dtype is torch.float32 and 32 <= length <= 512:
        numbers = length**2 + 64 * length
    for _ in range(batch):
        steps.temporary(numbers * dtype.itemsize).free(-1)


@kernel("aten._linalg_check_errors.default")
def check_errors(call: Call) -> Plan:
    """BatchLinearAlgebra.cpp, _linalg_check_errors"""
    steps = Steps()
    _add_check(steps, call.args[0].numel())
    return steps.plan(None)


# Operators, in the order of their outputs.


@kernel("aten.linalg_cholesky_ex.default")
def cholesky(call: Call) -> Plan:
    """linalg_cholesky_ex_out; cholesky_helper_cusolver: potrf's workspace is fitted, right to a few kilobytes."""
    source = call.args[0]
    batch, length = _batch(source), source.shape[-1]
    steps = Steps().output(0, 1)
    if source.numel():
        workspace = 2 * length * (source.dtype.to_real().itemsize // 4)
        steps.temporary(batch * _POINTER if batch > 1 else max(160, workspace)).free(-1)
    return _plan(steps, _by_columns(source.shape, source.dtype), new(tuple(source.shape[:-2]), torch.int32))


@kernel("aten.cholesky_solve.default", "aten._cholesky_solve_helper.default")
def cholesky_solve(call: Call) -> Plan:
    """_cholesky_solve_helper_cuda: copies of both; MAGMA for a batch."""
    right, factor = call.args[:2]
    size = torch.broadcast_shapes(right.shape[:-2], factor.shape[:-2])
    steps, batch = Steps(), math.prod(size)
    info = steps.take(_INFO) if batch == 1 else None
    steps.output(0).temporary(math.prod([*size, *factor.shape[-2:]]) * factor.element_size()).free(-1)
    if info is not None:
        steps.free(info)
    return _plan(steps, _by_columns([*size, *right.shape[-2:]], right.dtype))


@kernel("aten.cholesky_inverse.default")
def cholesky_inverse(call: Call) -> Plan:
    """cholesky_inverse_kernel_impl: a copy; MAGMA for a batch."""
    source = call.args[0]
    steps = Steps().output(0).temporary(bytes_of(source))
    if _batch(source) == 1:
        steps.temporary(_INFO).free(-1)
    return _plan(steps, _by_columns(source.shape, source.dtype))


def _lu_outputs(source: torch.Tensor) -> tuple[New, New, New]:
    size = source.shape
    pivots = new((*size[:-2], min(size[-2:])), torch.int32)
    return _by_columns(size, source.dtype), pivots, new(tuple(size[:-2]), torch.int32)


@kernel("aten.linalg_lu_factor_ex.default")
def lu_factor(call: Call) -> Plan:
    """linalg_lu_factor_ex_out"""
    source = call.args[0]
    steps = Steps().output(0, 1, 2)
    if source.numel():
        _add_factoring(steps, _batch(source), *source.shape[-2:])
    return _plan(steps, *_lu_outputs(source))


@kernel("aten.linalg_lu.default")
def lu(call: Call) -> Plan:
    """linalg_lu_out: the factors together, then apart; the permutation as indices in between."""
    plan, source = call.infer(), call.args[0]
    factors, pivots, info = _lu_outputs(source)
    steps, batch = Steps().output(0, 1, 2), _batch(source)
    if not source.numel():
        return plan
    together, swaps, codes = steps.take(factors.nbytes), steps.take(pivots.nbytes), steps.take(info.nbytes)
    _add_factoring(steps, batch, *source.shape[-2:])
    steps.free(together)
    rows = source.shape[-2]
    steps.temporary(rows * _INDEX)
    if batch > 1:
        steps.temporary(rows * batch * _INDEX).free(-2)
    return _plan(steps.free(-1, codes, swaps), *plan.outputs)


def _count_swaps(steps: Steps, batch: int, length: int) -> int:
    """lu_det_P: count the pivots that are not in their place; return the temporary of the counts."""
    sizes = length * _PIVOT, batch * length, batch * 8, batch * length * 8
    places, moved, counts, as_numbers = (steps.take(size) for size in sizes)
    steps.free(as_numbers, moved, places)
    return counts


@kernel("aten._linalg_det.default")
def det(call: Call) -> Plan:
    """_linalg_det_out: the product of the diagonal, with the sign of the permutation."""
    source = call.args[0]
    factors, pivots, info = _lu_outputs(source)
    batch, length = _batch(source), source.shape[-1]
    steps = Steps().output(0, 1, 2)
    codes = steps.take(info.nbytes)
    if source.numel():
        _add_factoring(steps, batch, length, length)
        product = steps.take(batch * source.element_size())
        steps.free(_count_swaps(steps, batch, length), product)
    return _plan(steps.free(codes), new(tuple(source.shape[:-2]), source.dtype), factors, pivots)


@kernel("aten._linalg_slogdet.default")
def slogdet(call: Call) -> Plan:
    """_linalg_slogdet_out: signs and logarithms of the diagonal."""
    source = call.args[0]
    factors, pivots, info = _lu_outputs(source)
    batch, length, size = _batch(source), source.shape[-1], tuple(source.shape[:-2])
    real = source.dtype.to_real()
    steps = Steps().output(0, 1, 2, 3)
    codes = steps.take(info.nbytes)
    if source.numel():
        _add_factoring(steps, batch, length, length)
        counts = _count_swaps(steps, batch, length)
        diagonal = batch * length
        steps.temporary(diagonal * source.element_size(), batch * source.element_size()).free(-1, -2, counts)
        logarithms = steps.take(diagonal * real.itemsize)
        if source.is_complex():
            steps.temporary(diagonal * source.element_size()).free(-1)
        steps.free(logarithms)
    return _plan(steps.free(codes), new(size, source.dtype), new(size, real), factors, pivots)


@kernel("aten.linalg_inv_ex.default")
def inverse(call: Call) -> Plan:
    """linalg_inv_ex_out: solved for the identity."""
    source = call.args[0]
    factors, pivots, info = _lu_outputs(source)
    steps, batch, length = Steps().output(0, 1), _batch(source), source.shape[-1]
    if source.numel():
        copy, swaps = steps.take(factors.nbytes), steps.take(pivots.nbytes)
        _add_factoring(steps, batch, length, length)
        _add_solving(steps, batch, length, length, source.element_size(), adjoint=False)
        steps.free(swaps, copy)
    return _plan(steps, factors, info)


@kernel("aten._linalg_solve_ex.default")
def solve(call: Call) -> Plan:
    """_linalg_solve_ex_out"""
    source, right = call.args[:2]
    factors, pivots, info = _lu_outputs(source)
    out = call.output
    vector = len(out.size) < 2 or len(out.size) == source.dim() - 1
    result = out if vector else _by_columns(out.size, out.dtype)
    steps, batch, length = Steps().output(0, 1, 2, 3), _batch(source), source.shape[-1]
    if source.numel() and right.numel():
        _add_factoring(steps, batch, length, length)
        columns = 1 if vector else right.shape[-1]
        batch = math.prod(out.size) // (length * columns)
        _add_solving(steps, batch, length, columns, source.element_size(), adjoint=not call.argument(2, "left", True))
    return _plan(steps, result, factors, pivots, info)


@kernel("aten.linalg_lu_solve.default")
def lu_solve(call: Call) -> Plan:
    """linalg_lu_solve_out: the factors in column-major order, copied if they are not."""
    factors, _, right = call.args[:3]
    out = call.output
    left, adjoint = call.argument(3, "left", True), call.argument(4, "adjoint", False)
    steps, length = Steps().output(0), factors.shape[-1]
    if not right.numel():
        return _plan(steps, out)
    copy = steps.take(0 if twin(factors).mT.is_contiguous() else bytes_of(factors))
    columns = right.shape[-1] if left else right.shape[-2]
    batch = math.prod(out.size) // (length * columns)
    _add_solving(steps, batch, length, columns, factors.element_size(), adjoint=adjoint == left)
    steps.free(copy)
    return _plan(steps, _by_columns(out.size, out.dtype) if left else out)


@kernel("aten.linalg_solve_triangular.default")
def solve_triangular(call: Call) -> Plan:
    """linalg_solve_triangular_out: in place in the result; a matrix in neither order is copied. The result is in the
    order of columns, except if that avoids a copy of a conjugate view."""
    factor, out = call.args[0], call.output
    if not out.nbytes:
        return call.infer()
    by_columns = twin(factor).mT.is_contiguous()
    result = new(out.size, out.dtype) if by_columns and factor.is_conj() else _by_columns(out.size, out.dtype)
    steps = Steps().output(0)
    copy = steps.take(0 if by_columns or factor.is_contiguous() else bytes_of(factor))
    _add_triangular(steps, math.prod(out.size[:-2]), factor.shape[-1])
    return steps.free(copy).plan(result, library=CUBLAS)


@kernel("aten.triangular_solve.default")
def triangular_solve(call: Call) -> Plan:
    """triangular_solve_out: copies of both."""
    right, factor = call.args[:2]
    size = torch.broadcast_shapes(right.shape[:-2], factor.shape[:-2])
    outputs = [_by_columns([*size, *tensor.shape[-2:]], tensor.dtype) for tensor in (right, factor)]
    steps = Steps().output(0, 1)
    if right.numel():
        _add_triangular(steps, math.prod(size), factor.shape[-1])
    return steps.plan(*outputs, library=CUBLAS)


@kernel("aten._linalg_eigh.default")
def eigh(call: Call) -> Plan:
    """_linalg_eigh_out: the matrix is overwritten by the vectors."""
    source, vectors = call.args[0], call.argument(2, "compute_v", True)
    values = new(tuple(source.shape[:-1]), source.dtype.to_real())
    overwritten = _by_columns(source.shape, source.dtype)
    batch, steps = _batch(source), Steps()
    if not vectors:
        steps.temporary(overwritten.nbytes)
    steps.output(*((1, 0) if vectors else (0, 1)))
    info = steps.take(batch * _INFO)
    if source.numel():
        _add_eigh(steps, batch, source.shape[-1], source.dtype)
        _add_check(steps, batch)
    steps.free(info)
    return _plan(steps, values, overwritten if vectors else new((0,), source.dtype))


@kernel("aten._linalg_svd.default")
def svd(call: Call) -> Plan:
    """_linalg_svd_out; svd_cusolver: square matrices by Jacobi's method, others after a decomposition like `qr`'s."""
    source = call.args[0]
    batch, (rows, columns) = _batch(source), source.shape[-2:]
    itemsize, least = source.element_size(), min(source.shape[-2:])
    steps = Steps().output(0, 2, 1)
    info = steps.take(batch * _INFO)
    if source.numel():
        copy = steps.take(bytes_of(source))
        if rows == columns:
            workspace = (2 * rows**2 + 68 * rows + 2700 if rows > 32 else 992) * itemsize  # fitted
        else:
            workspace = _geqrf_workspace(least, itemsize) + (columns > rows) * rows * columns * itemsize
        steps.temporary(workspace).free(-1, copy)
        _add_check(steps, batch)
    return _plan(steps.free(info), *call.infer().outputs)


@kernel("aten.geqrf.default")
def geqrf(call: Call) -> Plan:
    """BatchLinearAlgebra.cpp, geqrf"""
    source = call.args[0]
    rows, columns = source.shape[-2:]
    steps = Steps().output(0, 1)
    if source.numel():
        _add_geqrf(steps, _batch(source), rows, columns, source.element_size())
    tau = new((*source.shape[:-2], min(rows, columns)), source.dtype)
    return _plan(steps, _by_columns(source.shape, source.dtype), tau)


@kernel("aten.linalg_householder_product.default")
def householder_product(call: Call) -> Plan:
    """linalg_householder_product; orgqr_helper_cusolver"""
    source, reflectors = call.args[:2]
    steps = Steps().output(0)
    if source.numel():
        rows, columns = source.shape[-2:]
        _add_orgqr(steps, _batch(source), rows, columns, reflectors.shape[-1], source.element_size())
    return _plan(steps, _by_columns(source.shape, source.dtype))


@kernel("aten.linalg_qr.default")
def qr(call: Call) -> Plan:
    """linalg_qr_out: decomposed in the place of the larger factor."""
    plan, source = call.infer(), call.args[0]
    mode = call.argument(1, "mode", "reduced")
    batch, (rows, columns) = _batch(source), source.shape[-2:]
    least, itemsize = min(rows, columns), source.element_size()
    if not source.numel():
        return plan
    outputs = [
        output if not isinstance(output, New) or len(output.size) < 2 else _by_columns(output.size, output.dtype)
        for output in plan.outputs
    ]
    steps = Steps().output(0, 1)
    copy = steps.take(bytes_of(source) if mode == "r" and rows > columns else 0)
    tau = steps.take(batch * least * itemsize)
    _add_geqrf(steps, batch, rows, columns, itemsize)
    if mode != "r":
        _add_orgqr(steps, batch, rows, rows if mode == "complete" else least, least, itemsize)
    return _plan(steps.free(tau, copy), *outputs)


@kernel("aten.linalg_lstsq.default")
def lstsq(call: Call) -> Plan:
    """linalg_lstsq_out; linalg_lstsq_gels: a decomposition like `qr`'s, a product and a triangular system."""
    source, right = call.args[:2]
    if call.kwargs.get("driver") not in (None, "gels"):
        raise RuntimeError("torch.linalg.lstsq: `driver` other than `gels` is not supported on CUDA")
    (rows, columns), dtype = source.shape[-2:], source.dtype
    vector = right.dim() == 1 or (source.dim() - 1 == right.dim() and right.shape == source.shape[:-1])
    matrix = (*right.shape, 1) if vector else tuple(right.shape)
    size = torch.broadcast_shapes(source.shape[:-2], matrix[:-2])
    batch, columns_right, itemsize = math.prod(size), matrix[-1], dtype.itemsize
    whole = _by_columns([*size, max(rows, columns), columns_right], dtype)
    solution = New((*size, columns, columns_right), whole.stride, dtype, whole.nbytes)
    if vector:
        solution = New((*size, columns), whole.stride[:-1], dtype, whole.nbytes)
    residuals = new((*size, columns_right) if rows > columns else (0,), dtype.to_real())
    steps = Steps()
    info = steps.take(batch * _INFO)
    steps.output(0)
    copy, tau = steps.take(batch * rows * columns * itemsize), steps.take(batch * min(rows, columns) * itemsize)
    if rows >= columns:
        _add_geqrf(steps, batch, rows, columns, itemsize)
        _add_ormqr(steps, batch, rows, columns, columns_right, itemsize)
        _add_triangular(steps, batch, columns)
    else:
        turned = steps.take(batch * rows * columns * itemsize)
        _add_geqrf(steps, batch, columns, rows, itemsize)
        _add_triangular(steps, batch, rows)
        _add_ormqr(steps, batch, columns, rows, columns_right, itemsize)
        steps.free(turned)
    steps.free(tau).output(1, 2, 3).free(copy)
    _add_check(steps, batch)
    return _plan(steps.free(info), solution, residuals, new((0,), torch.int64), new((0,), dtype.to_real()))


@kernel("aten.linalg_matrix_exp.default")
def matrix_exp(call: Call) -> Plan:
    """LinearAlgebra.cpp, mexp: norms decide on the polynomial. The highest has two buffers of five powers."""
    source = call.args[0]
    size, steps = bytes_of(source), Steps()
    if _batch(source) == 1:
        steps.temporary(size, size)
    note = "shapes", "matrix_exp taken with the polynomial of the highest degree"
    return steps.output(0).temporary(5 * size, 5 * size).plan(call.output, library=CUBLAS, note=note)


@kernel("aten.linalg_eig.default", "aten._linalg_eigvals.default")
def eig(call: Call) -> Plan:
    """linalg_eig_out: results are gathered separately and copied; real matrices also have both parts."""
    source = call.args[0]
    values_only = len(call.func._schema.returns) == 1
    dtype = source.dtype if source.is_complex() else torch.complex64 if source.itemsize < 8 else torch.complex128
    values = new(tuple(source.shape[:-1]), dtype)
    vectors = new(tuple(source.shape), dtype)
    numbers = _orgqr_numbers(*[source.shape[-1]] * 3) if source.numel() else 0
    steps, batch = Steps(), _batch(source)
    steps.temporary(bytes_of(source), source.numel(), source.numel(), source.numel()).free(-1, -2, -3, -4)
    info = steps.take(batch * _INFO)
    taken = [steps.take(vectors.nbytes), steps.take(values.nbytes)]
    work = [steps.take(bytes_of(source))]
    if not source.is_complex():
        work += [steps.take(values.nbytes), steps.take(bytes_of(source))]
    steps.temporary(numbers * source.element_size()).free(-1, *reversed(work))
    outputs = (values,) if values_only else (values, vectors)
    steps.output(*range(len(outputs))).free(*taken)
    _add_check(steps, batch)
    return _plan(steps.free(info), *outputs)
