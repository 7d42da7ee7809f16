"""What jobs may have of this machine's cores and memory, and what each of them is promised of it."""

from collections.abc import Mapping
from typing import Any

from ullage.manager.monitor.host import usable_cores, usable_memory
from ullage.manager.placement import HostShare
from ullage.manager.settings import HostSettings


def host_of(settings: HostSettings) -> HostShare:
    """What all jobs together may have. Where no limit was set a core is left to them, however large the reserve.

    >>> host_of(HostSettings(cores=8, memory="64GiB"))
    HostShare(cores=8, memory=68719476736)
    """
    cores = max(1, usable_cores() - settings.reserve_cores) if settings.cores is None else settings.cores
    memory = max(0, usable_memory() - settings.reserve_memory) if settings.memory is None else settings.memory
    return HostShare(cores, memory)


def share_of(request: Mapping[str, Any], settings: HostSettings) -> HostShare:
    """Return the cores and host memory to promise a job. A job without a GPU gets a core at least."""
    cores, memory = request.get("cores"), request.get("host_memory")
    least = 1 if request["gpus"] == 0 else 0
    return HostShare(
        max(least, settings.default_cores if cores is None else cores),
        settings.default_memory if memory is None else memory,
    )
