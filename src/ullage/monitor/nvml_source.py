"""Readings from NVML, with GPM's activity on Hopper and later."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ullage.errors import DeviceLost, NoGPUSource
from ullage.monitor.gpm import GpmCounter, gpm_supported
from ullage.monitor.nvml_library import INSTALL, pynvml, text
from ullage.monitor.nvml_values import Asking, Values
from ullage.monitor.rates import RATES
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
    values: Values


class NvmlSource:
    """The GPUs of this machine and their MIG instances, by NVML.

    `nvml` is the module `pynvml` (package nvidia-ml-py) or one like it; `rates` are seconds that replace those of
    `RATES`, by their names. GPUs before Hopper have no activity here; DCGM
    has (`DcgmSource`). Of a MIG instance NVML gives memory, processes and, with GPM, activity; power, temperature and
    clocks belong to its parent.

        source = NvmlSource()
        for device in source.devices():
            print(device.name, source.read(device.id).memory_used)
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
                f"needed an NVIDIA driver; NVML says: {error}. 'nvidia-smi' shows whether the driver is there"
            ) from None
        self._asking, self.rates, self._clock = Asking(self._nvml), {**RATES, **(rates or {})}, clock
        self._known: dict[str, _Known] = {}
        self._lock = threading.RLock()  # two threads in one pair of GPM's buffers end the process

    def devices(self) -> list[Device]:
        """Cards in NVML's order, each followed by its MIG instances. A card that does not answer is left out."""
        with self._lock:
            return self._devices()

    def _devices(self) -> list[Device]:
        found: dict[str, _Known] = {}
        for index in range(self._count()):
            with contextlib.suppress(self._nvml.NVMLError):
                for known in self._card(index):
                    found[known.device.id] = known
        for id, old in self._known.items():
            if found.get(id) is not old and old.values.counter is not None:
                old.values.counter.close()
        self._known = found
        return [known.device for known in found.values()]

    def read(self, device_id: str) -> Reading:
        """One look; a value that NVML refuses is `None`, and a GPU that is lost raises `DeviceLost`.

        What is not due yet is repeated from the last look that read it, with its age in `Reading.ages`.
        """
        with self._lock, self._watching_for_loss(device_id):
            return self._find(device_id).values.read()

    def processes(self, device_id: str) -> dict[int, int | None] | None:
        """Bytes by pid: compute, MPS clients and graphics together; `None` where NVML gives none of its lists."""
        found: dict[int, int | None] = {}
        answered = False
        with self._lock, self._watching_for_loss(device_id):
            handle = self._find(device_id).values.handle
            for name in _LISTS:
                listed = self._asking.ask(name, handle)
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
        return all(known.values.counter is not None for known in self._known.values() if known.device.takes_jobs)

    def close(self) -> None:
        """Give NVML's buffers back and end it."""
        with self._lock:
            for known in self._known.values():
                if known.values.counter is not None:
                    known.values.counter.close()
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
        id = text(nvml.nvmlDeviceGetUUID(handle))
        places = self._mig_places(handle)
        divided = places is not None
        # A card in MIG mode is not counted as a whole: its instances are.
        yield self._kept(id, index, handle, divided) or self._new(
            Device(id, index, text(nvml.nvmlDeviceGetName(handle)), self._asking.memory(handle)[1], divided=divided),
            handle, handle,
        )  # fmt: skip
        for place in range(places or 0):
            with contextlib.suppress(nvml.NVMLError):  # an empty place
                part = nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, place)
                part_id, instance = text(nvml.nvmlDeviceGetUUID(part)), int(nvml.nvmlDeviceGetGpuInstanceId(part))
                yield self._kept(part_id, index, part, instance=instance) or self._new(
                    Device(
                        part_id, index, text(nvml.nvmlDeviceGetName(part)), self._asking.memory(part)[1],
                        mig=True, parent=id, instance=instance,
                    ),
                    part, handle,
                )  # fmt: skip

    def _kept(
        self, id: str, index: int, handle: Any, divided: bool = False, instance: int | None = None
    ) -> _Known | None:
        """A device that was there before keeps its counter and its last values; its name is not asked again."""
        old = self._known.get(id)
        if old is None or (old.device.index, old.device.divided, old.device.instance) != (index, divided, instance):
            return None
        old.values.handle = handle
        return old

    def _new(self, device: Device, handle: Any, card: Any) -> _Known:
        counter = None
        if not device.divided and gpm_supported(self._nvml, card):
            with contextlib.suppress(self._nvml.NVMLError):
                counter = GpmCounter(self._nvml, card, device.instance)
        return _Known(device, Values(self._asking, handle, counter, device.mig, self.rates, self._clock))

    def _mig_places(self, handle: Any) -> int | None:
        mode = self._asking.ask("nvmlDeviceGetMigMode", handle)
        if mode is None or not mode[0]:
            return None
        return int(self._asking.ask("nvmlDeviceGetMaxMigDeviceCount", handle) or 0)

    def _find(self, device_id: str) -> _Known:
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
