"""The old names: `torch.cuda.FloatTensor(2, 3)`, `tensor.type(...)`, `torch.set_default_tensor_type(...)`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ullage.virtual.replacements import Replacements

if TYPE_CHECKING:
    from ullage.virtual.gpu import VirtualGPU

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


def install(gpu: VirtualGPU, replacements: Replacements) -> None:
    """Put the old names in place."""
    original = torch.set_default_tensor_type

    def set_default_tensor_type(t: Any, /) -> None:
        kind = _kind(t)
        if kind is None:
            original(t)
            return
        gpu.note("default type", "a default tensor type on CUDA was taken for a default device and a default dtype")
        if kind.dtype.is_floating_point:
            torch.set_default_dtype(kind.dtype)
        torch.set_default_device("cuda")

    def change_type(self: torch.Tensor, dtype: Any = None, non_blocking: bool = False, **rest: Any) -> Any:
        """`Tensor.type`."""
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
