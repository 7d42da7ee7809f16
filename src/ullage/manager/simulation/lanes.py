"""Attempts as bars in lanes: those that run on a GPU at once are drawn below each other."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import NamedTuple

from ullage.manager.simulation.result import SimulatedAttempt, SimulatedJob


class LaneBar(NamedTuple):
    """An attempt on one of its GPUs, in a lane that it has to itself for its time."""

    gpu: int
    lane: int
    attempt: SimulatedAttempt
    job: SimulatedJob


def in_lanes(jobs: Sequence[SimulatedJob], gpus: int) -> tuple[list[LaneBar], list[int]]:
    """Give every attempt a lane on each of its GPUs, those at once different ones; and count those of each GPU."""
    taken: list[list[tuple[float, int]]] = [[] for _ in range(gpus)]  # when each lane is free again, the first first
    free: list[list[int]] = [[] for _ in range(gpus)]
    bars = []
    attempts = [(each.begin, job.id, gpu, each, job) for job in jobs for each in job.attempts for gpu in each.gpus]
    for begin, _, gpu, attempt, job in sorted(attempts, key=lambda row: row[:3]):
        while taken[gpu] and taken[gpu][0][0] <= begin:
            heapq.heappush(free[gpu], heapq.heappop(taken[gpu])[1])
        lane = heapq.heappop(free[gpu]) if free[gpu] else len(taken[gpu])
        heapq.heappush(taken[gpu], (attempt.end, lane))
        bars.append(LaneBar(gpu, lane, attempt, job))
    return bars, [max(1, len(taken[gpu]) + len(free[gpu])) for gpu in range(gpus)]
