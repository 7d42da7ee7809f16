"""The mean activity of a GPU during some work, from two readings of the GPU's own counters."""

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from typing import Any

from ullage.errors import UnknownName
from ullage.hardware.local import nvml_text, pynvml
from ullage.manager.monitor.nvml import INSTALL, SHORTEST, Busy, GpmCounter, gpm_supported


@dataclass
class ActivityBetween(Busy):
    """The result of `activity_between`; `None` is unknown, and `unknown_because` says why.

    Shares are from 0 to 1, traffic in bytes a second, energy in joules; the SM clock is the mean of begin and end.
    """

    device: str = ""
    seconds: float | None = None
    power_w: float | None = None
    energy_j: float | None = None
    clock_mhz: float | None = None
    unknown_because: str | None = None


@contextlib.contextmanager
def activity_between(
    device_id: str | int = 0, nvml: Any = None, clock: Callable[[], float] = time.monotonic
) -> Iterator[ActivityBetween]:
    """Measure one GPU over the enclosed time: mean GRACT, SMACT, SMOCC, DRAMA, tensor activity, PCIe and power.

    `device_id` is the UUID of a GPU or MIG instance, or NVML's index. It reads the counters only twice. All work on the
    GPU counts, by any process; kernels run asynchronously, so synchronize before the end:

        with activity_between(uuid) as activity:
            train()
            torch.cuda.synchronize()
        print(activity.smact, activity.power_w)

    The GPU's counters lag by up to a tenth of a second: let the work run for as long before a short stretch.

    On a machine without a driver, on GPUs before Hopper and over less than 0.1 s the shares are `None`. Not covered:
    DCGM. Power is the GPU's energy over the time, so a MIG instance, which has no counter of its own, has none.
    """
    activity = ActivityBetween(device=str(device_id))
    module = nvml or pynvml()
    activity.unknown_because = _no_driver(module)
    if activity.unknown_because is not None:
        began = clock()
        try:
            yield activity
        finally:
            activity.seconds = clock() - began
        return
    try:
        stretch = _Stretch(module, device_id, clock)
        try:
            yield activity
        finally:
            stretch.end(activity)
    finally:
        with contextlib.suppress(module.NVMLError):
            module.nvmlShutdown()


class _Stretch:
    def __init__(self, nvml: Any, device_id: str | int, clock: Callable[[], float]) -> None:
        self.nvml, self.clock = nvml, clock
        self.handle = _handle(nvml, device_id)
        self.parent, self.instance = _mig_place(nvml, self.handle)
        self.reason: str | None = None
        self.counter: GpmCounter | None = None
        counted = self.parent if self.parent is not None else self.handle
        if gpm_supported(nvml, counted):
            try:
                self.counter = GpmCounter(nvml, counted, self.instance, clock)
            except nvml.NVMLError as error:
                self.reason = f"NVML's GPM counters cannot be read: {error}"
        else:
            self.reason = "NVML gives activity (GPM) on Hopper and later only; this GPU or its driver has none"
        self.clocks = [self._clock_mhz()]
        self.energy = self._energy_mj()
        self.began = clock()

    def end(self, activity: ActivityBetween) -> None:
        activity.seconds = self.clock() - self.began
        busy, reason = self._busy(activity.seconds)
        for field in fields(Busy):
            setattr(activity, field.name, getattr(busy, field.name))
        activity.unknown_because = reason
        energy = self._energy_mj()
        if energy is not None and self.energy is not None and energy >= self.energy:  # a reset driver counts from 0
            activity.energy_j = (energy - self.energy) / 1000
            activity.power_w = activity.energy_j / activity.seconds if activity.seconds >= SHORTEST else None
        self.clocks.append(self._clock_mhz())
        seen = [value for value in self.clocks if value is not None]
        activity.clock_mhz = sum(seen) / len(seen) if seen else None
        try:
            activity.device = nvml_text(self.nvml.nvmlDeviceGetUUID(self.handle))
        except self.nvml.NVMLError as error:
            activity.unknown_because = f"the GPU could not be read at the end: {error}"

    def _busy(self, seconds: float) -> tuple[Busy, str | None]:
        if self.counter is None:
            return Busy(), self.reason
        try:
            if seconds < SHORTEST:
                return Busy(), f"the stretch took {seconds:.3f} s; the counters need {SHORTEST} s at least"
            return self.counter.read(), None
        except self.nvml.NVMLError as error:
            return Busy(), f"NVML's GPM counters cannot be read: {error}"
        finally:
            self.counter.close()

    def _energy_mj(self) -> int | None:
        if self.instance is not None:
            return None  # NVML would answer for the whole GPU
        try:
            return int(self.nvml.nvmlDeviceGetTotalEnergyConsumption(self.handle))
        except self.nvml.NVMLError:
            return None

    def _clock_mhz(self) -> int | None:
        card = self.parent if self.parent is not None else self.handle
        try:
            return int(self.nvml.nvmlDeviceGetClockInfo(card, self.nvml.NVML_CLOCK_SM))
        except self.nvml.NVMLError:
            return None


def _no_driver(nvml: Any) -> str | None:
    """Start NVML; return why it does not start, or `None`."""
    if nvml is None:
        return INSTALL
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        return f"no NVIDIA driver answers: {error}"
    return None


def _handle(nvml: Any, device_id: str | int) -> Any:
    try:
        if isinstance(device_id, int):
            return nvml.nvmlDeviceGetHandleByIndex(device_id)
        return nvml.nvmlDeviceGetHandleByUUID(device_id)
    except nvml.NVMLError:
        raise UnknownName("GPU on this machine", str(device_id), _uuids(nvml)) from None


def _uuids(nvml: Any) -> list[str]:
    uuids = []
    for index in range(nvml.nvmlDeviceGetCount()):
        with contextlib.suppress(nvml.NVMLError):
            uuids.append(nvml_text(nvml.nvmlDeviceGetUUID(nvml.nvmlDeviceGetHandleByIndex(index))))
    return uuids


def _mig_place(nvml: Any, handle: Any) -> tuple[Any, int | None]:
    """Return a MIG instance's parent and number; `None` for a whole GPU."""
    try:
        is_instance = nvml.nvmlDeviceIsMigDeviceHandle(handle)
        if not getattr(is_instance, "value", is_instance):  # pynvml gives a c_uint, which is always true
            return None, None
        return nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle), int(nvml.nvmlDeviceGetGpuInstanceId(handle))
    except nvml.NVMLError:
        return None, None  # drivers from before MIG
