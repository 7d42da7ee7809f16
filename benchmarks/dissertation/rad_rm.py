"""RAD-RM, the manager of the dissertation's sixth chapter, in the words of the simulator.

    ullage simulate TRACE --policy benchmarks/dissertation/rad_rm.py:round_robin ...

`rad_rm` has its settings. They are what the chapter says, and where it does not say it, what the published program does
(src/server.py and src/monitor.py of github.com/ehsanyousefzadehasl/CARMA, the dissertation's version):

- One job at a time, in the order of arrival. Before each decision it waits 35 s, and 30 s more if the job has to share.
- Idle GPUs are given away first, whatever the policy is: jobs share only where too few GPUs are idle.
- It keeps no books. The free memory of a GPU is what its monitor saw, which looks once in 90 s and tells the mean SMACT
  of these 90 s.
- A job that ran out of memory goes to the head of the queue and waits for an idle GPU. Until it has one, nobody else is
  placed. Afterwards others may join it.

Because of the second rule its policies are written here again: what the monitor saw 90 s ago does not tell which GPUs
are idle.

A daemon serves them too: `ullage serve --policy benchmarks/dissertation/rad_rm.py:magm`. The variable RAD_RM_PAUSE_S is
then the least time between two placements, which the simulator has as a setting.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

from ullage.manager.placement import Job, RecoveryRules, Rules
from ullage.manager.placement.custom_policies import GpuView
from ullage.manager.simulation.scenario import Scenario, World

GPUS = "4xA100-40GB"
ALONE_S, SHARED_S = 35.0, 65.0  # from one decision to the next
WINDOW_S = 90.0


def rad_rm(
    policy: str,
    estimator: str = "none",
    sharing: str = "mps",
    *,
    smact: float | None = None,
    free: int = 0,
    margin: int = 0,
    label: str | None = None,
) -> Scenario:
    """A run of RAD-RM under a policy of this file, or "exclusive". A GPU is shared where its SMACT is at most `smact`
    and where `free` bytes are free, or as many as the estimator says and the `margin`."""
    rules = Rules(
        smact_limit=smact,
        free_floor=free,
        margin=margin,
        unknown="floor",
        window=WINDOW_S,
        fresh_busy=0.0,
        stale_after=None,
        backfill=False,
        ageing=None,
        fair=False,
    )
    alone = policy == "exclusive"
    return Scenario(
        gpus=GPUS,
        policy=policy if alone else f"{__file__}:{policy}",
        estimator=estimator,
        sharing=sharing,
        rules=rules,
        recovery=RecoveryRules(exclusive_after=1),
        pause_s=ALONE_S if alone else SHARED_S,
        foresight=False,
        at_a_time=1,
        bookkeeping=False,
        label=label,
        world=World(reading_s=WINDOW_S, monitor_delay_s=0.0),  # idle GPUs are read again each time
    )


_last = -1  # the index of the last GPU that round-robin chose
_placed = float("-inf")  # the time of the last placement
_PAUSE_S = float(os.environ.get("RAD_RM_PAUSE_S", 0))


def _idle_first(job: Job, gpus: Sequence[GpuView], now: float, key: Callable[[GpuView], float]) -> list[GpuView]:
    global _placed
    if _PAUSE_S and now - _placed < _PAUSE_S:
        return []
    _placed = now
    idle = [gpu for gpu in gpus if gpu.idle]
    chosen = idle if len(idle) >= job.gpus else sorted(gpus, key=key)
    return chosen[: job.gpus]


def round_robin(job: Job, gpus: Sequence[GpuView], now: float) -> list[GpuView]:
    """An idle GPU, else the next one in turn; the turn goes on only where GPUs are shared."""
    global _last
    chosen = _idle_first(job, gpus, now, lambda gpu: (gpu.index <= _last) * 1000 + gpu.index)
    if chosen and not all(gpu.idle for gpu in chosen):
        _last = chosen[-1].index
    return chosen


def magm(job: Job, gpus: Sequence[GpuView], now: float) -> list[GpuView]:
    """An idle GPU, else the one with the most memory free."""
    return _idle_first(job, gpus, now, lambda gpu: -gpu.free)


def lug(job: Job, gpus: Sequence[GpuView], now: float) -> list[GpuView]:
    """An idle GPU, else the least utilised one."""
    return _idle_first(job, gpus, now, lambda gpu: gpu.load)


def off(job: Job, gpus: Sequence[GpuView], now: float) -> list[GpuView]:
    """Oracle first fit: an idle GPU, else the first that fits."""
    return _idle_first(job, gpus, now, lambda gpu: gpu.index)


def obf(job: Job, gpus: Sequence[GpuView], now: float) -> list[GpuView]:
    """Oracle best fit: an idle GPU, else the one with the least memory free that fits."""
    return _idle_first(job, gpus, now, lambda gpu: gpu.free)


def owf(job: Job, gpus: Sequence[GpuView], now: float) -> list[GpuView]:
    """Oracle worst fit: an idle GPU, else the one with the most memory free."""
    return magm(job, gpus, now)


def olug(job: Job, gpus: Sequence[GpuView], now: float) -> list[GpuView]:
    """Oracle least utilised: an idle GPU, else the least utilised one where the job fits."""
    return lug(job, gpus, now)


for _policy in (round_robin, magm, lug, off, obf, owf, olug):
    _policy.__dict__.update(backfills=False, predicts=False, oracle=_policy in (off, obf, owf, olug))
