"""What cuSOLVER, cuBLAS and MAGMA ask for to decompose matrices and to solve with them.

aten/src/ATen/native/cuda/linalg/BatchLinearAlgebra.cpp decides which of them runs. cuSOLVER's workspaces come from
PyTorch's allocator; their sizes are formulas that were fitted to 2,200 calls on an H200. Those of `potrf` and `getrf`
are a few kilobytes and only near. cuBLAS wants arrays of pointers. MAGMA takes nothing of PyTorch's.

Not covered: builds without MAGMA, and another choice by `torch.backends.cuda.preferred_linalg_library`.
"""

from __future__ import annotations

import torch

from ullage.units import round_up
from ullage.virtual.call.plan import Steps

_POINTER, _INDEX = 8, 8  # bytes
INFO = 4  # bytes of an error code


def add_check(steps: Steps, infos: int) -> None:
    """_linalg_check_errors: whether any code is not zero; a single one is copied first."""
    steps.temporary(1)
    if infos == 1:
        steps.temporary(1).free(-1)
        steps.free(-2)
    else:
        steps.free(-1)


def add_triangular(steps: Steps, batch: int, columns: int) -> None:
    """triangular_solve_kernel: few large ones one by one, small ones by pointers, the others by MAGMA."""
    if (batch <= 8 and columns >= 64) or columns > 512:
        return
    steps.temporary(batch * _POINTER, batch * _POINTER).free(-1, -2)


def add_factoring(steps: Steps, batch: int, rows: int, columns: int) -> None:
    """lu_factor: cuSOLVER for a single matrix, cuBLAS for few small ones, MAGMA for all others."""
    if rows != columns or not (batch == 1 or rows <= 16 or (rows <= 128 and batch <= 16)):
        return
    if batch > 1 and rows < 512:
        steps.temporary(batch * _POINTER).free(-1)
        return
    for _ in range(batch):
        steps.temporary(256 * max(3, columns // 13)).free(-1)


def add_solving(steps: Steps, batch: int, rows: int, right: int, itemsize: int, adjoint: bool) -> None:
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
        steps.temporary(INFO).free(-1)
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
            add_triangular(steps, batch, rows)
        steps.temporary(size).free(-1)
    else:
        kept = [steps.take(taken) for taken in (rows * _INDEX, rows * batch * _INDEX, size)]
        for _ in range(2):
            add_triangular(steps, batch, rows)
        steps.free(*reversed(kept))
    steps.free(places)


def add_geqrf(steps: Steps, batch: int, rows: int, columns: int, itemsize: int) -> None:
    """geqrf_kernel: pointers for many small matrices, else cuSOLVER's workspace for one after another."""
    if rows <= 256 and batch >= max(2, rows // 16):
        steps.temporary(batch * _POINTER, batch * _POINTER).free(-1, -2)
        return
    _one_by_one(steps, batch, geqrf_workspace(columns, itemsize) + 128)


def _one_by_one(steps: Steps, batch: int, workspace: int) -> None:
    """Take cuSOLVER's workspace for one matrix after another, next to an error code."""
    info = steps.take(INFO)
    for _ in range(batch):
        steps.temporary(workspace).free(-1)
    steps.free(info)


def geqrf_workspace(columns: int, itemsize: int) -> int:
    """Bytes for one matrix."""
    return (512 + max(256, columns)) * 1024 * itemsize


def add_orgqr(steps: Steps, batch: int, rows: int, columns: int, reflectors: int, itemsize: int) -> None:
    """orgqr_helper_cusolver: one matrix after another."""
    if reflectors:
        _one_by_one(steps, batch, orgqr_numbers(rows, columns, reflectors) * itemsize)


def orgqr_numbers(rows: int, columns: int, reflectors: int) -> int:
    """Numbers for one matrix."""
    if reflectors == columns >= 100:
        return 16640 + 384 * columns
    return 33024 + round_up(rows * reflectors, 32)


def add_ormqr(steps: Steps, batch: int, rows: int, reflectors: int, right: int, itemsize: int) -> None:
    """ormqr_cusolver: one matrix after another."""
    numbers = 65792 + 256 * rows + rows * reflectors + reflectors**2 + 512 * right
    _one_by_one(steps, batch, numbers * itemsize)


def add_eigh(steps: Steps, batch: int, length: int, dtype: torch.dtype) -> None:
    """linalg_eigh_cusolver: Jacobi's method in single precision, else divide and conquer; small ones at once."""
    numbers = 65611 + 768 * length + 3 * length**2
    if batch > 1 and length <= 32:
        steps.temporary(batch * numbers * dtype.itemsize).free(-1)
        return
    if dtype is torch.float32 and 32 <= length <= 512:
        numbers = length**2 + 64 * length
    for _ in range(batch):
        steps.temporary(numbers * dtype.itemsize).free(-1)
