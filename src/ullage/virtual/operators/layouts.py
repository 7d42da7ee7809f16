"""Tensors of other layouts than strided: sparse ones, by coordinates or compressed.

A sparse tensor on the virtual GPU is PyTorch's own object over indices and values that lie on the virtual GPU. Most of
its operators are written once in PyTorch, for CPU and CUDA alike, by operators on dense tensors. Those run as they are,
under the CPU's name, and what they call is counted. Where CUDA has a kernel of its own, it is written out in `sparse.py`
and registered with `own_kernel`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ullage.virtual.kernels.plan import register
from ullage.virtual.operators.registry import handler
from ullage.virtual.state import GPUState

_Tensor = torch.Tensor
_STRIDED = torch.strided

OwnKernel = Callable[..., Any]
_OWN: dict[str, OwnKernel] = {}


def own_kernel(*names: str) -> Callable[[OwnKernel], OwnKernel]:
    """Register what an operator does with sparse tensors on CUDA alone; it returns `NotImplemented` for all others."""
    return register(_OWN, names)


def _keys(name: str) -> torch._C.DispatchKeySet:
    return torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, name))


_BY_COORDINATES, _BY_ROWS, _DENSE = _keys("SparseCPU"), _keys("SparseCsrCPU"), _keys("CPU")
_KEYS: dict[Any, Any] = {torch.sparse_coo: _BY_COORDINATES}
_KEYS |= dict.fromkeys((torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc), _BY_ROWS)


def keys_of(values: Any) -> Any:
    """The CPU's name for the layout of a call's tensors; `None` if all are strided."""
    for value in values:
        if isinstance(value, _Tensor):
            if value.layout is not _STRIDED and value.layout in _KEYS:
                return _KEYS[value.layout]
        elif type(value) is list or type(value) is tuple:
            found = keys_of(value)
            if found is not None:
                return found
    return None


def follow(gpu: GPUState, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], keys: Any) -> Any:
    """Run an operator by PyTorch's own code for CPU and CUDA, or by what CUDA does in its place."""
    own = _OWN.get(str(func))
    args = _with_tensors(func, args)
    with gpu.counting():
        if own is not None:
            result = own(gpu, *args, **kwargs)
            if result is not NotImplemented:
                return result
        try:
            return func.redispatch(keys, *args, **kwargs)
        except NotImplementedError as error:
            raise NotImplementedError(str(error).replace("CPU' backend", "CUDA' backend")) from None


def _with_tensors(func: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments, with numbers that were given for tensors (`x * 2`) as tensors."""
    wanted = func._schema.arguments
    return tuple(
        torch.tensor(value, device="cpu")
        if isinstance(value, int | float | complex) and str(wanted[place].type) == "Tensor"
        else value
        for place, value in enumerate(args)
    )


_MAKERS = (
    "aten._sparse_coo_tensor_with_dims.default",
    "aten._sparse_coo_tensor_with_dims_and_tensors.default",
)
_COMPRESSED_MAKERS = (
    "aten._sparse_compressed_tensor_unsafe.default",
    "aten._sparse_csr_tensor_unsafe.default",
    "aten._sparse_csc_tensor_unsafe.default",
    "aten._sparse_bsr_tensor_unsafe.default",
    "aten._sparse_bsc_tensor_unsafe.default",
    "aten._sparse_compressed_tensor_with_dims.default",
)
_FROM_DENSE = (
    "aten._to_sparse.default",
    "aten._to_sparse.sparse_dim",
    "aten._to_sparse_csr.default",
    "aten._to_sparse_csc.default",
    "aten._to_sparse_bsr.default",
    "aten._to_sparse_bsc.default",
)


@handler(*_MAKERS, *_COMPRESSED_MAKERS, *_FROM_DENSE)
def make(gpu: GPUState, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A sparse tensor out of its parts, or out of a dense one."""
    if not _is_for_gpu(args, kwargs):
        return gpu.host.call(func, args, kwargs)
    gpu.other_layouts = True
    name = str(func)
    keys = _BY_COORDINATES if name in _MAKERS else _BY_ROWS if name in _COMPRESSED_MAKERS else _DENSE
    return follow(gpu, func, args, kwargs, keys)


@handler("aten._embedding_bag_backward.default")
def embedding_bag_backward(gpu: GPUState, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """EmbeddingBag.cpp, _embedding_bag_backward_symint: the gradient of a bag may be a sparse tensor."""
    is_sparse = args[9]
    return make(gpu, func, args, kwargs) if is_sparse else NotImplemented


@handler("aten.empty.memory_format")
def empty(gpu: GPUState, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`torch.empty` of a sparse layout takes no memory."""
    keys = _KEYS.get(kwargs.get("layout"))
    if keys is None or not _is_for_gpu(args, kwargs):
        return NotImplemented
    gpu.other_layouts = True
    return follow(gpu, func, args, kwargs, keys)


@own_kernel("aten.detach.default", "aten.alias.default")
def detach(gpu: GPUState, source: Any) -> Any:
    """Another tensor over the same indices and values."""
    if source.layout is torch.sparse_coo:
        return coo(source._indices(), source._values(), source.shape, source.is_coalesced())
    by_rows = source.layout in (torch.sparse_csr, torch.sparse_bsr)
    inner = (source.crow_indices(), source.col_indices()) if by_rows else (source.ccol_indices(), source.row_indices())
    options = {"dtype": source.dtype, "layout": source.layout, "device": source.device}
    return torch.ops.aten._sparse_compressed_tensor_unsafe(*inner, source.values(), source.shape, **options)


def coo(indices: Any, values: Any, size: Any, coalesced: bool | None = None) -> Any:
    """A sparse tensor over these indices and values, which are not checked."""
    options = {"dtype": values.dtype, "layout": torch.sparse_coo, "device": values.device, "is_coalesced": coalesced}
    return torch.ops.aten._sparse_coo_tensor_with_dims_and_tensors(
        len(indices), values.dim() - 1, size, indices, values, **options
    )


def copy(gpu: GPUState, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A copy of a sparse tensor: of its indices and of its values."""
    gpu.other_layouts = True
    return follow(gpu, func, args, kwargs, keys_of(args))


def _is_for_gpu(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    device = kwargs.get("device")
    if device is not None:
        return bool(device.type == "cuda")
    return any(isinstance(value, _Tensor) and value.is_cuda for value in args)
