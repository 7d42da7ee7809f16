"""How long a step takes in company: the model behind `ullage.performance.sharing`.

A step of a job is host work and GPU work, which overlap. In company its GPU work takes longer:

- Under **MPS** kernels of all jobs run side by side. A kernel that begins meets those of the others that are there, as
  far as they fill the SMs. In the order in which they come it would wait for their length, and with even shares for its
  own; it is between the two. So jobs of many short kernels suffer beside jobs of long ones.
- **Time slicing** gives the whole GPU to one process after the other. A step takes turns, and one more each time that
  its host waits for the GPU; before each, the other processes that have work have theirs.
- A **MIG** instance has its part of the SMs and of the bandwidth, whoever works beside it.

How much of the others' work a job meets depends on how much they are slowed down themselves: the answer is a fixed
point, found from below. So a job that is added never makes another one faster. Nothing here imports PyTorch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ullage.performance.result import Utilization

_ROUNDS, _CLOSE = 300, 1e-6


@dataclass(frozen=True, kw_only=True)
class SharingRules:
    """The figures of the model, fitted to sets of jobs that were measured.

    - `overlap`: how well a job's host work and GPU work hide each other: at 1 not at all, the more the better.
    - `contention`: how much of the others' SMs a kernel meets, under MPS; 1 is all.
    - `first_come`: at 1 kernels run in the order in which they come, at 0 they share evenly, under MPS.
    - `turn_s`: the longest turn of a process, and `switch_s`: what it takes to give the GPU to the next, time-sliced.
    - `idle_w`: what the GPU draws while nothing runs on it.
    """

    overlap: float
    contention: float
    first_come: float
    turn_s: float
    switch_s: float
    idle_w: float


@dataclass(frozen=True, kw_only=True)
class SharedStep:
    """A job's step in company: `step_s`, of which `waiting_s` comes from single waits for the GPU."""

    step_s: float
    waiting_s: float = 0.0


def in_company(
    jobs: Sequence[Utilization], how: str, rules: SharingRules, counts: Sequence[int] | None = None
) -> list[SharedStep]:
    """The steps of jobs that share a GPU, by "mps" or "timeslice"; with `counts`, so many of each are there."""
    needs = [_sliced(job, rules) if how == "timeslice" else _side_by_side(job, rules) for job in jobs]
    turns = [need.turn * count for need, count in zip(needs, counts or [1] * len(jobs), strict=True)]
    hosts = [_host_s(job, rules) for job in jobs]
    alone = [_gpu_s(job) for job in jobs]
    steps = [job.step_s for job in jobs]
    waits = [0.0] * len(jobs)
    there = [0.0] * len(jobs)  # the share of time in which a job has work for the GPU
    for _ in range(_ROUNDS):
        met = sum([share * turn for share, turn in zip(there, turns, strict=True)])
        before, there, furthest = there, [], 0.0
        for place, need in enumerate(needs):
            others = met - before[place] * need.turn
            queued, waiting = need.queues * others, need.waits * others
            steps[place] = step = _both(hosts[place], alone[place] + queued, rules.overlap) + waiting
            waits[place] = waiting
            share = min(1.0, (need.work_s + queued + waiting) / step) if step else 0.0
            furthest = max(furthest, abs(share - before[place]))
            there.append(share)
        if furthest < _CLOSE:
            break
    return [
        SharedStep(step_s=max(job.step_s, step), waiting_s=waiting)
        for job, step, waiting in zip(jobs, steps, waits, strict=True)
    ]


def on_part(job: Utilization, sms: float, bandwidth: float, rules: SharingRules) -> SharedStep:
    """A job's step on a MIG instance with these parts of the GPU's SMs and bandwidth."""
    wide = min(1.0, job.smact) * job.step_s
    moved = min(1.0, job.drama) * job.step_s
    rest = _gpu_s(job) - wide
    gpu_s = max(rest + wide / sms, moved / bandwidth)
    return SharedStep(step_s=max(job.step_s, _both(_host_s(job, rules), gpu_s, rules.overlap)))


@dataclass(frozen=True)
class _Need:
    """What a step needs of the GPU: `work_s` of it, alone.

    Beside a job that is always there with a `turn` of 1, its work takes `queues` longer, and its host waits for single
    results `waits` longer.
    """

    work_s: float
    queues: float
    waits: float
    turn: float


def _side_by_side(job: Utilization, rules: SharingRules) -> _Need:
    gpu_s = _gpu_s(job)
    if not gpu_s:
        return _Need(0.0, 0.0, 0.0, 0.0)
    kernels = max(job.kernels, 1)
    each, wide = gpu_s / kernels, min(1.0, max(job.smact, job.drama)) * job.step_s / gpu_s
    meets = rules.contention * each ** (1 - rules.first_come)
    return _Need(gpu_s, kernels * meets, job.waits * meets, wide * each**rules.first_come)


def _sliced(job: Utilization, rules: SharingRules) -> _Need:
    gpu_s = _gpu_s(job)
    if not gpu_s:
        return _Need(0.0, 0.0, 0.0, 0.0)
    turns = gpu_s / rules.turn_s
    return _Need(gpu_s, turns, job.waits, gpu_s / (turns + job.waits) + rules.switch_s)


def _gpu_s(job: Utilization) -> float:
    """The GPU time of a step, which cannot be longer than the step nor shorter than its SMs are active."""
    return min(job.step_s, max(job.gpu_s, max(job.smact, job.drama) * job.step_s))


def _host_s(job: Utilization, rules: SharingRules) -> float:
    """Host work, such that both together make a step alone."""
    busy = _gpu_s(job) / job.step_s if job.step_s else 1.0
    return float(job.step_s * (1 - busy**rules.overlap) ** (1 / rules.overlap))


def _both(host_s: float, gpu_s: float, overlap: float) -> float:
    """The time of work on the host and on the GPU, which hide each other but for a part."""
    longer, shorter = max(host_s, gpu_s), min(host_s, gpu_s)
    return float(longer * (1 + (shorter / longer) ** overlap) ** (1 / overlap)) if longer else 0.0
