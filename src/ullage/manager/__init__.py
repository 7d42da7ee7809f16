"""The resource manager: runs many jobs on shared GPUs, and loses none of them.

`core/` decides, `storage/` is the database, `running/` starts processes, `api/` answers requests of `client.py`.
"""

import sys
from typing import TYPE_CHECKING

from ullage.errors import MissingPackage
from ullage.lazy import loaded_on_first_use

try:
    if not sys.flags.no_site:  # the supervisor runs without installed packages
        import pydantic  # noqa: F401
except ModuleNotFoundError:
    raise MissingPackage("pydantic", "the daemon and its client") from None

if TYPE_CHECKING:
    from ullage.manager.client import Client

__all__ = ["Client"]

__getattr__ = loaded_on_first_use(__name__, {"Client": "client"})  # most of this package does not need it
