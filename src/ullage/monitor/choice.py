"""Which source of readings to use on this machine."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from ullage.errors import NoGPUSource
from ullage.monitor.dcgm_source import DcgmSource, dcgm_installed
from ullage.monitor.nvml_source import NvmlSource
from ullage.monitor.readings import Source
from ullage.monitor.virtual_source import VirtualSource


def best_source(
    virtual: str | os.PathLike[str] | None = None, interval: float = 1.0, nvml: Any = None, dcgmi: str = "dcgmi",
    rates: Mapping[str, float] | None = None,
) -> Source:  # fmt: skip
    """The source that knows most: virtual cards if a folder is named, else NVML, with DCGM where NVML lacks activity.

    NVML alone is enough where all GPUs have GPM (Hopper and later). DCGM that is installed but does not answer is left
    aside. `rates` replace those of `ullage.monitor.rates`. Without a driver `NoGPUSource` says what was tried and what
    to type.

        monitor = Monitor(best_source())
    """
    if virtual is not None:
        return VirtualSource(virtual)
    try:
        source = NvmlSource(nvml, rates)
    except NoGPUSource as error:
        raise NoGPUSource(
            f"no GPU can be watched here: {error}. Virtual cards can be, without a GPU: add --virtual FOLDER"
        ) from None
    if not source.devices():
        source.close()
        raise NoGPUSource("NVML answers but lists no GPU; 'nvidia-smi -L' shows what the driver sees")
    try:
        if source.all_active or not dcgm_installed(dcgmi):
            return source
        return DcgmSource(source, interval, dcgmi)
    except NoGPUSource:
        return source
