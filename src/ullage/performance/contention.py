"""Step times of jobs that share a GPU: the model behind `ullage.performance.sharing`.

A step of a job is host work and GPU work, which overlap. Sharing prolongs its GPU work:

- Under **MPS** kernels of all jobs run side by side, but blocks are scheduled in the order in which kernels arrive. A
  kernel that meets one which fills the SMs waits until its blocks are done; between two such kernels short ones of
  others pass. So jobs of many short kernels suffer next to jobs of long ones.
- **Time slicing** gives the whole GPU to one process after the other. A step takes turns, and one more each time its
  host waits for the GPU; before each, the other processes with work have theirs.
- A **MIG** instance has its part of the SMs and of the bandwidth, regardless of others.

How much of the others' work a job meets depends on how much they are slowed down themselves: the result is a fixed
point, found from below. So another job makes no job faster, except by a fifth of a percent under MPS, if it slows down
jobs that close gaps. Nothing here imports PyTorch.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from ullage.performance.data_sheet import KERNELS
from ullage.performance.result import FILLS, KernelGroup, Utilization

_ROUNDS, _CLOSE = 300, 1e-6
_MOST_FILLED = 0.95  # of a step
_SAME = 0.005  # of a step: smaller changes leave the gaps as they are


@dataclass(frozen=True, kw_only=True)
class SharingRules:
    """The figures of the model, fitted to sets of jobs that were measured.

    - `overlap`: how well a job's host work and GPU work overlap: at 1 not at all, better at higher values.
    - `contention`: how long a kernel waits for another one that fills the SMs, under MPS; 1 is as long as it runs.
    - `crowding`: how much longer kernels that fill the SMs run next to others, under MPS, by the share of the SMs
      that the others use.
    - `closing`: how far third jobs close the gaps between the kernels of another one, under MPS; 0 is not at all.
    - `turn_s`: the longest turn of a process, and `switch_s`: the time to switch to the next, under time slicing.
    - `idle_w`: the watts that jobs sharing a GPU draw once, as fitted; `data_sheet.WAITING_W` is the measured value.
    """

    overlap: float
    contention: float
    crowding: float
    closing: float
    turn_s: float
    switch_s: float
    idle_w: float


@dataclass(frozen=True, kw_only=True)
class SharedStep:
    """The step of a job that shares a GPU: `step_s`, of which `waiting_s` are single waits for the GPU."""

    step_s: float
    waiting_s: float = 0.0


def shared_steps(
    jobs: Sequence[Utilization], how: str, rules: SharingRules, counts: Sequence[int] | None = None
) -> list[SharedStep]:
    """Return the steps of jobs that share a GPU by "mps" or "time-slicing"; `counts` gives the copies of each."""
    delays = _Sliced(jobs, rules) if how == "time-slicing" else _SideBySide(jobs, rules)
    several = counts or [1] * len(jobs)
    copies = [_copy_s(job) for job in jobs]
    hosts = [_host_s(job, rules) for job in jobs]
    works = [_gpu_s(job) for job in jobs]
    steps = [job.step_s for job in jobs]
    waits = [0.0] * len(jobs)
    there = [0.0] * len(jobs)  # the share of time in which a job has work for the GPU
    for _ in range(_ROUNDS):
        before, there, furthest = there, [], 0.0
        beside = delays.among(steps, several)
        for place, row in enumerate(beside):
            queued = waiting = 0.0
            for other, (queues, waits_for) in enumerate(row):
                met = (several[other] - (other == place)) * before[other]
                queued += met * queues
                waiting += met * waits_for
            at_once = _both(hosts[place], works[place] + queued, rules.overlap)
            steps[place] = step = copies[place] + at_once + waiting
            waits[place] = waiting
            share = min(1.0, (works[place] + queued + waiting) / step) if step else 0.0
            furthest = max(furthest, abs(share - before[place]))
            there.append(share)
        if furthest < _CLOSE:
            break
    return [
        SharedStep(step_s=max(job.step_s, step), waiting_s=waiting)
        for job, step, waiting in zip(jobs, steps, waits, strict=True)
    ]


def mig_step(job: Utilization, sms: float, bandwidth: float, rules: SharingRules) -> SharedStep:
    """Return a job's step on a MIG instance with these parts of the GPU's SMs and bandwidth."""
    wide = min(1.0, job.smact) * job.step_s
    moved = min(1.0, job.drama) * job.step_s
    rest = _gpu_s(job) - wide
    gpu_s = max(rest + wide / sms, moved / bandwidth)
    return SharedStep(step_s=max(job.step_s, _copy_s(job) + _both(_host_s(job, rules), gpu_s, rules.overlap)))


# For each job and each other job that is always active, seconds of a step: the delay of its work on the GPU, and that
# of its waits for single results.
_Delays = list[list[tuple[float, float]]]


@dataclass(frozen=True)
class _Kernels:
    """The kernels of a step: `sizes` has numbers of kernels and their lengths. Those that fill the SMs do so for
    `blocking_s` of a step, each for `turn_s`, with `between_s` until the next; a kernel that arrives at any time waits
    `rest_s` for them on average. While the GPU works, the share `busy` of its SMs is in use."""

    sizes: list[tuple[float, float]]
    blocking_s: float = 0.0
    turn_s: float = 0.0
    between_s: float = 0.0
    rest_s: float = 0.0
    busy: float = 0.0

    @classmethod
    def of(cls, job: Utilization) -> Self:
        gpu_s = _gpu_s(job)
        if not gpu_s:
            return cls([])
        groups = _as_busy(job, gpu_s)
        blocking = [(group.number, group.filled) for group in groups if group.filled >= FILLS * group.seconds]
        count, blocking_s = sum(count for count, _ in blocking), sum(filled for _, filled in blocking)
        by_length: dict[int, tuple[float, float]] = {}  # by factors of four: numbers and seconds
        for group in groups:
            length = int(math.log(group.seconds / group.number, 4) // 1)
            number, seconds = by_length.get(length, (0.0, 0.0))
            by_length[length] = number + group.number, seconds + group.seconds
        sizes = [(number, seconds / number) for number, seconds in by_length.values()]
        busy = sum(group.filled for group in groups) / gpu_s
        if not count:
            return cls(sizes, busy=busy)
        rest_s = sum(filled * filled / number for number, filled in blocking) / 2 / gpu_s
        return cls(sizes, blocking_s, blocking_s / count, max(0.0, gpu_s - blocking_s) / count, rest_s, busy)


_KNOWN: dict[int, tuple[Utilization, _Kernels]] = {}  # by id of the job, which this keeps alive
_MOST_KNOWN = 10_000


def _kernels_of(job: Utilization) -> _Kernels:
    """Return a job's kernels, cached: simulations ask for the same jobs in thousands of sets."""
    known = _KNOWN.get(id(job))
    if known is None:
        if len(_KNOWN) >= _MOST_KNOWN:
            _KNOWN.clear()
        known = _KNOWN[id(job)] = job, _Kernels.of(job)
    return known[1]


_FEWEST, _SHORTEST, _LONGEST = 1e-3, 1e-9, 1e5  # kernels in a step, and seconds of one


def _as_busy(job: Utilization, gpu_s: float) -> list[KernelGroup]:
    """Return a job's kernels, scaled so that their seconds and SMs add up to those of its step."""
    wide = min(1.0, max(job.smact, job.drama) * job.step_s / gpu_s)
    # Ignore impossible kernels: the values may come from anyone.
    groups = [
        group
        for group in job.kernel_groups
        if group.number >= _FEWEST and _SHORTEST < group.seconds / group.number < _LONGEST
    ]
    if not groups:
        calls = max(job.kernels, 1)
        groups = [KernelGroup(number * calls, seconds, filled) for number, seconds, filled in KERNELS["usual"]]
    longer = gpu_s / sum(group.seconds for group in groups)
    empty = [(longer * group.seconds, max(1e-3, 1 - group.filled / group.seconds)) for group in groups]
    low, high = 0.05, 20.0
    while high > 1.001 * low:
        power = (low * high) ** 0.5
        filled = sum(seconds * (1 - rest**power) for seconds, rest in empty)
        low, high = (power, high) if filled < wide * gpu_s else (low, power)
    return [
        KernelGroup(group.number, seconds, seconds * (1 - rest**low))
        for group, (seconds, rest) in zip(groups, empty, strict=True)
    ]


class _SideBySide:
    def __init__(self, jobs: Sequence[Utilization], rules: SharingRules) -> None:
        self.kernels, self.waits, self.rules = [_kernels_of(job) for job in jobs], [job.waits for job in jobs], rules
        self.delays = self._delays([[1.0] * len(jobs)] * len(jobs))
        self.of_steps: list[float] = []

    def among(self, steps: Sequence[float], counts: Sequence[int]) -> _Delays:
        """Return the delays in steps of these lengths: third jobs close the gaps between the kernels of others."""
        last = self.of_steps
        if (
            sum(counts) < 3
            or last
            and all(abs(now - then) < _SAME * then for now, then in zip(steps, last, strict=True))
        ):
            return self.delays
        self.of_steps = list(steps)
        free = [
            (1 - min(_MOST_FILLED, kernels.blocking_s / step if step else 0.0)) ** self.rules.closing
            for kernels, step in zip(self.kernels, steps, strict=True)
        ]
        every = math.prod([share**count for share, count in zip(free, counts, strict=True)])
        gaps = [
            [
                min(1.0, every / (one * (other if at != place or counts[at] > 1 else 1.0)))
                for at, other in enumerate(free)
            ]
            for place, one in enumerate(free)
        ]
        self.delays = self._delays(gaps)
        return self.delays

    def _delays(self, gaps: Sequence[Sequence[float]]) -> _Delays:
        rules, delays = self.rules, []
        for own, waits, open_ in zip(self.kernels, self.waits, gaps, strict=True):
            row = []
            for other, gap in zip(self.kernels, open_, strict=True):
                # One kernel in each turn of the other job, and as many more as fit between two turns.
                between = gap * other.between_s
                turns = sum(count * each / (each + between) for count, each in own.sizes)
                queues = rules.contention * other.turn_s * turns + rules.crowding * other.busy * own.blocking_s
                row.append((queues, rules.contention * waits * other.rest_s if own.sizes else 0.0))
            delays.append(row)
        return delays


class _Sliced:
    def __init__(self, jobs: Sequence[Utilization], rules: SharingRules) -> None:
        works = [_gpu_s(job) for job in jobs]
        turns = [work / rules.turn_s for work in works]
        lengths = [
            work / (count + job.waits) + rules.switch_s if work else 0.0
            for work, count, job in zip(works, turns, jobs, strict=True)
        ]
        self.delays = [
            [(count * length, job.waits * length if work else 0.0) for length in lengths]
            for job, work, count in zip(jobs, works, turns, strict=True)
        ]

    def among(self, steps: Sequence[float], counts: Sequence[int]) -> _Delays:
        """Return the delays, which do not depend on the steps of other jobs."""
        return self.delays


def _gpu_s(job: Utilization) -> float:
    """Return the GPU time of a step, at most the step and at least the time its SMs are active."""
    return min(job.step_s, max(job.gpu_s, max(job.smact, job.drama) * job.step_s))


def _copy_s(job: Utilization) -> float:
    """Return the part of a step in which the host copies and the GPU is idle."""
    return min(max(0.0, job.copy_s), job.step_s - _gpu_s(job))


def _host_s(job: Utilization, rules: SharingRules) -> float:
    """Return the host work that makes up a step without other jobs, together with GPU work and copies."""
    at_once = job.step_s - _copy_s(job)
    busy = min(1.0, _gpu_s(job) / at_once) if at_once else 1.0
    return float(at_once * (1 - busy**rules.overlap) ** (1 / rules.overlap))


def _both(host_s: float, gpu_s: float, overlap: float) -> float:
    """Return the time of host and GPU work that overlap in part."""
    longer, shorter = max(host_s, gpu_s), min(host_s, gpu_s)
    return float(longer * (1 + (shorter / longer) ** overlap) ** (1 / overlap)) if longer else 0.0
