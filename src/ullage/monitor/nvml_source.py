"""Readings from NVML, with GPM's activity on Hopper and later."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ullage.errors import DeviceLost, NoGPUSource
from ullage.monitor.gpm import Busy, GpmCounter, gpm_supported
from ullage.monitor.nvml_library import INSTALL, pynvml, text
from ullage.monitor.readings import Device, Reading

_LISTS = (
    "nvmlDeviceGetComputeRunningProcesses",
    "nvmlDeviceGetMPSComputeRunningProcesses",
    "nvmlDeviceGetGraphicsRunningProcesses",
)


@dataclass
class _Known:
    """What is kept of a device from one look to the next."""

    device: Device
    handle: Any
    counter: GpmCounter | None
    pcie: tuple[float, int, int] | None = None  # when, bytes received, bytes sent


class NvmlSource:
    """The GPUs of this machine and their MIG instances, by NVML.

    `nvml` is the module `pynvml` (package nvidia-ml-py) or one like it. GPUs before Hopper have no activity here; DCGM
    has (`DcgmSource`). Of a MIG instance NVML gives memory, processes and, with GPM, activity; power, temperature and
    clocks belong to its parent.

        source = NvmlSource()
        for device in source.devices():
            print(device.name, source.read(device.id).memory_used)
    """

    name = "nvml"

    def __init__(self, nvml: Any = None) -> None:
        self._nvml = nvml or pynvml()
        if self._nvml is None:
            raise NoGPUSource(INSTALL)
        try:
            self._nvml.nvmlInit()
        except self._nvml.NVMLError as error:
            raise NoGPUSource(
                f"needed an NVIDIA driver; NVML says: {error}. 'nvidia-smi' shows whether the driver is there"
            ) from None
        self._known: dict[str, _Known] = {}
        self._gone_codes = {
            self._nvml.NVML_ERROR_GPU_IS_LOST,
            getattr(self._nvml, "NVML_ERROR_RESET_REQUIRED", 16),
            getattr(self._nvml, "NVML_ERROR_GPU_NOT_FOUND", 28),
        }

    def devices(self) -> list[Device]:
        """Cards in NVML's order, each followed by its MIG instances. A card that does not answer is left out."""
        found: dict[str, _Known] = {}
        for index in range(self._count()):
            with contextlib.suppress(self._nvml.NVMLError):
                for known in self._card(index):
                    found[known.device.id] = known
        for id, old in self._known.items():
            if id not in found and old.counter is not None:
                old.counter.close()
        self._known = found
        return [known.device for known in found.values()]

    def read(self, device_id: str) -> Reading:
        """One look; a value that NVML refuses is `None`, and a GPU that is lost raises `DeviceLost`."""
        known = self._find(device_id)
        with self._watching_for_loss(device_id):
            busy = self._busy(known)
            used, total = self._memory(known.handle)
            if known.device.mig:
                return Reading(time.time(), used, total, busy.gract, busy.smact, busy.smocc, busy.drama, busy.tensor)
            return self._of_a_card(known, busy, used, total)

    def processes(self, device_id: str) -> dict[int, int | None] | None:
        """Bytes by pid: compute, MPS clients and graphics together; `None` where NVML gives none of its lists."""
        handle = self._find(device_id).handle
        found: dict[int, int | None] = {}
        answered = False
        with self._watching_for_loss(device_id):
            for name in _LISTS:
                listed = self._ask(name, handle)
                if listed is None:
                    continue
                answered = True
                for process in listed:
                    memory = process.usedGpuMemory
                    before = found.get(process.pid)  # a process with graphics too is in two lists with one figure
                    found[process.pid] = memory if before is None else max(before, memory or 0)
        return found if answered else None

    @property
    def hint(self) -> str | None:
        """What would give activity, where NVML has none."""
        if self.all_active:
            return None
        return "NVML gives activity on Hopper and later only; DCGM (its program dcgmi) would give it on older GPUs"

    @property
    def all_active(self) -> bool:
        """Whether every GPU has GPM, so that nothing else is needed for activity."""
        if not self._known:
            self.devices()
        return all(known.counter is not None for known in self._known.values() if known.device.takes_jobs)

    def close(self) -> None:
        """Give NVML's buffers back and end it."""
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

    def _card(self, index: int) -> Iterator[_Known]:
        nvml = self._nvml
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        id, name = text(nvml.nvmlDeviceGetUUID(handle)), text(nvml.nvmlDeviceGetName(handle))
        places = self._mig_places(handle)
        gpm = gpm_supported(nvml, handle)
        card = Device(id, index, name, self._memory(handle)[1], divided=places is not None)
        # A card in MIG mode is not counted as a whole: its instances are.
        yield self._kept(card, handle) or _Known(card, handle, self._counter(handle, None, gpm and not card.divided))
        for place in range(places or 0):
            with contextlib.suppress(nvml.NVMLError):  # an empty place
                part = nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, place)
                instance = int(nvml.nvmlDeviceGetGpuInstanceId(part))
                device = Device(
                    text(nvml.nvmlDeviceGetUUID(part)), index, text(nvml.nvmlDeviceGetName(part)),
                    self._memory(part)[1], mig=True, parent=id, instance=instance,
                )  # fmt: skip
                yield self._kept(device, part) or _Known(device, part, self._counter(handle, instance, gpm))

    def _kept(self, device: Device, handle: Any) -> _Known | None:
        """A device that was there before keeps its counter, and with it the moment of the last look."""
        old = self._known.get(device.id)
        if old is None or old.device != device:
            return None
        old.handle = handle
        return old

    def _counter(self, handle: Any, instance: int | None, supported: bool) -> GpmCounter | None:
        if not supported:
            return None
        try:
            return GpmCounter(self._nvml, handle, instance)
        except self._nvml.NVMLError:
            return None

    def _mig_places(self, handle: Any) -> int | None:
        mode = self._ask("nvmlDeviceGetMigMode", handle)
        if mode is None or not mode[0]:
            return None
        return int(self._ask("nvmlDeviceGetMaxMigDeviceCount", handle) or 0)

    def _find(self, device_id: str) -> _Known:
        if device_id not in self._known:
            self.devices()
        if device_id not in self._known:
            raise DeviceLost(device_id, "NVML does not list it")
        return self._known[device_id]

    def _of_a_card(self, known: _Known, busy: Busy, used: int | None, total: int | None) -> Reading:
        handle, nvml = known.handle, self._nvml
        received, sent = busy.pcie_rx_bps, busy.pcie_tx_bps
        if received is None and sent is None:
            received, sent = self._pcie(known)
        rates = self._ask("nvmlDeviceGetUtilizationRates", handle)
        return Reading(
            time=time.time(), memory_used=used, memory_total=total,
            gract=busy.gract, smact=busy.smact, smocc=busy.smocc, drama=busy.drama, tensor=busy.tensor,
            power_w=_scaled(self._ask("nvmlDeviceGetPowerUsage", handle), 1e-3),
            energy_j=_scaled(self._ask("nvmlDeviceGetTotalEnergyConsumption", handle), 1e-3),
            temperature_c=self._ask("nvmlDeviceGetTemperature", handle, nvml.NVML_TEMPERATURE_GPU),
            sm_clock_mhz=self._ask("nvmlDeviceGetClockInfo", handle, nvml.NVML_CLOCK_SM),
            memory_clock_mhz=self._ask("nvmlDeviceGetClockInfo", handle, nvml.NVML_CLOCK_MEM),
            pcie_rx_bps=received, pcie_tx_bps=sent, utilization=None if rates is None else rates.gpu / 100,
        )  # fmt: skip

    def _busy(self, known: _Known) -> Busy:
        if known.counter is None:
            return Busy()
        try:
            return known.counter.read()
        except self._nvml.NVMLError as error:
            self._raise_if_gone(error)
            return Busy()

    def _memory(self, handle: Any) -> tuple[int | None, int | None]:
        """Used and usable bytes. The second version of the call keeps what the driver reserves out of both."""
        second = getattr(self._nvml, "nvmlMemory_v2", None)
        info = self._ask("nvmlDeviceGetMemoryInfo", handle, second) if second is not None else None
        if info is not None:
            return int(info.used), int(info.total - info.reserved)
        info = self._ask("nvmlDeviceGetMemoryInfo", handle)
        return (None, None) if info is None else (int(info.used), int(info.total))

    def _pcie(self, known: _Known) -> tuple[float | None, float | None]:
        """Bytes a second since the last look, from counters; NVML's own rates would take 20 ms a call."""
        wanted = [getattr(self._nvml, f"NVML_FI_DEV_PCIE_COUNT_{way}_BYTES", None) for way in ("RX", "TX")]
        values = self._ask("nvmlDeviceGetFieldValues", known.handle, wanted) if None not in wanted else None
        if values is None or any(value.nvmlReturn != self._nvml.NVML_SUCCESS for value in values):
            return None, None
        now = (time.monotonic(), int(values[0].value.ullVal), int(values[1].value.ullVal))
        before, known.pcie = known.pcie, now
        if before is None or now[0] <= before[0] or now[1] < before[1] or now[2] < before[2]:
            return None, None
        seconds = now[0] - before[0]
        return (now[1] - before[1]) / seconds, (now[2] - before[2]) / seconds

    def _ask(self, name: str, *args: Any) -> Any:
        """NVML's answer; `None` where it has none, whatever the reason, unless the GPU is gone."""
        function = getattr(self._nvml, name, None)  # an older pynvml lacks newer calls
        if function is None:
            return None
        try:
            return function(*args)
        except self._nvml.NVMLError as error:
            self._raise_if_gone(error)
            return None

    def _raise_if_gone(self, error: Any) -> None:
        if error.value in self._gone_codes:
            raise error

    @contextlib.contextmanager
    def _watching_for_loss(self, device_id: str) -> Iterator[None]:
        try:
            yield
        except self._nvml.NVMLError as error:
            raise DeviceLost(device_id, str(error)) from None


def _scaled(value: int | None, scale: float) -> float | None:
    return None if value is None else value * scale
