"""The values of one GPU or MIG instance by NVML, each read at its own rate (rates.py)."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from ullage.monitor.gpm import Busy, GpmCounter
from ullage.monitor.rates import due
from ullage.monitor.readings import Reading

_Values = dict[str, Any]


class Asking:
    """Asks NVML: `None` where it has no answer, whatever the reason, unless the GPU is gone.

    Asking(pynvml).ask("nvmlDeviceGetPowerUsage", handle)
    """

    def __init__(self, nvml: Any) -> None:
        self.nvml = nvml
        self._gone_codes = {
            nvml.NVML_ERROR_GPU_IS_LOST,
            getattr(nvml, "NVML_ERROR_RESET_REQUIRED", 16),
            getattr(nvml, "NVML_ERROR_GPU_NOT_FOUND", 28),
        }

    def ask(self, name: str, *args: Any) -> Any:
        """The answer of one of NVML's functions; that a GPU is gone is raised as NVML's error."""
        function = getattr(self.nvml, name, None)  # an older pynvml lacks newer calls
        if function is None:
            return None
        try:
            return function(*args)
        except self.nvml.NVMLError as error:
            self.raise_if_gone(error)
            return None

    def memory(self, handle: Any) -> tuple[int | None, int | None]:
        """Used and usable bytes. The second version of the call keeps what the driver reserves out of both."""
        second = getattr(self.nvml, "nvmlMemory_v2", None)
        info = self.ask("nvmlDeviceGetMemoryInfo", handle, second) if second is not None else None
        if info is not None:
            return int(info.used), int(info.total - info.reserved)
        info = self.ask("nvmlDeviceGetMemoryInfo", handle)
        return (None, None) if info is None else (int(info.used), int(info.total))

    def raise_if_gone(self, error: Any) -> None:
        """Raise an error of NVML again if it says that the GPU is gone."""
        if error.value in self._gone_codes:
            raise error


class Values:
    """What is known of one device from one look to the next; `read` asks for what is due and repeats the rest.

    `counter` is GPM's, where the device has one: activity and PCIe traffic come from it, or are unknown. A MIG instance
    has memory and activity only; the rest belongs to its parent.
    """

    def __init__(
        self, asking: Asking, handle: Any, counter: GpmCounter | None, mig: bool,
        rates: Mapping[str, float], clock: Callable[[], float],
    ) -> None:  # fmt: skip
        self.handle, self.counter = handle, counter
        self._asking, self._rates, self._clock = asking, rates, clock
        groups: dict[str, Callable[[], _Values]] = {"memory": self._memory}
        if counter is not None:
            groups["activity"] = self._activity
        if not mig:
            groups |= {
                "power": self._power,
                "energy": self._energy,
                "temperature": self._temperature,
                "clocks": self._clocks,
                "utilization": self._utilization,
            }
        if not mig and counter is None:
            groups["pcie"] = self._pcie
        self._groups = groups
        self._kept: dict[str, tuple[float, _Values]] = {}
        self._traffic: tuple[float, int, int] | None = None  # when, bytes received, bytes sent

    def read(self) -> Reading:
        """One look."""
        now = self._clock()
        found: _Values = {}
        ages: dict[str, float] = {}
        for group, ask in self._groups.items():
            kept = self._kept.get(group)
            if kept is None or due(self._rates[group], now - kept[0]):
                self._kept.pop(group, None)  # what is asked for and not answered is unknown, not the last value
                values = ask()
                if values:  # else it was the first look at a counter, and the next look has a rate
                    self._kept[group] = (now, values)
            else:
                values = kept[1]
                ages |= {field: now - kept[0] for field, value in values.items() if value is not None}
            found |= values
        return Reading(time=time.time(), ages=ages, **found)

    # One method for each row of the table of rates.

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

    def _power(self) -> _Values:
        return {"power_w": _scaled(self._ask("nvmlDeviceGetPowerUsage"))}

    def _energy(self) -> _Values:
        return {"energy_j": _scaled(self._ask("nvmlDeviceGetTotalEnergyConsumption"))}

    def _temperature(self) -> _Values:
        return {"temperature_c": self._ask("nvmlDeviceGetTemperature", self._asking.nvml.NVML_TEMPERATURE_GPU)}

    def _clocks(self) -> _Values:
        nvml = self._asking.nvml
        return {
            "sm_clock_mhz": self._ask("nvmlDeviceGetClockInfo", nvml.NVML_CLOCK_SM),
            "memory_clock_mhz": self._ask("nvmlDeviceGetClockInfo", nvml.NVML_CLOCK_MEM),
        }

    def _utilization(self) -> _Values:
        rates = self._ask("nvmlDeviceGetUtilizationRates")
        return {"utilization": None if rates is None else rates.gpu / 100}

    def _pcie(self) -> _Values:
        """Bytes a second since the last look, from counters; NVML's own rates would take 20 ms a call."""
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

    def _ask(self, name: str, *args: Any) -> Any:
        return self._asking.ask(name, self.handle, *args)


def _scaled(thousandths: int | None) -> float | None:
    return None if thousandths is None else thousandths / 1000
