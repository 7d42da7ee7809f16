"""The resource manager: runs many jobs on shared GPUs and loses none.

`core/` decides, `storage/` remembers, `running/` starts processes, `api/` listens, and `client.py` talks to it all.
"""

import sys

from ullage.errors import MissingPackage

try:
    if not sys.flags.no_site:  # the supervisor runs without installed packages
        import pydantic  # noqa: F401
except ModuleNotFoundError:
    raise MissingPackage("pydantic", "the manager and its client") from None
