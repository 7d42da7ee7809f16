"""The resource manager: runs many jobs on shared GPUs and loses none.

`core/` decides, `storage/` remembers, `running/` starts processes, `api/` listens, and `client.py` talks to it all.
"""

import importlib
import sys
from typing import TYPE_CHECKING, Any

from ullage.errors import MissingPackage

try:
    if not sys.flags.no_site:  # the supervisor runs without installed packages
        import pydantic  # noqa: F401
except ModuleNotFoundError:
    raise MissingPackage("pydantic", "the manager and its client") from None

if TYPE_CHECKING:
    from ullage.manager.client import Client

__all__ = ["Client"]


def __getattr__(name: str) -> Any:
    if name == "Client":  # loaded on first use: most of this package does not need it
        return importlib.import_module("ullage.manager.client").Client
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
