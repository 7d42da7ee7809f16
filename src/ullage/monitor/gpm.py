"""NVML's GPM: how busy the parts of a GPU were between two looks, from counters in the hardware (Hopper and later)."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ullage.units import MIB

# The driver refreshes its counters about every 100 ms (NVML reference, nvmlGpmMetricsGet): over less they say nothing.
SHORTEST = 0.1
# Counters are read one after another, so a full unit may come out a little over 100 %. Beyond this it is no reading.
_OVER_FULL = 1.05


@dataclass(frozen=True)
class Busy:
    """Means over the time between two looks: shares from 0 to 1, traffic in bytes a second, `None` where unknown.

    >>> Busy(smact=0.4).smocc is None
    True
    """

    gract: float | None = None
    smact: float | None = None
    smocc: float | None = None
    drama: float | None = None
    tensor: float | None = None
    pcie_rx_bps: float | None = None
    pcie_tx_bps: float | None = None


# Field, name of NVML's metric, what one of its units is in ours (percent; MiB a second).
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
    """The counters of one GPU or MIG instance: each `read()` gives the means since the one before.

    `nvml` is the module `pynvml`; `handle` is the GPU's, for a MIG instance its parent's, with `instance` the GPU
    instance's number. Make one only where `gpm_supported` says so. Not covered: several threads at once.

        counter = GpmCounter(pynvml, handle)
        train()
        counter.read().smact
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
        """Means since the last read. Within 0.1 s of it the counters have not moved on, and the last means stand."""
        if self._clock() - self._since < SHORTEST:
            return self._last
        before, now = self._samples
        self._look(now)
        self._since = self._clock()
        self._samples = [now, before]  # also where what follows fails: the next read starts from here
        self._last = Busy()
        self._request.sample1, self._request.sample2 = before, now
        self._nvml.nvmlGpmMetricsGet(self._request)
        found = (self._value(place, scale) for place, (_, _, scale) in enumerate(_METRICS))
        self._last = Busy(**{field: value for (field, _, _), value in zip(_METRICS, found, strict=True)})
        return self._last

    def close(self) -> None:
        """Give NVML its buffers back."""
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
    """Whether this GPU, this driver and this pynvml have GPM; asked of the parent for a MIG instance.

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
