"""How often each thing is read. The one place to change it: NVML's calls take processor time in the driver."""

from __future__ import annotations

from collections.abc import Mapping

# Seconds between two readings of a thing; 0 is at every look. `benchmarks/monitor_overhead.py` prints what each call
# takes on a machine and tries other rates (--rates activity=2,energy=5). A value that a look did not read afresh is
# repeated, and its age is told (`Reading.ages`). Means since the reading before (activity, PCIe, power by energy) cover
# all of the time at any rate.
RATES: Mapping[str, float] = {
    # What placement decides by.
    "memory": 0.0,
    "activity": 0.0,  # GPM: GRACT, SMACT, SMOCC, DRAMA, tensor and PCIe in one call
    "energy": 0.0,  # and power, which is its growth over time
    # Who holds how much. When the GPU's used memory has moved since the list was read, somebody took or gave back: then
    # the second rate holds. The first is for the rest: one that took just what another gave.
    "processes": 5.0,
    "processes moving": 2.0,
    # What people look at.
    "temperature": 10.0,
    "clocks": 10.0,
    "utilization": 10.0,
    "pcie": 10.0,  # from counters, on GPUs without GPM only
    "devices": 10.0,  # what there is: MIG instances come and go, a lost GPU may come back
}
_EARLY = 0.95  # a look that comes this much before its time counts: looks are a little early or late


def due(every: float, age: float | None) -> bool:
    """Whether to read again what was read `age` seconds ago; `None` is never.

    >>> due(0.0, 0.0), due(2.0, 1.0), due(2.0, 1.99), due(2.0, None)
    (True, False, True, True)
    """
    return age is None or age >= every * _EARLY
