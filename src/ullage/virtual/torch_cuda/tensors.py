"""Tensors outside of operators: construction, addresses, printing, copies, old type names, and access to data.

A CPU tensor (`deferred_cpu.py`) is filled before its data leaves without an operator. Each replacement ends by calling
the original, so that inside two nested `with` statements both fill their tensors.
"""

import copy
import importlib
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch import _tensor_str
from torch.utils import _device as torch_device

from ullage.virtual.call.native import storage_of, view_without_data
from ullage.virtual.call.replacements import Replacements
from ullage.virtual.memory.tensors import address_of
from ullage.virtual.state import GPUState

_StorageBase: Any = torch._C.StorageBase


def install(gpu: GPUState, replacements: Replacements) -> None:
    replacements.put(_tensor_str, "_str", _printer(_tensor_str._str))
    replacements.put_all(torch.Tensor, _addresses(gpu) | _leaving(gpu) | _copying(gpu))
    replacements.put(torch.Tensor, "__format__", _formatter(torch.Tensor.__format__))
    replacements.put_all(torch.UntypedStorage, _storage_methods(gpu))
    to_dlpack = _dlpack(gpu, torch._C._to_dlpack)
    for owner in (torch._C, torch, torch.utils.dlpack):
        replacements.put_existing(owner, "_to_dlpack" if owner is torch._C else "to_dlpack", to_dlpack)
    replacements.put_existing(torch._C, "_to_dlpack_versioned", to_dlpack)
    before = torch._GLOBAL_DEVICE_CONTEXT.__dict__.get("device_context")
    replacements.on_undo(lambda: _leave_default_device(before))


def _addresses(gpu: GPUState) -> dict[str, Any]:
    original: Any = torch.Tensor.data_ptr

    def data_ptr(self: torch.Tensor) -> int:
        if self.is_cuda and hasattr(self, "__tensor_flatten__"):
            return 0  # the memory is that of the tensors inside
        if self.is_cuda:
            address = gpu.memory.address_of(self)
            return address + int(self.storage_offset()) * self.element_size() if address else 0
        gpu.host.fill(self)
        return int(original(self))

    def array_interface(self: torch.Tensor) -> Any:
        raise AttributeError("a tensor on the virtual GPU has no data that another library could read")

    return {"data_ptr": data_ptr, "__cuda_array_interface__": property(array_interface)}


def _leaving(gpu: GPUState) -> dict[str, Any]:
    as_storage: Any = torch.Tensor.untyped_storage
    as_numpy: Any = torch.Tensor.numpy
    as_list: Any = torch.Tensor.tolist

    def untyped_storage(self: torch.Tensor) -> Any:
        gpu.host.fill(self)
        return as_storage(self)

    def numpy(self: torch.Tensor, **options: Any) -> Any:
        gpu.host.fill(self)
        if options.get("force") and self.is_cuda:
            self = self.detach().cpu()
            gpu.host.fill(self)
        return as_numpy(self, **options)

    def tolist(self: torch.Tensor) -> Any:
        if self.is_cuda:
            self = self.detach().cpu()
        gpu.host.fill(self)
        return as_list(self)

    return {
        "untyped_storage": untyped_storage,
        "numpy": numpy,
        "tolist": tolist,
        "__dlpack__": _dlpack(gpu, torch.Tensor.__dlpack__),
    }


def _dlpack(gpu: GPUState, original: Any) -> Callable[..., Any]:
    def to_dlpack(tensor: torch.Tensor, *args: Any, **options: Any) -> Any:
        if tensor.is_cuda:
            gpu.refuse("DLPack", "the tensor has no data that another library could read; move it to the CPU")
        gpu.host.fill(tensor)
        return original(tensor, *args, **options)

    return to_dlpack


def _copying(gpu: GPUState) -> dict[str, Any]:
    original = torch.Tensor.__deepcopy__

    def deepcopy(self: torch.Tensor, memo: dict[Any, Any]) -> Any:
        """`copy.deepcopy`: on the GPU whole storages are copied; tensors that shared one share the copy."""
        if id(self) in memo:
            return memo[id(self)]
        if not self.is_leaf or type(self) is not torch.Tensor or self.layout is not torch.strided:
            return original(self, memo)
        with torch.no_grad():
            if self.is_cuda:
                made = _copy_with_storage(gpu, self, memo)
            elif gpu.host.is_unfilled(self):
                made = self.clone()
            else:
                return original(self, memo)
            if self.requires_grad:
                made.requires_grad_()
            if self.grad is not None:
                made.grad = copy.deepcopy(self.grad, memo)
            made.__dict__.update(copy.deepcopy(self.__dict__, memo))
        memo[id(self)] = made
        return made

    def shallow(self: torch.Tensor) -> Any:
        """`copy.copy`: another tensor over the same memory."""
        if not self.is_cuda or type(self) is not torch.Tensor:
            pickled: Any = self.__reduce_ex__(4)
            return copy._reconstruct(self, None, *pickled)  # type: ignore[attr-defined]
        made = view_of(self.detach(), self.shape, self.stride(), int(self.storage_offset()))
        return made.requires_grad_(self.requires_grad)

    return {"__deepcopy__": deepcopy, "__copy__": shallow}


def view_of(base: torch.Tensor, size: Any, stride: Any, offset: int) -> torch.Tensor:
    """Return another tensor over the memory of `base`, outside of operators: no mode may see it."""
    with torch._C._DisableTorchDispatch():
        return view_without_data(base, size, stride, offset)


def _copy_with_storage(gpu: GPUState, tensor: torch.Tensor, memo: dict[Any, Any]) -> torch.Tensor:
    storage = storage_of(tensor)
    key = ("ullage", storage._cdata, tensor.dtype)
    base = memo.get(key)
    if base is None:
        size = storage.nbytes()
        length = size // tensor.element_size()
        base = memo[key] = gpu.memory.tensor((length,), (1,), tensor.dtype, size)
        gpu.values.copied_storage(tensor, base)
    return view_of(base, tensor.shape, tensor.stride(), int(tensor.storage_offset()))


def _storage_methods(gpu: GPUState) -> dict[str, Any]:
    def data_ptr(self: Any) -> int:
        return address_of(self) if self.device.type == "cuda" else int(_StorageBase.data_ptr(self))

    def resize(self: Any, size: int) -> Any:
        """Change the memory of the same storage."""
        if self.device.type != "cuda":
            return _StorageBase.resize_(self, size)
        gpu.memory.resize(self, size)
        return self

    def copy(self: Any, source: Any, non_blocking: bool | None = None) -> Any:
        """Copy the bytes of another storage; those on the virtual GPU are unknown."""
        if "cuda" not in (self.device.type, source.device.type):
            return _StorageBase.copy_(self, source, bool(non_blocking))
        if self.device.type != "cuda" and not non_blocking:
            gpu.memory.read_back()
        elif (span := getattr(self, "ullage", None)) is not None:
            span.value = span.marks = None
        return self

    def share(self: Any, *args: Any, **options: Any) -> Any:
        gpu.refuse("a GPU tensor sent to another process", "send CPU tensors, or use one process")

    return {"data_ptr": data_ptr, "resize_": resize, "copy_": copy, "_share_cuda_": share}


def _printer(original: Any) -> Callable[..., str]:
    def show(self: torch.Tensor, *, tensor_contents: str | None = None) -> str:
        """Show the tensor like a meta tensor, without its values."""
        if not self.is_cuda:
            return str(original(self, tensor_contents=tensor_contents))
        parts = [tensor_contents or "...", f"device='{self.device}'", f"size={tuple(self.shape)}"]
        if self.dtype not in (torch.get_default_dtype(), torch.int64, torch.bool):
            parts.append(f"dtype={self.dtype}")
        if self.layout is not torch.strided:
            parts.append(f"layout={self.layout}")
        if self.grad_fn is not None:
            parts.append(f"grad_fn=<{type(self.grad_fn).__name__}>")
        elif self.requires_grad:
            parts.append("requires_grad=True")
        return f"tensor({', '.join(parts)})"

    return show


def _formatter(original: Any) -> Callable[..., str]:
    def show(self: torch.Tensor, format_spec: str) -> str:
        """Format the tensor: `f"{loss}"` prints like `repr`; `f"{loss:.3f}"` needs a number and reads it."""
        if self.is_cuda and not format_spec:
            return repr(self)
        return str(original(self, format_spec))

    return show


def _leave_default_device(before: Any) -> None:
    context = torch._GLOBAL_DEVICE_CONTEXT.__dict__.get("device_context")
    if context is not before and context is not None and context.device.type == "cuda":
        torch.set_default_device(None if before is None else before.device)
        if before is None:  # up to PyTorch 2.8, get_default_device() fails if the name exists without a device
            torch._GLOBAL_DEVICE_CONTEXT.__dict__.pop("device_context", None)


# Tensors made of Python data, as in `torch.tensor([loss, 2.0], device="cuda")`. PyTorch's C++ part reads such data
# where dispatch modes do not see it. Numbers that lie on the virtual GPU are looked up here, and memory is pinned
# afterwards, because the C++ part would call CUDA for it.

_Tensor = torch.Tensor
_tensor, _as_tensor = torch.tensor, torch.as_tensor
_new_tensor: Any = torch._C.TensorBase.new_tensor


def install_construction(gpu: GPUState, replacements: Replacements) -> None:
    torch_device._device_constructors()  # let PyTorch cache the originals before they are replaced
    replacements.put_all(torch, {"tensor": tensor, "as_tensor": as_tensor})
    replacements.put(torch.Tensor, "new_tensor", new_tensor)


def tensor(data: Any, *, pin_memory: bool = False, requires_grad: bool = False, **options: Any) -> torch.Tensor:
    made = _tensor(_plain(data), **options)
    if pin_memory:
        made = made.pin_memory()
    return made.requires_grad_() if requires_grad else made


def as_tensor(data: Any, dtype: Any = None, device: Any = None) -> torch.Tensor:
    return _as_tensor(_plain(data), dtype=dtype, device=device)


def new_tensor(self: torch.Tensor, data: Any, **options: Any) -> torch.Tensor:
    made: torch.Tensor = _new_tensor(self, _plain(data), **options)
    return made


def _plain(data: Any) -> Any:
    if isinstance(data, list | tuple) and any(isinstance(item, list | tuple | _Tensor) for item in data):
        return [item.tolist() if isinstance(item, _Tensor) and item.is_cuda else _plain(item) for item in data]
    return data


# The old names: `torch.cuda.FloatTensor(2, 3)`, `tensor.type(...)`, `torch.set_default_tensor_type(...)`.

_DTYPES = {
    "FloatTensor": torch.float32,
    "DoubleTensor": torch.float64,
    "HalfTensor": torch.float16,
    "BFloat16Tensor": torch.bfloat16,
    "LongTensor": torch.int64,
    "IntTensor": torch.int32,
    "ShortTensor": torch.int16,
    "CharTensor": torch.int8,
    "ByteTensor": torch.uint8,
    "BoolTensor": torch.bool,
}
_type: Any = torch._C.TensorBase.type


class _Kind(type):
    """A type of tensors: a device and a dtype."""

    dtype: torch.dtype

    def __instancecheck__(cls, thing: Any) -> bool:
        return isinstance(thing, torch.Tensor) and thing.is_cuda and thing.dtype is cls.dtype


def _make(name: str, dtype: torch.dtype) -> Any:
    def new(cls: Any, *args: Any, device: Any = None) -> torch.Tensor:
        if len(args) == 1 and not isinstance(args[0], int | torch.Size):
            data = args[0]
            return (
                data.to("cuda", dtype)
                if isinstance(data, torch.Tensor)
                else torch.tensor(data, dtype=dtype, device="cuda")
            )
        size = args[0] if len(args) == 1 and isinstance(args[0], torch.Size) else args
        return torch.empty(size or (0,), dtype=dtype, device="cuda")

    members = {"__new__": new, "dtype": dtype, "is_cuda": True, "__module__": "torch.cuda"}
    return _Kind(name, (), members)


_KINDS = {name: _make(name, dtype) for name, dtype in _DTYPES.items()}


def install_legacy_types(gpu: GPUState, replacements: Replacements) -> None:
    original, new = torch.set_default_tensor_type, torch.Tensor.__new__
    default: list[Any] = []  # the type that `torch.Tensor(...)` makes, if it lies on the GPU

    def set_default_tensor_type(t: Any, /) -> None:
        kind = _kind(t)
        if kind is None:
            original(t)
            if default:
                default.clear()
                torch.set_default_device(None)
            return
        if "__new__" not in vars(torch.Tensor):
            with suppress(ImportError):  # the compiler must see the original; it does if it is imported first
                importlib.import_module("torch._dynamo.polyfills.tensor")
            torch.Tensor.__new__ = make_default  # type: ignore[method-assign]
            replacements.on_undo(lambda: delattr(torch.Tensor, "__new__"))
        default[:] = [kind]
        gpu.note("default type", "a default tensor type on CUDA was treated as a default device and dtype")
        if kind.dtype.is_floating_point:
            torch.set_default_dtype(kind.dtype)
        torch.set_default_device("cuda")

    def make_default(cls: Any, *args: Any, **options: Any) -> Any:
        on_gpu = default and cls is torch.Tensor and options.get("device") is None
        return default[0](*args) if on_gpu else new(cls, *args, **options)

    def change_type(self: torch.Tensor, dtype: Any = None, non_blocking: bool = False, **rest: Any) -> Any:
        kind = _kind(dtype)
        if kind is not None:
            return self.to("cuda", kind.dtype)
        if dtype is not None and self.is_cuda and not isinstance(dtype, torch.dtype):
            name = dtype if isinstance(dtype, str) else dtype.__name__
            if name.removeprefix("torch.") in _DTYPES:
                return self.to("cpu", _DTYPES[name.removeprefix("torch.")])
        return _type(self, dtype, non_blocking, **rest)

    replacements.put_all(torch.cuda, _KINDS)
    replacements.put(torch.Tensor, "type", change_type)
    replacements.put(torch, "set_default_tensor_type", set_default_tensor_type)


def _kind(t: Any) -> Any:
    if isinstance(t, str):
        return _KINDS.get(t.removeprefix("torch.cuda.")) if t.startswith("torch.cuda.") else None
    return t if isinstance(t, _Kind) else None
