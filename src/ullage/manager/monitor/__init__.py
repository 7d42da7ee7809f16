"""What GPUs and hosts do now: readings of NVML, GPM, DCGM, MIG instances, host processes and virtual cards.

with Monitor(best_source()) as monitor:
    for device in monitor.devices():
        print(device.name, monitor.window(device.id).mean("smact"))
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ullage.manager.monitor.activity import ActivityBetween, activity_between
    from ullage.manager.monitor.dcgm import DcgmSource
    from ullage.manager.monitor.host import HostReading, HostWatch
    from ullage.manager.monitor.nvml import NvmlSource
    from ullage.manager.monitor.readings import Device, GPUReading, ProcessReading, Source
    from ullage.manager.monitor.sampling import Monitor, Window
    from ullage.manager.monitor.sources import VirtualSource, best_source

_HOMES = {
    "ActivityBetween": "activity",
    "Device": "readings",
    "DcgmSource": "dcgm",
    "GPUReading": "readings",
    "HostReading": "host",
    "HostWatch": "host",
    "Monitor": "sampling",
    "NvmlSource": "nvml",
    "ProcessReading": "readings",
    "Source": "readings",
    "VirtualSource": "sources",
    "Window": "sampling",
    "activity_between": "activity",
    "best_source": "sources",
}

__all__ = [
    "ActivityBetween",
    "DcgmSource",
    "Device",
    "GPUReading",
    "HostReading",
    "HostWatch",
    "Monitor",
    "NvmlSource",
    "ProcessReading",
    "Source",
    "VirtualSource",
    "Window",
    "activity_between",
    "best_source",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f"ullage.manager.monitor.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'ullage.manager.monitor' has no attribute {name!r}")
