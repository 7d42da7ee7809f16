"""safetensors writes tensors by itself, outside PyTorch: here its files get shapes without data, and can be read back.

The stand-in files are `torch.save`'s, under the name that the script gave; files of others are read as ever.
"""

from __future__ import annotations

import os
import zipfile
from types import ModuleType, TracebackType
from typing import Any

import torch

from ullage.virtual.replacements import Replacements


def install(replacements: Replacements) -> None:
    """Put the functions of `safetensors` in place as soon as it is imported."""
    replacements.when_imported("safetensors.torch", lambda module: _functions(module, replacements))
    replacements.when_imported("safetensors", lambda module: _opening(module, replacements))


def _functions(module: ModuleType, replacements: Replacements) -> None:
    load_file = module.load_file

    def save_file(tensors: Any, filename: Any, metadata: Any = None, **options: Any) -> None:
        torch.save(
            {"tensors": {name: tensor.detach() for name, tensor in tensors.items()}, "metadata": metadata}, filename
        )

    def load(filename: Any, device: Any = "cpu", **options: Any) -> Any:
        if not _is_stand_in(filename):
            return load_file(filename, device=device, **options)
        return _content(filename, device)["tensors"]

    replacements.put_all(module, {"save_file": save_file, "load_file": load})


def _opening(module: ModuleType, replacements: Replacements) -> None:
    original = module.safe_open

    def safe_open(filename: Any, framework: str = "pt", device: Any = "cpu", **options: Any) -> Any:
        if framework != "pt" or not _is_stand_in(filename):
            return original(filename, framework, device, **options)
        return _StandIn(filename, device)

    replacements.put(module, "safe_open", safe_open)


def _is_stand_in(filename: Any) -> bool:
    return os.path.isfile(filename) and zipfile.is_zipfile(filename)


def _content(filename: Any, device: Any) -> Any:
    place = f"cuda:{device}" if isinstance(device, int) else str(device)
    with open(filename, "rb") as file:  # by its name, PyTorch would take it for a file of safetensors
        return torch.load(file, map_location=place, weights_only=False)


class _StandIn:
    """What `safe_open` returns for a file of ours."""

    def __init__(self, filename: Any, device: Any) -> None:
        content = _content(filename, device)
        self._tensors, self._metadata = content["tensors"], content["metadata"]

    def __enter__(self) -> _StandIn:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: TracebackType | None) -> None:
        return

    def keys(self) -> list[str]:
        """The names of the tensors."""
        return list(self._tensors)

    offset_keys = keys

    def metadata(self) -> Any:
        """What was saved beside them."""
        return self._metadata

    def get_tensor(self, name: str) -> torch.Tensor:
        """One tensor."""
        tensor: torch.Tensor = self._tensors[name]
        return tensor

    def get_slice(self, name: str) -> Any:
        """One tensor, to be indexed."""
        return _Slice(self._tensors[name])


class _Slice:
    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def __getitem__(self, index: Any) -> torch.Tensor:
        return self._tensor[index]

    def get_shape(self) -> list[int]:
        """The size of the tensor."""
        return list(self._tensor.shape)

    def get_dtype(self) -> str:
        """The type, in safetensors' words."""
        names = {
            torch.float32: "F32",
            torch.float16: "F16",
            torch.bfloat16: "BF16",
            torch.int64: "I64",
            torch.bool: "BOOL",
        }
        return names.get(self._tensor.dtype, "F32")
