"""Which known workload a job of a trace is taken for, where the trace does not say what its jobs train."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ullage.performance.result import Utilization
from ullage.simulation.known import known_workloads


@dataclass(frozen=True)
class Assignment:
    """How jobs are given known workloads: by a `mix` of their sizes and a `seed`."""

    mix: str = "mixed"
    seed: int = 0


def similar_alone(memory: int) -> tuple[Mapping[str, Utilization], str]:
    """What the known workload does whose memory is nearest, and its name.

    >>> similar_alone(13 << 30)[1]
    'resnet50 b128'
    """
    known = min(known_workloads().values(), key=lambda one: abs(one.kind.memory - memory))
    return known.kind.alone, known.name
