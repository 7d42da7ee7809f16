"""A module shaped like pynvml: the same names, structures and errors, over GPUs that a test describes.

It stands in at the boundary only, because this has to be tested where there is no GPU. The error class, the structures
of GPM and the constants are pynvml's own where that package is installed, so a wrong name fails here too.
"""

from __future__ import annotations

import types
from dataclasses import dataclass, field
from typing import Any

import pynvml

GIB = 1 << 30


@dataclass
class FakeGpu:
    uuid: str = "GPU-00000000-0000-0000-0000-000000000000"
    name: str = "NVIDIA H200"
    total: int = 140 * GIB
    reserved: int = 1 * GIB
    used: int = 10 * GIB
    gpm: bool = True
    busy: dict[int, float] = field(default_factory=dict)  # GPM metric -> value in NVML's unit
    broken: dict[int, int] = field(default_factory=dict)  # GPM metric -> error code
    compute: dict[int, int | None] = field(default_factory=dict)  # pid -> bytes
    graphics: dict[int, int | None] = field(default_factory=dict)
    mps: dict[int, int | None] = field(default_factory=dict)
    utilization: int = 97
    power_mw: int = 300_000
    energy_mj: int = 1_000_000
    pcie_bytes: tuple[int, int] | None = (0, 0)  # received, sent
    errors: dict[str, int] = field(default_factory=dict)  # function -> error code
    instances: list[FakeGpu] = field(default_factory=list)
    instance_id: int | None = None
    parent: FakeGpu | None = None

    def __post_init__(self) -> None:
        for instance in self.instances:
            instance.parent = self


@dataclass
class FakeNvml:
    """`FakeNvml([FakeGpu(...), ...])` is passed where `pynvml` is."""

    gpus: list[FakeGpu]
    init_error: int | None = None
    started: int = 0
    samples: int = 0
    calls: dict[str, int] = field(default_factory=dict)

    def __getattr__(self, name: str) -> Any:
        value = getattr(pynvml, name)  # constants, structures, NVMLError
        if isinstance(value, types.FunctionType) and name.startswith("nvml"):
            raise AssertionError(f"the stand-in lacks {name}, which needs a real GPU")
        return value

    def _asked(self, name: str, gpu: FakeGpu | None = None) -> None:
        self.calls[name] = self.calls.get(name, 0) + 1
        if not self.started and name != "nvmlInit":
            raise pynvml.NVMLError(pynvml.NVML_ERROR_UNINITIALIZED)
        code = gpu.errors.get(name, gpu.errors.get("*")) if gpu else None
        if code is not None:
            raise pynvml.NVMLError(code)

    def nvmlInit(self) -> None:
        self._asked("nvmlInit")
        if self.init_error is not None:
            raise pynvml.NVMLError(self.init_error)
        self.started += 1

    def nvmlShutdown(self) -> None:
        self._asked("nvmlShutdown")
        self.started -= 1

    def nvmlDeviceGetCount(self) -> int:
        self._asked("nvmlDeviceGetCount")
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> FakeGpu:
        if not 0 <= index < len(self.gpus):
            raise pynvml.NVMLError(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        self._asked("nvmlDeviceGetHandleByIndex", self.gpus[index])
        return self.gpus[index]

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> FakeGpu:
        self._asked("nvmlDeviceGetHandleByUUID")
        for gpu in self.gpus:
            for one in (gpu, *gpu.instances):
                if one.uuid == uuid:
                    return one
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)

    def nvmlDeviceGetUUID(self, gpu: FakeGpu) -> str:
        self._asked("nvmlDeviceGetUUID", gpu)
        return gpu.uuid

    def nvmlDeviceGetName(self, gpu: FakeGpu) -> str:
        self._asked("nvmlDeviceGetName", gpu)
        return gpu.name

    def nvmlDeviceGetMemoryInfo(self, gpu: FakeGpu, version: int | None = None) -> Any:
        self._asked("nvmlDeviceGetMemoryInfo_v2" if version else "nvmlDeviceGetMemoryInfo", gpu)
        if version:
            free = gpu.total - gpu.reserved - gpu.used
            return types.SimpleNamespace(total=gpu.total, reserved=gpu.reserved, used=gpu.used, free=free)
        used = gpu.used + gpu.reserved
        return types.SimpleNamespace(total=gpu.total, used=used, free=gpu.total - used)

    def nvmlDeviceGetPowerUsage(self, gpu: FakeGpu) -> int:
        self._asked("nvmlDeviceGetPowerUsage", gpu)
        return gpu.power_mw

    def nvmlDeviceGetTotalEnergyConsumption(self, gpu: FakeGpu) -> int:
        self._asked("nvmlDeviceGetTotalEnergyConsumption", gpu)
        return gpu.energy_mj

    def nvmlDeviceGetUtilizationRates(self, gpu: FakeGpu) -> Any:
        self._asked("nvmlDeviceGetUtilizationRates", gpu)
        return types.SimpleNamespace(gpu=gpu.utilization, memory=30)

    def nvmlDeviceGetTemperature(self, gpu: FakeGpu, sensor: int) -> int:
        self._asked("nvmlDeviceGetTemperature", gpu)
        return 41

    def nvmlDeviceGetClockInfo(self, gpu: FakeGpu, clock: int) -> int:
        self._asked("nvmlDeviceGetClockInfo", gpu)
        return {pynvml.NVML_CLOCK_SM: 1980, pynvml.NVML_CLOCK_MEM: 3201}[clock]

    def nvmlDeviceGetFieldValues(self, gpu: FakeGpu, fields: list[int]) -> list[Any]:
        self._asked("nvmlDeviceGetFieldValues", gpu)
        known = {}
        if gpu.pcie_bytes is not None:
            known[pynvml.NVML_FI_DEV_PCIE_COUNT_RX_BYTES] = gpu.pcie_bytes[0]
            known[pynvml.NVML_FI_DEV_PCIE_COUNT_TX_BYTES] = gpu.pcie_bytes[1]
        found = (pynvml.c_nvmlFieldValue_t * len(fields))()
        for place, wanted in enumerate(fields):
            found[place].fieldId = wanted
            found[place].nvmlReturn = pynvml.NVML_SUCCESS if wanted in known else pynvml.NVML_ERROR_NOT_SUPPORTED
            found[place].valueType = pynvml.NVML_VALUE_TYPE_UNSIGNED_LONG_LONG
            found[place].value.ullVal = known.get(wanted, 0)
        return list(found)

    def nvmlDeviceGetComputeRunningProcesses(self, gpu: FakeGpu) -> list[Any]:
        self._asked("nvmlDeviceGetComputeRunningProcesses", gpu)
        return _listed(gpu.compute)

    def nvmlDeviceGetGraphicsRunningProcesses(self, gpu: FakeGpu) -> list[Any]:
        self._asked("nvmlDeviceGetGraphicsRunningProcesses", gpu)
        return _listed(gpu.graphics)

    def nvmlDeviceGetMPSComputeRunningProcesses(self, gpu: FakeGpu) -> list[Any]:
        self._asked("nvmlDeviceGetMPSComputeRunningProcesses", gpu)
        return _listed(gpu.mps)

    def nvmlDeviceGetMigMode(self, gpu: FakeGpu) -> list[int]:
        self._asked("nvmlDeviceGetMigMode", gpu)
        mode = int(bool(gpu.instances))
        return [mode, mode]

    def nvmlDeviceGetMaxMigDeviceCount(self, gpu: FakeGpu) -> int:
        self._asked("nvmlDeviceGetMaxMigDeviceCount", gpu)
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, gpu: FakeGpu, index: int) -> FakeGpu:
        self._asked("nvmlDeviceGetMigDeviceHandleByIndex", gpu)
        if index >= len(gpu.instances):
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return gpu.instances[index]

    def nvmlDeviceIsMigDeviceHandle(self, gpu: FakeGpu) -> Any:
        return pynvml.c_uint(int(gpu.parent is not None))

    def nvmlDeviceGetDeviceHandleFromMigDeviceHandle(self, gpu: FakeGpu) -> FakeGpu:
        assert gpu.parent is not None
        return gpu.parent

    def nvmlDeviceGetGpuInstanceId(self, gpu: FakeGpu) -> int:
        assert gpu.instance_id is not None
        return gpu.instance_id

    def nvmlGpmQueryDeviceSupport(self, gpu: FakeGpu) -> Any:
        self._asked("nvmlGpmQueryDeviceSupport", gpu)
        return types.SimpleNamespace(isSupportedDevice=int(gpu.gpm))

    def nvmlGpmSampleAlloc(self) -> Any:
        self._asked("nvmlGpmSampleAlloc")
        self.samples += 1
        return pynvml.c_nvmlGpmSample_t(pynvml.struct_c_nvmlGpmSample_t())

    def nvmlGpmSampleFree(self, sample: Any) -> None:
        self._asked("nvmlGpmSampleFree")
        self.samples -= 1

    def nvmlGpmSampleGet(self, gpu: FakeGpu, sample: Any) -> Any:
        assert gpu.parent is None, "an instance is sampled by its parent and its number"
        self._asked("nvmlGpmSampleGet", gpu)
        self._sampled = gpu
        return sample

    def nvmlGpmMigSampleGet(self, gpu: FakeGpu, instance: int, sample: Any) -> Any:
        self._asked("nvmlGpmMigSampleGet", gpu)
        self._sampled = next(one for one in gpu.instances if one.instance_id == instance)
        return sample

    def nvmlGpmMetricsGet(self, request: Any) -> Any:
        self._asked("nvmlGpmMetricsGet", self._sampled)
        assert request.version == pynvml.NVML_GPM_METRICS_GET_VERSION
        assert request.sample1 and request.sample2
        for metric in request.metrics[: request.numMetrics]:
            known = metric.metricId in self._sampled.busy
            missing = self._sampled.broken.get(metric.metricId, pynvml.NVML_ERROR_NOT_SUPPORTED)
            metric.nvmlReturn = pynvml.NVML_SUCCESS if known else missing
            metric.value = self._sampled.busy.get(metric.metricId, 0.0)
        return request


def _listed(processes: dict[int, int | None]) -> list[Any]:
    return [types.SimpleNamespace(pid=pid, usedGpuMemory=memory) for pid, memory in processes.items()]


BUSY = {
    pynvml.NVML_GPM_METRIC_GRAPHICS_UTIL: 95.0,
    pynvml.NVML_GPM_METRIC_SM_UTIL: 61.5,
    pynvml.NVML_GPM_METRIC_SM_OCCUPANCY: 22.25,
    pynvml.NVML_GPM_METRIC_DRAM_BW_UTIL: 40.0,
    pynvml.NVML_GPM_METRIC_ANY_TENSOR_UTIL: 12.0,
    pynvml.NVML_GPM_METRIC_PCIE_RX_PER_SEC: 100.0,
    pynvml.NVML_GPM_METRIC_PCIE_TX_PER_SEC: 50.0,
}
