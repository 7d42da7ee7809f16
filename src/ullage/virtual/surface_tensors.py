"""Tensors outside of operators: their addresses, how they print and are copied, and data that leaves PyTorch.

A CPU tensor may still have to be filled (see host.py). Every way in which its data leaves without an
operator, to NumPy, to another process or as a pointer, fills it first. What was there before is called last,
so that inside two nested `with` statements both fill what they know of.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import _tensor_str

from ullage.virtual.native import view_without_data
from ullage.virtual.replacements import Replacements

if TYPE_CHECKING:
    from ullage.virtual.gpu import VirtualGPU

_Base: Any = torch._C.TensorBase
_StorageBase: Any = torch._C.StorageBase
_storage_of = _Base.untyped_storage


def install(gpu: VirtualGPU, replacements: Replacements) -> None:
    """Put the methods of `torch.Tensor` and `torch.UntypedStorage` in place."""
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


def _addresses(gpu: VirtualGPU) -> dict[str, Any]:
    original: Any = torch.Tensor.data_ptr

    def data_ptr(self: torch.Tensor) -> int:
        """The address of the first element; on the virtual GPU that of the allocator's block."""
        if self.is_cuda:
            address = gpu.memory.address_of(self)
            return address + int(self.storage_offset()) * self.element_size() if address else 0
        gpu.host.fill(self)
        return int(original(self))

    def array_interface(self: torch.Tensor) -> Any:
        raise AttributeError("a tensor on the virtual GPU has no data that another library could read")

    return {"data_ptr": data_ptr, "__cuda_array_interface__": property(array_interface)}


def _leaving(gpu: VirtualGPU) -> dict[str, Any]:
    as_storage: Any = torch.Tensor.untyped_storage
    as_numpy: Any = torch.Tensor.numpy
    as_list: Any = torch.Tensor.tolist

    def untyped_storage(self: torch.Tensor) -> Any:
        """The storage, filled."""
        gpu.host.fill(self)
        return as_storage(self)

    def numpy(self: torch.Tensor, **options: Any) -> Any:
        """The data as a NumPy array."""
        gpu.host.fill(self)
        if options.get("force") and self.is_cuda:
            self = self.detach().cpu()
            gpu.host.fill(self)
        return as_numpy(self, **options)

    def tolist(self: torch.Tensor) -> Any:
        """The data as nested lists."""
        if self.is_cuda:
            self = self.detach().cpu()
        gpu.host.fill(self)
        return as_list(self)

    def filling(method: Any) -> Callable[..., Any]:
        def call(self: torch.Tensor, *args: Any, **options: Any) -> Any:
            if self.is_cuda:
                gpu.refuse("DLPack", "the tensor has no data that another library could read; move it to the CPU")
            gpu.host.fill(self)
            return method(self, *args, **options)

        return call

    return {
        "untyped_storage": untyped_storage,
        "numpy": numpy,
        "tolist": tolist,
        "__dlpack__": filling(torch.Tensor.__dlpack__),
    }


def _dlpack(gpu: VirtualGPU, original: Any) -> Callable[..., Any]:
    def to_dlpack(tensor: torch.Tensor, *args: Any, **options: Any) -> Any:
        if tensor.is_cuda:
            gpu.refuse("DLPack", "the tensor has no data that another library could read; move it to the CPU")
        gpu.host.fill(tensor)
        return original(tensor, *args, **options)

    return to_dlpack


def _copying(gpu: VirtualGPU) -> dict[str, Any]:
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
    """Another tensor over the memory of `base`, made outside of an operator: no mode may see it."""
    with torch._C._DisableTorchDispatch():
        return view_without_data(base, size, stride, offset)


def _copy_with_storage(gpu: VirtualGPU, tensor: torch.Tensor, memo: dict[Any, Any]) -> torch.Tensor:
    storage = _storage_of(tensor)
    key = ("ullage", storage._cdata, tensor.dtype)
    base = memo.get(key)
    if base is None:
        size = storage.nbytes()
        length = size // tensor.element_size()
        base = memo[key] = gpu.memory.tensor((length,), (1,), tensor.dtype, size)
    return view_of(base, tensor.shape, tensor.stride(), int(tensor.storage_offset()))


def _storage_methods(gpu: VirtualGPU) -> dict[str, Any]:
    def data_ptr(self: Any) -> int:
        """The address of the storage."""
        watch = getattr(self, "ullage", None)
        if watch is not None:
            return int(watch.block.address)
        return 0 if self.device.type == "cuda" else int(_StorageBase.data_ptr(self))

    def resize(self: Any, size: int) -> Any:
        """Storages on the GPU keep their size."""
        if self.device.type == "cuda":
            gpu.refuse("UntypedStorage.resize_", "let the tensor go and make a new one")
        return _StorageBase.resize_(self, size)

    def share(self: Any, *args: Any, **options: Any) -> Any:
        gpu.refuse("a GPU tensor sent to another process", "send CPU tensors, or use one process")

    return {"data_ptr": data_ptr, "resize_": resize, "_share_cuda_": share}


def _printer(original: Any) -> Callable[..., str]:
    def show(self: torch.Tensor, *, tensor_contents: str | None = None) -> str:
        """Like a meta tensor's: no values are asked for."""
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
        """`f"{loss}"` prints like `repr`; `f"{loss:.3f}"` needs a number and asks for it."""
        if self.is_cuda and not format_spec:
            return repr(self)
        return str(original(self, format_spec))

    return show


def _leave_default_device(before: Any) -> None:
    """A default device "cuda" that the code has set must not outlive the virtual GPU."""
    context = torch._GLOBAL_DEVICE_CONTEXT.__dict__.get("device_context")
    if context is not before and context is not None and context.device.type == "cuda":
        torch.set_default_device(None if before is None else before.device)
