"""Readings from NVML, through the optional package nvidia-ml-py. Activity comes from GPM, on Hopper and later:
hardware counters between two readings. Each value is read at its own rate (`readings.RATES`)."""

import contextlib
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ullage.errors import DeviceLost, NoGPUSource
from ullage.hardware.local import nvml_text, pynvml
from ullage.manager.monitor.readings import RATES, Device, GPUReading, due
from ullage.units import MIB

# The driver refreshes its counters about every 100 ms (NVML reference, nvmlGpmMetricsGet), so less makes no sense.
SHORTEST = 0.1
# Counters are read one after another, so a full unit may exceed 100% a little. A value beyond this is invalid.
_OVER_FULL = 1.05


@dataclass
class Busy:
    """Means between two readings: shares from 0 to 1, traffic in bytes a second, `None` if unknown."""

    gract: float | None = None
    smact: float | None = None
    smocc: float | None = None
    drama: float | None = None
    tensor: float | None = None
    pcie_rx_bps: float | None = None
    pcie_tx_bps: float | None = None


# Field, name of NVML's metric, and the factor from its unit (percent; MiB a second) to ours.
_METRICS = (
    ("gract", "NVML_GPM_METRIC_GRAPHICS_UTIL", 0.01),
    ("smact", "NVML_GPM_METRIC_SM_UTIL", 0.01),
    ("smocc", "NVML_GPM_METRIC_SM_OCCUPANCY", 0.01),
    ("drama", "NVML_GPM_METRIC_DRAM_BW_UTIL", 0.01),
    ("tensor", "NVML_GPM_METRIC_ANY_TENSOR_UTIL", 0.01),
    ("pcie_rx_bps", "NVML_GPM_METRIC_PCIE_RX_PER_SEC", float(MIB)),
    ("pcie_tx_bps", "NVML_GPM_METRIC_PCIE_TX_PER_SEC", float(MIB)),
)


class GpmCounter:
    """The counters of one GPU or MIG instance: each `read()` returns the means since the last one. Not thread-safe.

    `handle` is that of the GPU, or of the parent of the MIG instance number `instance`. Check `gpm_supported` first.
    """

    def __init__(
        self, nvml: Any, handle: Any, instance: int | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._nvml, self._handle, self._instance, self._clock = nvml, handle, instance, clock
        self._samples: list[Any] = []
        try:
            for _ in range(2):
                self._samples.append(nvml.nvmlGpmSampleAlloc())
            self._request = self._prepared()
            self._look(self._samples[0])
        except BaseException:
            self.close()
            raise
        self._since = clock()
        self._last = Busy()

    def read(self) -> Busy:
        """Return the means since the last read; within 0.1 s of it, the same means again."""
        if self._clock() - self._since < SHORTEST:
            return self._last
        before, now = self._samples
        self._look(now)
        self._since = self._clock()
        self._samples = [now, before]  # the next read starts here, even if this one fails
        self._last = Busy()
        self._request.sample1, self._request.sample2 = before, now
        self._nvml.nvmlGpmMetricsGet(self._request)
        means = (self._value(place, scale) for place, (_, _, scale) in enumerate(_METRICS))
        self._last = Busy(**{field: value for (field, _, _), value in zip(_METRICS, means, strict=True)})
        return self._last

    def close(self) -> None:
        for sample in self._samples:
            try:
                self._nvml.nvmlGpmSampleFree(sample)
            except self._nvml.NVMLError:
                continue  # the GPU is gone, and its buffers with it
        self._samples = []

    def _prepared(self) -> Any:
        request = self._nvml.c_nvmlGpmMetricsGet_t()
        request.version = self._nvml.NVML_GPM_METRICS_GET_VERSION
        request.numMetrics = len(_METRICS)
        for place, (_, name, _) in enumerate(_METRICS):
            request.metrics[place].metricId = getattr(self._nvml, name)
        return request

    def _look(self, sample: Any) -> None:
        if self._instance is None:
            self._nvml.nvmlGpmSampleGet(self._handle, sample)
        else:
            self._nvml.nvmlGpmMigSampleGet(self._handle, self._instance, sample)

    def _value(self, place: int, scale: float) -> float | None:
        metric = self._request.metrics[place]
        if metric.nvmlReturn != self._nvml.NVML_SUCCESS:
            return None
        value = float(metric.value) * scale
        if not math.isfinite(value) or value < 0:
            return None
        if scale < 1:  # a share
            return min(value, 1.0) if value <= _OVER_FULL else None
        return value


def gpm_supported(nvml: Any, handle: Any) -> bool:
    """Whether this GPU, this driver and this pynvml have GPM. For a MIG instance, pass the handle of its parent.

    >>> gpm_supported(object(), None)  # a pynvml from before GPM
    False
    """
    ask = getattr(nvml, "nvmlGpmQueryDeviceSupport", None)
    if ask is None:
        return False
    try:
        return bool(ask(handle).isSupportedDevice)
    except nvml.NVMLError:
        return False


_Values = dict[str, Any]


class Asking:
    """Calls NVML, and returns `None` if it has no answer, for whatever reason, unless the GPU is gone.

    Asking(pynvml).ask("nvmlDeviceGetPowerUsage", handle)
    """

    def __init__(self, nvml: Any, clock: Callable[[], float] = time.monotonic) -> None:
        self.nvml, self.clock = nvml, clock
        self._gone_codes = {
            nvml.NVML_ERROR_GPU_IS_LOST,
            getattr(nvml, "NVML_ERROR_RESET_REQUIRED", 16),
            getattr(nvml, "NVML_ERROR_GPU_NOT_FOUND", 28),
        }

    def ask(self, name: str, *args: Any) -> Any:
        """Call one of NVML's functions; raise NVML's error only if the GPU is gone."""
        function = getattr(self.nvml, name, None)  # an older pynvml lacks newer calls
        if function is None:
            return None
        try:
            return function(*args)
        except self.nvml.NVMLError as error:
            self.raise_if_gone(error)
            return None

    def memory(self, handle: Any) -> tuple[int | None, int | None]:
        """Return used and usable bytes, without the driver's reserve if NVML reports it."""
        second = getattr(self.nvml, "nvmlMemory_v2", None)
        info = self.ask("nvmlDeviceGetMemoryInfo", handle, second) if second is not None else None
        if info is not None:
            return int(info.used), int(info.total - info.reserved)
        info = self.ask("nvmlDeviceGetMemoryInfo", handle)
        return (None, None) if info is None else (int(info.used), int(info.total))

    def raise_if_gone(self, error: Any) -> None:
        """Raise NVML's error again if the GPU is gone."""
        if error.value in self._gone_codes:
            raise error


class NVMLValues:
    """The values of one device; `read` reads those that are due and repeats the others. If the device has a GPM
    `counter`, activity and PCIe traffic come from it. A MIG instance has only memory and activity."""

    def __init__(
        self, device: Device, handle: Any, counter: GpmCounter | None, asking: Asking, rates: Mapping[str, float]
    ) -> None:
        self.device, self.handle, self.counter = device, handle, counter
        self._asking, self._rates, self._clock = asking, rates, asking.clock
        self._last_values: dict[str, tuple[float, _Values]] = {}
        self._traffic: tuple[float, int, int] | None = None  # time, bytes received, bytes sent
        groups: dict[str, Callable[[], _Values]] = {"memory": self._memory}
        if counter is not None:
            groups["activity"] = self._activity
        if not device.mig:
            groups |= {
                "power": lambda: {"power_w": self._thousandths("nvmlDeviceGetPowerUsage")},
                "energy": lambda: {"energy_j": self._thousandths("nvmlDeviceGetTotalEnergyConsumption")},
                "temperature": lambda: {
                    "temperature_c": self._ask("nvmlDeviceGetTemperature", self._asking.nvml.NVML_TEMPERATURE_GPU)
                },
                "clocks": self._clocks,
                "utilization": self._utilization,
            }
        if not device.mig and counter is None:
            groups["pcie"] = self._pcie
        self._groups = groups

    def read(self) -> GPUReading:
        now = self._clock()
        all_values: _Values = {}
        ages: dict[str, float] = {}
        for group, ask in self._groups.items():
            cached = self._last_values.get(group)
            if cached is None or due(self._rates[group], now - cached[0]):
                self._last_values.pop(group, None)  # without an answer, the value is unknown, not the old one
                values = ask()
                if values:  # empty at the first reading of a counter, which has no rate yet
                    self._last_values[group] = (now, values)
            else:
                values = cached[1]
                ages |= {field: now - cached[0] for field, value in values.items() if value is not None}
            all_values |= values
        return GPUReading(time=time.time(), ages=ages, **all_values)

    def _memory(self) -> _Values:
        used, total = self._asking.memory(self.handle)
        return {"memory_used": used, "memory_total": total}

    def _activity(self) -> _Values:
        assert self.counter is not None
        try:
            busy = self.counter.read()
        except self._asking.nvml.NVMLError as error:
            self._asking.raise_if_gone(error)
            busy = Busy()
        return vars(busy)

    def _clocks(self) -> _Values:
        nvml = self._asking.nvml
        kinds = {"sm_clock_mhz": nvml.NVML_CLOCK_SM, "memory_clock_mhz": nvml.NVML_CLOCK_MEM}
        return {field: self._ask("nvmlDeviceGetClockInfo", kind) for field, kind in kinds.items()}

    def _utilization(self) -> _Values:
        rates = self._ask("nvmlDeviceGetUtilizationRates")
        return {"utilization": None if rates is None else rates.gpu / 100}

    def _pcie(self) -> _Values:
        """Return bytes a second since the last reading, from counters, since NVML's own rates take 20 ms a call."""
        nvml = self._asking.nvml
        wanted = [getattr(nvml, f"NVML_FI_DEV_PCIE_COUNT_{way}_BYTES", None) for way in ("RX", "TX")]
        values = self._ask("nvmlDeviceGetFieldValues", wanted) if None not in wanted else None
        if values is None or any(value.nvmlReturn != nvml.NVML_SUCCESS for value in values):
            return {"pcie_rx_bps": None, "pcie_tx_bps": None}
        now = (self._clock(), int(values[0].value.ullVal), int(values[1].value.ullVal))
        before, self._traffic = self._traffic, now
        if before is None or now[0] <= before[0] or now[1] < before[1] or now[2] < before[2]:
            return {}
        seconds = now[0] - before[0]
        return {"pcie_rx_bps": (now[1] - before[1]) / seconds, "pcie_tx_bps": (now[2] - before[2]) / seconds}

    def _thousandths(self, name: str) -> float | None:
        value = self._ask(name)
        return None if value is None else value / 1000

    def _ask(self, name: str, *args: Any) -> Any:
        return self._asking.ask(name, self.handle, *args)


INSTALL = "the package nvidia-ml-py must be installed to ask NVML; type: pip install nvidia-ml-py"


_LISTS = (
    "nvmlDeviceGetComputeRunningProcesses",
    "nvmlDeviceGetMPSComputeRunningProcesses",
    "nvmlDeviceGetGraphicsRunningProcesses",
)


class NvmlSource:
    """The GPUs of this machine and their MIG instances, read with NVML.

    `nvml` is the module `pynvml` or a replacement; `rates` override `RATES`. GPUs before Hopper have no activity here
    (use `DcgmSource`). A MIG instance has memory, processes and, with GPM, activity.
    """

    name = "nvml"

    def __init__(
        self, nvml: Any = None, rates: Mapping[str, float] | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._nvml = nvml or pynvml()
        if self._nvml is None:
            raise NoGPUSource(INSTALL)
        try:
            self._nvml.nvmlInit()
        except self._nvml.NVMLError as error:
            raise NoGPUSource(
                f"NVML must have an NVIDIA driver, but says: {error}. 'nvidia-smi' shows whether the driver is there"
            ) from None
        self._asking, self.rates = Asking(self._nvml, clock), {**RATES, **(rates or {})}
        self._known: dict[str, NVMLValues] = {}
        self._lock = threading.RLock()  # two threads that use the same GPM buffers crash the process

    def devices(self) -> list[Device]:
        """List the cards that answer, each followed by its MIG instances."""
        with self._lock:
            return self._devices()

    def _devices(self) -> list[Device]:
        devices: dict[str, NVMLValues] = {}
        for index in range(self._count()):
            with contextlib.suppress(self._nvml.NVMLError):
                for known in self._card(index):
                    devices[known.device.id] = known
        for id, old in self._known.items():
            if devices.get(id) is not old and old.counter is not None:
                old.counter.close()
        self._known = devices
        return [known.device for known in devices.values()]

    def read(self, device_id: str) -> GPUReading:
        """Return a reading: refused values are `None`, values not due are repeated with their ages. May raise
        `DeviceLost`."""
        with self._lock, self._watching_for_loss(device_id):
            return self._find(device_id).read()

    def processes(self, device_id: str) -> dict[int, int | None] | None:
        """Return bytes by pid of compute, MPS clients and graphics; `None` if NVML gives no list."""
        by_pid: dict[int, int | None] = {}
        answered = False
        with self._lock, self._watching_for_loss(device_id):
            handle = self._find(device_id).handle
            for name in _LISTS:
                listed = self._asking.ask(name, handle)
                if listed is None:
                    continue
                answered = True
                for process in listed:
                    memory = process.usedGpuMemory
                    before = by_pid.get(process.pid)  # a process that also does graphics is in two lists with one value
                    by_pid[process.pid] = memory if before is None else max(before, memory or 0)
        return by_pid if answered else None

    @property
    def hint(self) -> str | None:
        """Return what to install to get activity, if NVML has none."""
        if self.all_active:
            return None
        return "NVML gives activity on Hopper and later only; DCGM (its program dcgmi) would give it on older GPUs"

    @property
    def all_active(self) -> bool:
        """Whether every GPU has GPM."""
        if not self._known:
            self.devices()
        return all(known.counter is not None for known in self._known.values() if known.device.takes_jobs)

    def close(self) -> None:
        with self._lock:
            for known in self._known.values():
                if known.counter is not None:
                    known.counter.close()
            self._known = {}
            with contextlib.suppress(self._nvml.NVMLError):
                self._nvml.nvmlShutdown()

    def _count(self) -> int:
        try:
            return int(self._nvml.nvmlDeviceGetCount())
        except self._nvml.NVMLError as error:
            raise NoGPUSource(f"NVML cannot list this machine's GPUs: {error}") from None

    def _card(self, index: int) -> Iterator[NVMLValues]:
        nvml = self._nvml
        card = nvml.nvmlDeviceGetHandleByIndex(index)
        places = self._mig_places(card)
        # The counters of a GPU in MIG mode are those of its instances.
        whole = self._device(index, card, card, divided=places is not None)
        yield whole
        for place in range(places or 0):
            with contextlib.suppress(nvml.NVMLError):  # an empty place
                part = nvml.nvmlDeviceGetMigDeviceHandleByIndex(card, place)
                instance = int(nvml.nvmlDeviceGetGpuInstanceId(part))
                yield self._device(index, part, card, mig=True, parent=whole.device.id, instance=instance)

    def _device(self, index: int, handle: Any, card: Any, **more: Any) -> NVMLValues:
        id = nvml_text(self._nvml.nvmlDeviceGetUUID(handle))
        old = self._known.get(id)
        if old is not None and replace(old.device, index=index, **more) == old.device:
            old.handle = handle
            return old
        name, total = nvml_text(self._nvml.nvmlDeviceGetName(handle)), self._asking.memory(handle)[1]
        device, counter = Device(id, index, name, total, **more), None
        if not device.divided and gpm_supported(self._nvml, card):
            with contextlib.suppress(self._nvml.NVMLError):
                counter = GpmCounter(self._nvml, card, device.instance)
        return NVMLValues(device, handle, counter, self._asking, self.rates)

    def _mig_places(self, handle: Any) -> int | None:
        mode = self._asking.ask("nvmlDeviceGetMigMode", handle)
        if mode is None or not mode[0]:
            return None
        return int(self._asking.ask("nvmlDeviceGetMaxMigDeviceCount", handle) or 0)

    def _find(self, device_id: str) -> NVMLValues:
        if device_id not in self._known:
            self.devices()
        if device_id not in self._known:
            raise DeviceLost(device_id, "NVML does not list it")
        return self._known[device_id]

    @contextlib.contextmanager
    def _watching_for_loss(self, device_id: str) -> Iterator[None]:
        try:
            yield
        except self._nvml.NVMLError as error:
            raise DeviceLost(device_id, str(error)) from None
