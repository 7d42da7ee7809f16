"""What is read and how often: a GPU's reading at one moment, and what every source of readings offers."""

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
    instance: int | None = None  # NVML's number of the GPU instance, of a MIG instance

    @property
    def takes_jobs(self) -> bool:
        """Whether a job can run on it."""
        return not self.divided


@dataclass(frozen=True)
class GPUReading:
    """One reading of one GPU. Shares are from 0 to 1, memory is in bytes, `time` is the wall clock's. `None` is
    unknown.

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
        """What it is called in outputs: nvml, dcgm, virtual."""

    @property
    def hint(self) -> str | None:
        """One line for a person about what it cannot give and what would; `None` if there is nothing to say."""

    @property
    def rates(self) -> Mapping[str, float]:
        """Seconds between two readings by what is read (rates.py); what is not named costs little: always read."""

    def devices(self) -> list[Device]:
        """What is there now; ask again to see what has come and gone."""

    def read(self, device_id: str) -> GPUReading:
        """One look at one device."""

    def processes(self, device_id: str) -> dict[int, int | None] | None:
        """GPU memory by pid."""

    def close(self) -> None:
        """Let go of what the source holds."""


# How often each thing is read, in one place, since NVML's calls take processor time in the driver.
#
# Seconds between two readings of a thing; 0 is at every look. `benchmarks/speed/monitor_overhead.py` prints what each
# call takes on a machine and tries other rates (--rates activity=2,energy=5). A value that a look did not read afresh
# is repeated, and its age is told (`GPUReading.ages`). Activity and PCIe are means since the reading before, so they
# cover all of the time at any rate. On an H200 (driver 580) the two slow calls are that of energy, 3.6 ms of processor
# time, and GPM's, 1.8 ms; power takes a microsecond.
RATES: Mapping[str, float] = {
    # What placement decides by.
    "memory": 0.0,
    "activity": 3.0,  # GPM: GRACT, SMACT, SMOCC, DRAMA, tensor and PCIe in one call
    # Who holds how much. When the GPU's used memory has moved since the list was read, somebody took or gave back: then
    # the second rate holds. The first is for the rest: one that took just what another gave.
    "processes": 5.0,
    "processes moving": 2.0,
    # What people look at.
    "power": 0.0,
    "energy": 30.0,
    "temperature": 10.0,
    "clocks": 10.0,
    "utilization": 5.0,  # placement looks at it where activity is not measured
    "pcie": 10.0,  # from counters, on GPUs without GPM only
    "devices": 10.0,  # what there is: MIG instances come and go, a lost GPU may come back
}
AT_EVERY_LOOK: Mapping[str, float] = dict.fromkeys(RATES, 0.0)  # for somebody who watches
_EARLY = 0.95  # a look that comes this much before its time counts: looks are a little early or late


def due(every: float, age: float | None) -> bool:
    """Whether to read again what was read `age` seconds ago; `None` is never.

    >>> due(0.0, 0.0), due(2.0, 1.0), due(2.0, 1.99), due(2.0, None)
    (True, False, True, True)
    """
    return age is None or age >= every * _EARLY
