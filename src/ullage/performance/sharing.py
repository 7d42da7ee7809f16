"""Jobs that share a GPU: the speed of each, their total throughput, and the reasons.

    share_of([a, b], gpu("H200"), "mps").throughput

Each job is described as it runs alone. `ullage.performance.contention` has the model. Nothing here imports PyTorch.
"""

import functools
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Self

from ullage.errors import InvalidValue, UnknownName
from ullage.hardware import GPU, gpus
from ullage.performance.contention import SharedStep, SharingRules, mig_step, shared_steps
from ullage.performance.result import Utilization, known_fields
from ullage.units import format_bytes, format_duration

SHIPPED = Path(__file__).parent / "data" / "sharing.json"
HOWS = {
    "mps": "NVIDIA's Multi-Process Service: kernels of all jobs run side by side",
    "time-slicing": "the driver lets one process after the other have the GPU",
    "mig": "each job has an instance of its own, all of one size",
}
WORTH_IT = 1.1  # times the throughput
_WORTH_SAYING = 0.05  # a loss of speed


@dataclass(frozen=True, kw_only=True)
class SharedJob:
    """A job that shares a GPU: seconds of a step alone and shared, `speed` as a share of that alone, and the reason."""

    step_alone_s: float
    step_s: float
    speed: float
    reason: str
    memory: int | None = None
    name: str | None = None


@dataclass(frozen=True, kw_only=True)
class Sharing:
    """Jobs that share a GPU.

    `throughput` compares them with the same jobs one after the other: 1 is the same, 2 twice as much. `power_w` is the
    GPU's power, `energy_j` the energy of one step of each job, and `energy` its ratio to the same steps one after the
    other. `fits` says whether the jobs' memory fits in `gpu_memory` (under MIG, an instance's); `None` if unknown.
    `profile` is the MIG instance that each job has. `measured` says whether sets of jobs were measured on this GPU in
    this way.
    """

    gpu: str
    how: str
    jobs: list[SharedJob]
    throughput: float
    power_w: float
    energy_j: float
    energy: float
    reason: str
    gpu_memory: int
    measured: bool
    profile: str | None = None
    fits: bool | None = None

    @property
    def slowest(self) -> float:
        return min(job.speed for job in self.jobs)

    @property
    def verdict(self) -> str:
        """The answer in one line, such as "worth it: 1.7 times the throughput, no job below 80% of its speed"."""
        if self.fits is False:
            where = self.gpu if self.profile is None else f"instances {self.profile} of {self.gpu}"
            return f"NOT ENOUGH MEMORY on {where}: {self.memory_words}"
        gain, slowest = f"{self.throughput:.2f} times the throughput", f"no job below {self.slowest:.0%} of its speed"
        if self.throughput >= WORTH_IT:
            return f"worth it: {gain}, {slowest}"
        word = "not worth it" if self.throughput < 1 else "hardly worth it"
        return f"{word}: {gain} of one after the other, {slowest}"

    @property
    def memory_words(self) -> str | None:
        """The memory that the jobs need, in words; `None` if unknown."""
        needs = [job.memory for job in self.jobs if job.memory is not None]
        if len(needs) < len(self.jobs):
            return None
        if self.profile is None:
            return f"they need up to {format_bytes(sum(needs))} of {format_bytes(self.gpu_memory)}"
        return f"the largest needs up to {format_bytes(max(needs))}, an instance has {format_bytes(self.gpu_memory)}"

    def __str__(self) -> str:
        lines = [f"{self.verdict}; {self.reason}"]
        for place, job in enumerate(self.jobs, 1):
            step = f"{format_duration(job.step_s)} a step, {format_duration(job.step_alone_s)} alone"
            lines.append(f"  {job.name or f'job {place}'}: {step} ({job.speed:.0%} of its speed); {job.reason}")
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """Read what `to_dict` gave; keys of later versions are ignored."""
        known = known_fields(cls, values, "sharing")
        return cls(**known | {"jobs": [SharedJob(**job) for job in known["jobs"]]})


def share_of(
    jobs: Sequence[Utilization],
    gpu: GPU,
    how: str = "mps",
    memory: Sequence[int] | None = None,
    rules: SharingRules | None = None,
) -> Sharing:
    """Predict how jobs share a GPU, each given as it runs alone on it; `memory` has the bytes that each needs.

    `how` is "mps", "time-slicing" or "mig". "mig:2g.35gb" names the instance that each job gets; otherwise it is the
    largest one of which the GPU has enough.

    >>> from ullage.hardware import gpu
    >>> busy = {"smact": 0.2, "smocc": 0.1, "drama": 0.05, "tensor": 0.0, "power_w": 200.0, "energy_j": 4.0}
    >>> step = {"step_s": 0.02, "gpu_s": 0.006, "host_s": 0.02, "flops": 1e9, "bytes": 1e8, "kernels": 300}
    >>> job = Utilization(gpu="H200", **step, **busy, steady=True, measured=True)
    >>> together = share_of([job, job], gpu("H200"), "mps")
    >>> 0.9 < together.slowest <= 1, 1.8 < together.throughput <= 2
    (True, True)

    Not covered: jobs on several GPUs, hosts with fewer processors than jobs, the data loader.
    """
    way, _, wanted = how.partition(":")
    if way not in HOWS or wanted and way != "mig":
        raise UnknownName("way of sharing", how, HOWS)
    if not jobs:
        raise InvalidValue("jobs that share a GPU must be one or more, got none")
    if memory is not None and len(memory) != len(jobs):
        raise InvalidValue(f"memory must have {len(jobs)} figures, one for each job, got {len(memory)}")
    rules = rules or load()
    needs: Sequence[int | None] = [None] * len(jobs) if memory is None else memory
    part = instance_of(gpu, len(jobs), wanted) if way == "mig" else None
    if part is None:
        steps = shared_steps(jobs, way, rules)
    else:
        steps = [mig_step(job, *share_of_gpu(part, gpu), rules) for job in jobs]
    shared = [
        SharedJob(
            step_alone_s=job.step_s,
            step_s=step.step_s,
            speed=min(1.0, job.step_s / step.step_s) if step.step_s else 1.0,
            reason=_reason(job, step, jobs, way),
            memory=need,
        )
        for job, step, need in zip(jobs, steps, needs, strict=True)
    ]
    idle = min([rules.idle_w, *(job.power_w for job in jobs)])
    works = [(job.power_w - idle) * job.step_s for job in jobs]  # joules of a step, beyond those of the idle GPU
    energy = sum(works) + idle * sum(step.step_s for step in steps) / len(jobs)
    apart = sum(job.power_w * job.step_s for job in jobs)
    room = (part or gpu).usable
    return Sharing(
        gpu=gpu.name,
        how=way,
        jobs=shared,
        throughput=sum(job.speed for job in shared),
        power_w=idle + sum(work / step.step_s for work, step in zip(works, steps, strict=True) if step.step_s),
        energy_j=energy,
        energy=energy / apart if apart else 1.0,
        reason=_together(jobs, shared, way),
        gpu_memory=room,
        measured=gpu.name == "H200" and way != "mig",
        profile=None if part is None else _profile(part),
        fits=None if memory is None else (sum(memory) if part is None else max(memory)) <= room,
    )


# MIG instances.


def profiles(gpu: GPU) -> list[GPU]:
    """Return the MIG instances that a GPU can be divided into, the smallest first."""
    return sorted((part for part in gpus() if part.parent == gpu.name), key=lambda part: (part.sms or 0, part.memory))


def _profile(part: GPU) -> str:
    return part.name.removeprefix(f"{part.parent}-MIG-")


def instance_of(gpu: GPU, count: int, wanted: str) -> GPU:
    """Return the MIG instance of the `wanted` name ("2g.35gb"), or the largest of which the GPU has `count`."""
    known = {_profile(part): part for part in profiles(gpu)}
    if not known:
        raise InvalidValue(f"{gpu.name} has no MIG instances; choose a GPU that has, or another way: mps, time-slicing")
    if wanted and wanted not in known:
        raise UnknownName(f"MIG instance of {gpu.name}", wanted, known)
    enough = [part for part in known.values() if (part.mig_instances or 0) >= count]
    if wanted:
        part = known[wanted]
        if part not in enough:
            raise InvalidValue(f"{gpu.name} has {part.mig_instances} instances {wanted}; {count} jobs need one each")
        return part
    if not enough:
        most = max(part.mig_instances or 0 for part in known.values())
        raise InvalidValue(f"{gpu.name} has at most {most} MIG instances; {count} jobs need one each")
    return enough[-1]


def share_of_gpu(part: GPU, gpu: GPU) -> tuple[float, float]:
    """Return the shares of the SMs and of the bandwidth that an instance has."""
    sms = (part.sms or 1) / (gpu.sms or part.sms or 1)
    return sms, part.bandwidth / gpu.bandwidth if part.bandwidth and gpu.bandwidth else sms


# Reasons, in words.


def _reason(job: Utilization, step: SharedStep, jobs: Sequence[Utilization], way: str) -> str:
    lost = step.step_s - job.step_s
    if lost <= _WORTH_SAYING * job.step_s:
        idle = 1 - job.busy
        return f"waits for its host {idle:.0%} of the time" if idle > 0.5 else "leaves room on the GPU for others"
    if way == "mig":
        active = min(1.0, job.smact / (job.busy or 1.0))
        return f"needs more than its instance has: while it works it keeps {active:.0%} of the SMs busy"
    if step.waiting_s > lost / 2:
        before = "the others' turns" if way == "time-slicing" else "the others' kernels"
        return f"its host waits for the GPU {job.waits} times a step, each time behind {before}"
    if way == "time-slicing":
        return f"keeps the GPU busy {job.busy:.0%} of the time alone, and the others want it too"
    if job.drama > job.smact / 2 and sum(each.drama for each in jobs) > 0.6:
        return "limited by memory bandwidth, and the others want it too"
    return f"keeps the SMs busy {job.smact:.0%} of the time alone, and the others want them too"


def _together(jobs: Sequence[Utilization], shared: Sequence[SharedJob], way: str) -> str:
    if min(job.speed for job in shared) > 1 - _WORTH_SAYING:
        waiting = sum(job.waits_for_host for job in jobs)
        if waiting == len(jobs):
            return "all wait for their hosts most of the time: their work on the GPU fits into the gaps"
        return "the GPU has room for the work of all"
    if way == "mig":
        return "an instance is smaller than what some of them use"
    if way == "time-slicing":
        return f"together they want the GPU for {sum(job.busy for job in jobs):.0%} of the time"
    moved, active = sum(job.drama for job in jobs), sum(job.smact for job in jobs)
    if moved > 0.6 and moved > active / 2:
        return f"together they want {moved:.0%} of the memory bandwidth"
    return f"together they want {active:.0%} of the SMs"


# The figures of the model, in a file next to this one.


@functools.cache
def load(path: Path = SHIPPED) -> SharingRules:
    """Read the figures from a file that `ullage lab train sharing` wrote."""
    try:
        values = json.loads(path.read_text())["rules"]
        return SharingRules(**{spec.name: float(values[spec.name]) for spec in fields(SharingRules)})
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InvalidValue(
            f"cannot read the figures of sharing in {path}: {error}; "
            f"'ullage lab train sharing --out {path.name}' makes them"
        ) from None
