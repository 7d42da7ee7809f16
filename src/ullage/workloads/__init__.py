"""What a job is: configurations of training runs and the loop that trains them.

Loaded on first use: the command line needs the words of the options without PyTorch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ullage.workloads.configuration import Configuration, read_rows
    from ullage.workloads.sources.build import build
    from ullage.workloads.training import train

_HOMES = {
    "Configuration": "configuration",
    "build": "sources.build",
    "read_rows": "configuration",
    "train": "training",
}

__all__ = ["Configuration", "build", "read_rows", "train"]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f"ullage.workloads.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'ullage.workloads' has no attribute {name!r}")
