"""The reading of a GPU at one moment, the interface of all sources of readings, and the rates of reading."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Protocol


@dataclass(frozen=True)
class Device:
    """A GPU, a MIG instance (`mig`, with its `parent`'s id) or a virtual card.

    `total` is what jobs can use, in bytes. A card in MIG mode is `divided`: jobs run on its instances only.
    """

    id: str
    index: int
    name: str
    total: int | None
    mig: bool = False
    parent: str | None = None
    divided: bool = False
    instance: int | None = None  # NVML's number of the GPU instance, for a MIG instance

    @property
    def takes_jobs(self) -> bool:
        """Whether jobs can run on the device."""
        return not self.divided


@dataclass(frozen=True)
class GPUReading:
    """One reading of a GPU. Shares are from 0 to 1, memory is in bytes, `time` is wall-clock time. `None` is unknown.

    `gract` to `tensor` and the PCIe traffic are means since the last reading. `ages` has the seconds since repeated
    values were read. `utilization` is NVML's share of time with any kernel.
    """

    time: float
    memory_used: int | None = None
    memory_total: int | None = None
    gract: float | None = None
    smact: float | None = None
    smocc: float | None = None
    drama: float | None = None
    tensor: float | None = None
    power_w: float | None = None
    energy_j: float | None = None
    temperature_c: float | None = None
    sm_clock_mhz: float | None = None
    memory_clock_mhz: float | None = None
    pcie_rx_bps: float | None = None
    pcie_tx_bps: float | None = None
    utilization: float | None = None
    ages: Mapping[str, float] = field(default_factory=dict)


FIELDS = tuple(each.name for each in fields(GPUReading) if each.name not in ("time", "ages"))


class Source(Protocol):
    """A source of readings, for one thread at a time. Unknown values are `None`, never 0. `read` and `processes` raise
    `DeviceLost` if a GPU does not answer; `processes` returns bytes by pid, or `None` if unknown."""

    @property
    def name(self) -> str:
        """The name of the source in outputs: nvml, dcgm, virtual."""

    @property
    def hint(self) -> str | None:
        """A line about values that the source lacks and how to get them; `None` if it lacks none."""

    @property
    def rates(self) -> Mapping[str, float]:
        """Seconds between two readings, by the names of `RATES`; all other values are always read."""

    def devices(self) -> list[Device]:
        """List the devices that are there now."""

    def read(self, device_id: str) -> GPUReading:
        """Read one device."""

    def processes(self, device_id: str) -> dict[int, int | None] | None:
        """Return the GPU memory of processes by pid."""

    def close(self) -> None:
        """Release the resources of the source."""


# How often each group of values is read, since NVML's calls take processor time in the driver.
#
# Seconds between two readings; 0 is each time. `benchmarks/speed/monitor_overhead.py` prints the time of each call on a
# machine and tries other rates (--rates activity=2,energy=5). A value that is not due is repeated with its age
# (`GPUReading.ages`). Activity and PCIe are means since the previous reading, so they cover all of the time at any
# rate. On an H200 (driver 580) the two slow calls are those for energy, 3.6 ms of processor time, and GPM, 1.8 ms;
# power takes a microsecond.
RATES: Mapping[str, float] = {
    # Used by placement.
    "memory": 0.0,
    "activity": 3.0,  # GPM: GRACT, SMACT, SMOCC, DRAMA, tensor and PCIe in one call
    # Memory by process. The second rate holds if the GPU's used memory has changed since the last list. The first one
    # finds the remaining changes: a process that allocates exactly what another frees.
    "processes": 5.0,
    "processes moving": 2.0,
    # For people.
    "power": 0.0,
    "energy": 30.0,
    "temperature": 10.0,
    "clocks": 10.0,
    "utilization": 5.0,  # used by placement if activity is not measured
    "pcie": 10.0,  # from counters, on GPUs without GPM only
    "devices": 10.0,  # MIG instances come and go, a lost GPU may come back
}
AT_EVERY_LOOK: Mapping[str, float] = dict.fromkeys(RATES, 0.0)  # for live displays
_EARLY = 0.95  # a reading may come this much too early, since timers are not exact


def due(every: float, age: float | None) -> bool:
    """Whether to read a value again that is `age` seconds old; `None`: it was never read.

    >>> due(0.0, 0.0), due(2.0, 1.0), due(2.0, 1.99), due(2.0, None)
    (True, False, True, True)
    """
    return age is None or age >= every * _EARLY
