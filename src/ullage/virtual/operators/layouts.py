"""Tensors of other layouts than strided: sparse ones, by coordinates or compressed.

A sparse tensor on the virtual GPU is PyTorch's own object over indices and values there. PyTorch writes most of its
operators once, for CPU and CUDA alike. Those run unchanged under the CPU's name, and their calls are counted. CUDA's
own kernels are in `sparse.py` and `compressed.py`, registered with `own_kernel`.
"""

from collections.abc import Callable
from typing import Any

import torch

from ullage.virtual.call.native import any_on_gpu
from ullage.virtual.call.plan import gpu_handler, handler, register
from ullage.virtual.state import GPUState

_Tensor = torch.Tensor
_STRIDED = torch.strided

OwnKernel = Callable[..., Any]
_OWN_BY_COORDINATES: dict[str, OwnKernel] = {}
_OWN_BY_ROWS: dict[str, OwnKernel] = {}


def own_kernel(*names: str, compressed: bool = False) -> Callable[[OwnKernel], OwnKernel]:
    """Register CUDA's own kernel of an operator on sparse tensors; it may return `NotImplemented` to use the CPU's
    code."""
    return register(_OWN_BY_ROWS if compressed else _OWN_BY_COORDINATES, names)


def _keys(name: str) -> torch._C.DispatchKeySet:
    return torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, name))


_BY_COORDINATES, _BY_ROWS, _DENSE = _keys("SparseCPU"), _keys("SparseCsrCPU"), _keys("CPU")
_KEYS: dict[Any, Any] = {torch.sparse_coo: _BY_COORDINATES}
_KEYS |= dict.fromkeys((torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc), _BY_ROWS)


def keys_of(values: Any) -> Any:
    """Return the CPU's name for the layout of a call's tensors; `None` if all are strided."""
    for value in values:
        if isinstance(value, _Tensor):
            if value.layout is not _STRIDED and value.layout in _KEYS:
                return _KEYS[value.layout]
        elif type(value) is list or type(value) is tuple:
            key = keys_of(value)
            if key is not None:
                return key
    return None


def follow(gpu: GPUState, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], keys: Any) -> Any:
    """Run an operator by PyTorch's own code for CPU and CUDA, or by CUDA's own kernel."""
    own = (_OWN_BY_ROWS if keys is _BY_ROWS else _OWN_BY_COORDINATES).get(str(func))
    args = _with_tensors(func, args)
    with gpu.mode:
        if own is not None:
            result = own(gpu, *args, **kwargs)
            if result is not NotImplemented:
                return result
        try:
            return func.redispatch(keys, *args, **kwargs)
        except NotImplementedError as error:
            raise NotImplementedError(str(error).replace("CPU' backend", "CUDA' backend")) from None


def _with_tensors(func: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the arguments, with numbers given for tensors (`x * 2`) as tensors."""
    wanted = func._schema.arguments
    return tuple(
        torch.tensor(value, device="cpu")
        if isinstance(value, int | float | complex) and str(wanted[place].type) == "Tensor"
        else value
        for place, value in enumerate(args)
    )


_MAKERS = ("aten._sparse_coo_tensor_with_dims.default", "aten._sparse_coo_tensor_with_dims_and_tensors.default")
_COMPRESSED = ("csr", "csc", "bsr", "bsc")
_COMPRESSED_MAKERS = (
    *(f"aten._sparse_{layout}_tensor_unsafe.default" for layout in ("compressed", *_COMPRESSED)),
    "aten._sparse_compressed_tensor_with_dims.default",
    "aten.sparse_compressed_tensor.comp_plain_value",
    "aten.sparse_compressed_tensor.comp_plain_value_size",
)
_FROM_DENSE = (
    "aten._to_sparse.default",
    "aten._to_sparse.sparse_dim",
    *(f"aten._to_sparse_{layout}.default" for layout in _COMPRESSED),
)


@handler(*_MAKERS, *_COMPRESSED_MAKERS, *_FROM_DENSE)
def make(gpu: GPUState, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Make a sparse tensor from its parts, or from a dense one."""
    if not is_for_gpu(args, kwargs):
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


@handler("aten.empty.memory_format", "aten.zeros.default")
def empty(gpu: GPUState, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    keys = _KEYS.get(kwargs.get("layout"))
    if keys is None or not is_for_gpu(args, kwargs):
        return NotImplemented
    gpu.other_layouts = True
    return follow(gpu, func, args, kwargs, keys)


@own_kernel("aten.detach.default", "aten.alias.default")
def detach(gpu: GPUState, source: Any) -> Any:
    return coo(source._indices(), source._values(), source.shape, source.is_coalesced())


@own_kernel("aten.detach.default", "aten.alias.default", compressed=True)
def detach_compressed(gpu: GPUState, source: Any) -> Any:
    return compressed(*inner_indices(source), source.values(), source.shape, source.layout)


def inner_indices(source: Any) -> tuple[Any, Any]:
    if source.layout in (torch.sparse_csr, torch.sparse_bsr):
        return source.crow_indices(), source.col_indices()
    return source.ccol_indices(), source.row_indices()


def compressed(pointers: Any, indices: Any, values: Any, size: Any, layout: torch.layout) -> Any:
    """Return a compressed sparse tensor over these parts, which are not checked."""
    options = {"dtype": values.dtype, "layout": layout, "device": values.device}
    return torch.ops.aten._sparse_compressed_tensor_unsafe(pointers, indices, values, size, **options)


def coo(indices: Any, values: Any, size: Any, coalesced: bool | None = None) -> Any:
    """Return a sparse tensor over these indices and values, which are not checked."""
    options = {"dtype": values.dtype, "layout": torch.sparse_coo, "device": values.device, "is_coalesced": coalesced}
    return torch.ops.aten._sparse_coo_tensor_with_dims_and_tensors(
        len(indices), values.dim() - 1, size, indices, values, **options
    )


def copy(gpu: GPUState, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    gpu.other_layouts = True
    return follow(gpu, func, args, kwargs, keys_of(args))


@handler("aten._validate_compressed_sparse_indices.default")
def validate(gpu: GPUState, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """ValidateCompressedIndicesCommon.h: the checks write to one number each."""
    if not args[1].is_cuda:
        return gpu.host.call(func, args, kwargs)
    with gpu.memory.holding(args[1].element_size(), args[1].element_size()):
        return None


@gpu_handler(
    "aten.quantize_per_tensor.default",
    "aten.quantize_per_tensor.tensor_qparams",
    "aten.quantize_per_channel.default",
    "aten.quantize_per_tensor_dynamic.default",
)
def quantize(gpu: GPUState, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Refuse quantized tensors: they are C++ objects with a storage on a real GPU; a bare type would lack the scale."""
    gpu.refuse("a quantized tensor", "use torch.int8 or float8 types, or fake quantization, or quantize on the CPU")


def is_for_gpu(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return any_on_gpu((*args, *kwargs.values()))
