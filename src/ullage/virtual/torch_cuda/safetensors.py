"""safetensors, which reads and writes files outside PyTorch.

`torch.save` writes the files that a script saves. For other files, Ullage reads the header, and the values of a large
tensor only when needed: a checkpoint may be larger than this machine's memory, or have no values at all.
"""

import json
import math
import os
import struct
import zipfile
from collections.abc import Callable
from types import ModuleType, TracebackType
from typing import Any, Self

import torch

from ullage.sandbox import recording
from ullage.virtual.call.replacements import Replacements
from ullage.virtual.state import gpus_in_use

# The types of a header. Files with others are left to safetensors itself.
_TYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "C64": torch.complex64,
}
TYPE_NAMES = {dtype: name for name, dtype in _TYPES.items()}


def install_safetensors(replacements: Replacements) -> None:
    replacements.when_imported("safetensors.torch", lambda module: _functions(module, replacements))
    replacements.when_imported("safetensors", lambda module: _opening(module, replacements))


def _functions(module: ModuleType, replacements: Replacements) -> None:
    load_file = module.load_file

    def save_file(tensors: Any, filename: Any, metadata: Any = None, **options: Any) -> None:
        torch.save(
            {"tensors": {name: tensor.detach() for name, tensor in tensors.items()}, "metadata": metadata}, filename
        )

    def load(filename: Any, device: Any = "cpu", **options: Any) -> Any:
        file = _open(filename, device)
        if file is None:
            return load_file(filename, device=device, **options)
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  as safetensors has it

    replacements.put_all(module, {"save_file": save_file, "load_file": load})


def _opening(module: ModuleType, replacements: Replacements) -> None:
    original = module.safe_open

    def safe_open(filename: Any, framework: str = "pt", device: Any = "cpu", **options: Any) -> Any:
        file = _open(filename, device) if framework in ("pt", "torch", "pytorch") else None
        return original(filename, framework, device, **options) if file is None else file

    replacements.put(module, "safe_open", safe_open)


def _open(filename: Any, device: Any) -> Any:
    """Return the file as a virtual GPU reads it; `None` if safetensors itself has to read it."""
    recording.note(filename)
    if not gpus_in_use or not os.path.isfile(filename):
        return None
    place = f"cuda:{device}" if isinstance(device, int) else str(device)
    if zipfile.is_zipfile(filename):
        return _written(filename, place)
    try:
        header = read_header(filename)
    except (ValueError, struct.error):
        return None
    known = all(entry["dtype"] in _TYPES for name, entry in header.items() if name != "__metadata__")
    return _checkpoint(filename, header, place) if known else None


def read_header(filename: Any) -> dict[str, Any]:
    """Return type, shape and place of each tensor in a safetensors file."""
    with open(filename, "rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        if length > os.path.getsize(filename):
            raise ValueError(f"{filename} must be a safetensors file")
        header = json.loads(file.read(length))
    if not isinstance(header, dict):
        raise ValueError(f"{filename} must be a safetensors file")
    return header


class _File:
    """The result of `safe_open`: `entries` has the shape, type and place of each tensor, `read` returns one."""

    def __init__(self, entries: dict[str, Any], metadata: Any, read: Callable[[str], torch.Tensor], place: str) -> None:
        self._entries, self._metadata, self._read, self._place = entries, metadata, read, place

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: TracebackType | None) -> None:
        return

    def keys(self) -> list[str]:
        return list(self._entries)

    def offset_keys(self) -> list[str]:
        return sorted(self._entries, key=lambda name: self._entries[name]["data_offsets"])

    def metadata(self) -> Any:
        return self._metadata

    def get_tensor(self, name: str) -> torch.Tensor:
        return self._read(name).to(self._place)

    def get_tensors(self, names: list[str] | None = None) -> dict[str, torch.Tensor]:
        return {name: self.get_tensor(name) for name in (self.keys() if names is None else names)}

    def get_slice(self, name: str) -> Any:
        return _Slice(lambda index: self._read(name)[index].to(self._place), self._entries[name])


def _checkpoint(filename: Any, header: dict[str, Any], place: str) -> _File:
    metadata = header.pop("__metadata__", None)
    with open(filename, "rb") as file:
        first = 8 + struct.unpack("<Q", file.read(8))[0]

    def on_host(name: str) -> torch.Tensor:
        entry, gpu = header[name], gpus_in_use[-1] if gpus_in_use else None
        dtype, shape = _TYPES[entry["dtype"]], entry["shape"]

        def read() -> torch.Tensor:
            with open(filename, "rb") as file:
                file.seek(first + entry["data_offsets"][0])
                content = bytearray(file.read(math.prod(shape) * dtype.itemsize))
            return torch.frombuffer(content, dtype=dtype).reshape(shape) if content else torch.empty(shape, dtype=dtype)

        return read() if gpu is None else gpu.host.read_later(torch.empty(shape, dtype=dtype, device="cpu"), read)

    return _File({name: header[name] for name in sorted(header)}, metadata, on_host, place)


def _written(filename: Any, place: str) -> _File:
    """Open a file that `save_file` wrote here."""
    with open(filename, "rb") as file:  # given the name, PyTorch would read it as a safetensors file
        content = torch.load(file, map_location=place, weights_only=False)
    tensors: dict[str, torch.Tensor] = content["tensors"]
    entries = {
        name: {"shape": list(tensor.shape), "dtype": TYPE_NAMES.get(tensor.dtype, "F32"), "data_offsets": number}
        for number, (name, tensor) in enumerate(tensors.items())
    }
    return _File(entries, content["metadata"], tensors.__getitem__, place)


class _Slice:
    def __init__(self, part: Callable[[Any], torch.Tensor], entry: dict[str, Any]) -> None:
        self._part, self._entry = part, entry

    def __getitem__(self, index: Any) -> torch.Tensor:
        return self._part(index)

    def get_shape(self) -> list[int]:
        return list(self._entry["shape"])

    def get_dtype(self) -> str:
        return str(self._entry["dtype"])
