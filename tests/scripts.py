"""Estimates of scripts, as tests ask for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ullage.estimation.result import Estimate
from ullage.estimation.scripts import parent
from ullage.hardware import gpu as find_gpu
from ullage.jobs.job import JobRequest, Ranks, Script
from ullage.jobs.ranks import Rank


def estimate_script(
    path: Any,
    args: Sequence[str] = (),
    *,
    gpu: str = "H200",
    rank: Rank | None = None,
    steps: int | None = 3,
    trace: Any = None,
    **options: Any,
) -> Estimate:
    """Estimate a script with the options of `Script`, as `rank` if one is given."""
    ranks = Ranks() if rank is None else Ranks(rank.world_size, nodes=rank.nodes, follow=(rank.number,))
    request = JobRequest(Script(path, args, **options), ranks=ranks, steps=steps, trace=trace)
    return parent.estimate_script(request, find_gpu(gpu))
