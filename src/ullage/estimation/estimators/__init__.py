"""Every method of estimating GPU memory, behind one registry: a module or a folder for each.

`estimators()` lists their names. A new one is a module here and a line in `registry.py`.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ullage.estimation.estimators.registry import estimators

__all__ = ["estimators"]


def __getattr__(name: str) -> Any:
    if name == "estimators":  # loaded on first use: the registry imports the jobs that it supports
        return importlib.import_module("ullage.estimation.estimators.registry").estimators
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
