"""What NVML says of the process that asks: its memory on one GPU. `None` where it says nothing."""

from __future__ import annotations

import importlib
import os
from typing import Any


class ProcessMemory:
    """NVML, started once in a process; it is not shared over a fork.

    >>> ProcessMemory("GPU-00000000-0000-0000-0000-000000000000").read() is None
    True
    """

    def __init__(self, uuid: Any) -> None:
        text = str(uuid)
        self.uuid = text if text.startswith(("GPU-", "MIG-")) else f"GPU-{text}"
        self.driver: str | None = None
        self._nvml: Any = None
        self._handle: Any = None
        try:
            nvml: Any = importlib.import_module("pynvml")
        except ImportError:
            return
        try:
            nvml.nvmlInit()
            self._handle = nvml.nvmlDeviceGetHandleByUUID(self.uuid)
            driver = nvml.nvmlSystemGetDriverVersion()
        except nvml.NVMLError:
            return
        self._nvml = nvml
        self.driver = driver.decode() if isinstance(driver, bytes) else str(driver)

    def read(self) -> int | None:
        """Bytes that this process takes on the GPU."""
        if self._nvml is None:
            return None
        try:
            for process in self._nvml.nvmlDeviceGetComputeRunningProcesses(self._handle):
                if process.pid == os.getpid() and process.usedGpuMemory:
                    return int(process.usedGpuMemory)
        except self._nvml.NVMLError:
            return None
        return None

    def gpu_percent(self) -> int | None:
        """NVML's share of the last second in which any kernel ran, for GPUs that have no finer counters."""
        if self._nvml is None:
            return None
        try:
            return int(self._nvml.nvmlDeviceGetUtilizationRates(self._handle).gpu)
        except self._nvml.NVMLError:
            return None
