"""Packages whose names are loaded on first use, because importing PyTorch takes a second."""

import importlib
from collections.abc import Callable, Mapping
from typing import Any


def loaded_on_first_use(package: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """Return the `__getattr__` of a package; `homes` maps each of its names to a module.

    >>> loaded_on_first_use("ullage", {"format_bytes": "units"})("format_bytes")(1 << 30)
    '1.00 GiB'
    """

    def load(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(f"{package}.{homes[name]}"), name)

    return load
