"""What GPUs and hosts do now: readings of NVML, GPM, DCGM, MIG instances, host processes and virtual cards.

with Monitor(best_source()) as monitor:
    for device in monitor.devices():
        print(device.name, monitor.window(device.id).mean("smact"))
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ullage.monitor.activity import ActivityBetween, activity_between
    from ullage.monitor.dcgm import DcgmSource
    from ullage.monitor.host import HostReading, HostWatch
    from ullage.monitor.nvml import NvmlSource
    from ullage.monitor.readings import Device, ProcessReading, Reading, Source
    from ullage.monitor.sampling import Monitor, Window
    from ullage.monitor.sources import VirtualSource, best_source

_HOMES = {
    "ActivityBetween": "activity",
    "Device": "readings",
    "DcgmSource": "dcgm",
    "HostReading": "host",
    "HostWatch": "host",
    "Monitor": "sampling",
    "NvmlSource": "nvml",
    "ProcessReading": "readings",
    "Reading": "readings",
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
    "HostReading",
    "HostWatch",
    "Monitor",
    "NvmlSource",
    "ProcessReading",
    "Reading",
    "Source",
    "VirtualSource",
    "Window",
    "activity_between",
    "best_source",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f"ullage.monitor.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'ullage.monitor' has no attribute {name!r}")
