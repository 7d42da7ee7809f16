"""torch.save and torch.load.

A tensor of the virtual GPU is saved as one element, expanded to its shape; the file can be loaded anywhere.
Loading reads storages to the CPU; those whose location maps to "cuda" become storages of the virtual GPU, with the same
sharing.
"""

from typing import Any

import torch
from torch import serialization

from ullage.virtual.call.native import storage_of
from ullage.virtual.call.plan import contiguous_strides
from ullage.virtual.call.replacements import Replacements
from ullage.virtual.state import GPUState, gpus_in_use
from ullage.virtual.torch_cuda.tensors import view_of

_rebuild_original: Any = torch._utils._rebuild_tensor
_reduce_original: Any = torch.Tensor._reduce_ex_internal


def install(gpu: GPUState, replacements: Replacements) -> None:
    entry = (0, _tag, _restore)
    serialization._package_registry.insert(0, entry)
    replacements.on_undo(lambda: serialization._package_registry.remove(entry))
    replacements.put(torch.Tensor, "_reduce_ex_internal", _reduce)
    replacements.put(torch._utils, "_rebuild_tensor", rebuild_tensor)
    replacements.put(torch.UntypedStorage, "cuda", _storage_to_gpu)


def _tag(storage: Any) -> str | None:
    location: str | None = getattr(storage, "ullage_location", None)
    return location


def _restore(storage: Any, location: Any) -> Any:
    """Mark a storage that was read if it belongs on the GPU."""
    place = location.decode() if isinstance(location, bytes) else str(location)
    if not place.startswith("cuda"):
        return None
    index = torch.device(place).index or 0
    if index > 0:
        raise RuntimeError(
            f"Attempting to deserialize object on CUDA device {index} but torch.cuda.device_count() is 1. "
            "Please use torch.load with map_location to map your storages to an existing device."
        )
    return _storage_to_gpu(storage)


def _storage_to_gpu(self: Any, device: Any = None, non_blocking: bool = False) -> Any:
    """`UntypedStorage.cuda()`, which a `map_location` function calls: marked, moved with its first tensor."""
    if self.device.type == "cpu":
        self.ullage_to_gpu = True
    return self


def rebuild_tensor(storage: Any, storage_offset: int, size: Any, stride: Any) -> torch.Tensor:
    untyped = storage._untyped_storage
    if not (gpus_in_use and getattr(untyped, "ullage_to_gpu", False)):
        tensor: torch.Tensor = _rebuild_original(storage, storage_offset, size, stride)
        if gpus_in_use and tensor.numel() > untyped.nbytes() // storage.dtype.itemsize and not any(stride):
            return torch.ones(tuple(size), dtype=storage.dtype)  # written without data, see _reduce
        return tensor
    gpu = gpus_in_use[-1]
    source: torch.Tensor = _rebuild_original(storage, storage_offset, size, stride)
    length = untyped.nbytes() // storage.dtype.itemsize
    if source.numel() > length and not any(stride):
        stride, length = contiguous_strides(size), source.numel()  # written from a virtual GPU, see _reduce
    bases = untyped.__dict__.setdefault("ullage_bases", {})
    base = bases.get((storage.dtype, length))
    if base is None:
        base = gpu.memory.tensor((length,), (1,), storage.dtype, length * storage.dtype.itemsize)
        bases[storage.dtype, length] = base
    made = view_of(base, size, stride, storage_offset)
    gpu.values.copied(source, made)
    return made


def _reduce(self: torch.Tensor, proto: int) -> Any:
    gpu = gpus_in_use[-1] if gpus_in_use else None
    if gpu is None or self.layout is not torch.strided:
        return _reduce_original(self, proto)
    if not self.is_cuda and not (gpu.host.is_unfilled(self) and self.numel()):
        return _reduce_original(self, proto)
    known = gpu.values.known(self) if self.is_cuda else None
    with torch.no_grad():
        stand_in = _one_element(self).expand(self.shape) if known is None else known.detach().clone()
    if self.is_cuda:
        storage_of(stand_in).ullage_location = "cuda:0"
        if known is None:
            gpu.note("saving", "tensors of the virtual GPU were saved: shapes and types, without data")
    function, args = _reduce_original(stand_in, proto)
    place = next(number for number, value in enumerate(args) if isinstance(value, bool))
    return function, (*args[:place], self.requires_grad, *args[place + 1 :])


def _one_element(tensor: torch.Tensor) -> torch.Tensor:
    """Return one element for a whole storage, so that tensors which share memory share it in the file too."""
    storage = storage_of(tensor)
    elements = storage.__dict__.setdefault("ullage_elements", {})
    element = elements.get(tensor.dtype)
    if element is None:
        element = elements[tensor.dtype] = torch.ones((), device="cpu").to(tensor.dtype)
    made: torch.Tensor = element
    return made


rebuild_tensor.__name__ = rebuild_tensor.__qualname__ = "_rebuild_tensor"  # PyTorch lists safe functions by name
rebuild_tensor.__module__ = "torch._utils"
