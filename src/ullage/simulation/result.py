"""What became of a trace: each job with its attempts, each GPU over time, and the figures that sum them up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ullage.simulation.scenario import Scenario


class SimulatedAttempt(NamedTuple):
    """An attempt of a job: placed at `begin`, over at `end`, on these GPUs (by number) with this promise in bytes.

    `cause` is "finished", "out of GPU memory" or "GPU lost".
    """

    begin: float
    end: float
    gpus: tuple[int, ...]
    promise: int
    cause: str


class SimulatedJob(NamedTuple):
    """A job of the trace and what became of it; `state` is "done", "failed" or "waiting" (it could never be placed)."""

    id: int
    kind: str
    user: str
    arrival: float
    work_s: float
    gpus: int
    state: str
    attempts: tuple[SimulatedAttempt, ...]


@dataclass(frozen=True)
class GpuSeries:
    """A GPU over time: from each of `times` on (seconds), until the next, it has so many jobs, bytes in use, SM
    activity (0 to 1) and watts. The last one is the end."""

    index: int
    name: str
    total: int
    times: Sequence[float]
    jobs: Sequence[int]
    memory: Sequence[int]
    smact: Sequence[float]
    power_w: Sequence[float]


@dataclass(frozen=True)
class SimulationResult:
    """The outcome of one simulation. `gpus` has every GPU over time, or nothing for clusters larger than 64 GPUs;
    `energy_j`, `busy_s` (GPU-seconds with a job), `smact` and `memory` (means over GPUs and time, shares 0 to 1) are
    there for all."""

    scenario: Scenario
    trace: str
    jobs: Sequence[SimulatedJob]
    gpus: Sequence[GpuSeries]
    energy_j: float
    busy_s: float
    smact: float
    memory: float
    passes: int
