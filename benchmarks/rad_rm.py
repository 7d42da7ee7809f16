"""RAD-RM's policies that are not Ullage's own: like all of them they first look for idle GPUs.

    ullage simulate TRACE --policy benchmarks/rad_rm.py:round_robin ...

RAD-RM shares a GPU only where too few are idle for the job at the head of its queue (server.py of
github.com/ehsanyousefzadehasl/CARMA). `magm` and `lug` do the same without being told: an idle GPU has the most free
memory, and is the least utilised.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ullage.placement.own_policies import GpuView, JobView

_last = -1  # the index of the GPU that round-robin gave away last


def _idle_first(job: JobView, gpus: Sequence[GpuView], key: Callable[[GpuView], int]) -> list[GpuView]:
    idle = [gpu for gpu in gpus if gpu.idle]
    chosen = idle if len(idle) >= job.gpus else sorted(gpus, key=key)
    return chosen[: job.gpus]


def round_robin(job: JobView, gpus: Sequence[GpuView], now: float) -> list[GpuView]:
    """An idle GPU, else the next one in turn; the turn goes on only where GPUs are shared."""
    global _last
    chosen = _idle_first(job, gpus, lambda gpu: (gpu.index <= _last) * 1000 + gpu.index)
    if chosen and not all(gpu.idle for gpu in chosen):
        _last = chosen[-1].index
    return chosen


def first_fit(job: JobView, gpus: Sequence[GpuView], now: float) -> list[GpuView]:
    """An idle GPU, else the first that fits."""
    return _idle_first(job, gpus, lambda gpu: gpu.index)


def best_fit(job: JobView, gpus: Sequence[GpuView], now: float) -> list[GpuView]:
    """An idle GPU, else the one with the least memory free that fits."""
    return _idle_first(job, gpus, lambda gpu: gpu.free)


for _policy in (round_robin, first_fit, best_fit):
    _policy.__dict__.update(backfills=False, predicts=False, oracle=_policy is not round_robin)
