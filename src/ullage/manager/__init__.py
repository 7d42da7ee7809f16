"""The resource manager: runs many jobs on shared GPUs and loses none.

`core/` decides, `storage/` remembers, `running/` starts processes, `api/` listens, and `client.py` talks to it all.
"""

from ullage.errors import MissingPackage

try:
    import pydantic  # noqa: F401
except ModuleNotFoundError:
    raise MissingPackage("pydantic", "the manager and its client") from None
