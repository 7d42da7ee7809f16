"""Assigns known workloads to the jobs of traces that do not name their training: mixes, and a seeded choice."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ullage.errors import InvalidValue, UnknownName
from ullage.manager.simulation.known import SIZES, KnownWorkload, known_workloads
from ullage.manager.simulation.trace import JobKind, JobTrace, TraceJob

# The shares of light, medium and large jobs in the dissertation's two traces (its section 6.3.2).
MIXES: Mapping[str, Mapping[str, float]] = {
    "mixed": {"light": 0.65, "medium": 0.27, "large": 0.08},
    "heavy": {"medium": 0.83, "large": 0.17},
}
Mix = str | Mapping[str, float]


def shares_of(mix: Mix) -> Mapping[str, float]:
    """Return the shares of a mix: its name, or shares by size or known workload, which need not sum to 1.

    >>> shares_of("heavy")
    {'medium': 0.83, 'large': 0.17}
    >>> shares_of({"resnet50 b128": 1, "light": 3})
    {'resnet50 b128': 0.25, 'light': 0.75}
    """
    if isinstance(mix, str):
        if mix not in MIXES:
            raise UnknownName("mix of workloads", mix, MIXES)
        return MIXES[mix]
    for name, share in mix.items():
        if name not in SIZES and name not in known_workloads():
            raise UnknownName("known workload", name, [*SIZES, *known_workloads()])
        if not 0 <= share < math.inf:
            raise InvalidValue(f"the share of {name} must be 0 or more, got {share}")
    if not any(mix.values()):
        raise InvalidValue("a mix of workloads must have a share above 0, got none")
    return {name: share / sum(mix.values()) for name, share in mix.items()}


def workloads_of(size: str) -> list[KnownWorkload]:
    """Return the workloads of Table 6.2 of a size, or the one with this name.

    >>> len(workloads_of("light")), [one.name for one in workloads_of("resnet50 b32")]
    (12, ['resnet50 b32'])
    """
    if size in SIZES:
        return [known for known in known_workloads().values() if known.size == size and known.in_table]
    return [known_workloads()[size]]


def drawn(mix: Mix, count: int, random: np.random.Generator) -> tuple[list[KnownWorkload], Any]:
    """Return the known workloads, and the index among them of `count` draws by the mix, equal within a size."""
    chances: dict[str, float] = {}
    for size, share in shares_of(mix).items():
        alike = workloads_of(size)
        for known in alike:
            chances[known.name] = chances.get(known.name, 0.0) + share / len(alike)
    workloads = [known_workloads()[name] for name in chances]
    return workloads, random.choice(
        len(workloads), size=count, p=np.array(list(chances.values())) / sum(chances.values())
    )


class PublicJob(NamedTuple):
    """A job of a public trace, with its arrival, run time and GPUs (or a share of one), but without its training."""

    arrival: float
    run_s: float
    gpus: float
    user: str = "user"


@dataclass(frozen=True)
class Assignment:
    """Assigns known workloads to jobs of public traces: sizes by rank in the shares of `mix`, workloads by `seed`."""

    mix: Mix = "mixed"
    seed: int = 0
    limit: int | None = None

    def trace(self, name: str, public_jobs: Sequence[PublicJob], notes: Sequence[str] = ()) -> JobTrace:
        """Return the jobs with a workload each. Jobs with the least work (GPUs times run time) are light, those with
        the most are large, by the shares of the mix; workloads within a size are drawn."""
        public_jobs = sorted(public_jobs, key=lambda job: job.arrival)[: self.limit]
        kinds = self._kinds([job.run_s * job.gpus for job in public_jobs])
        first = public_jobs[0].arrival if public_jobs else 0.0
        jobs = [
            TraceJob(number, job.arrival - first, kind, job.run_s, max(1, math.ceil(job.gpus)), job.user)
            for number, (job, kind) in enumerate(zip(public_jobs, kinds, strict=True), 1)
        ]
        shares = ", ".join(f"{100 * share:.0f}% {size}" for size, share in shares_of(self.mix).items())
        assumptions = [
            f"the trace does not say what its jobs train: known workloads by GPUs times run time, {shares} "
            f"(seed {self.seed}), with their memory on each GPU",
            "the run time in the trace counts as the work of a job that has its GPUs to itself",
        ]
        return JobTrace(name, jobs, [*assumptions, *notes])

    def _kinds(self, demands: Sequence[float]) -> list[JobKind]:
        shares = shares_of(self.mix)
        order = [size for size in (*SIZES, *shares) if size in shares]
        random = np.random.default_rng(self.seed)
        ranks = np.argsort(np.argsort(np.array(demands), kind="stable"), kind="stable")
        bounds = np.cumsum([shares[size] for size in dict.fromkeys(order)]) * len(demands)
        places = np.searchsorted(bounds[:-1], ranks, side="right")
        choices = [[known.kind for known in workloads_of(size)] for size in dict.fromkeys(order)]
        picks = random.random(len(demands))
        return [
            choices[place][int(pick * len(choices[place]))]
            for place, pick in zip(places.tolist(), picks.tolist(), strict=True)
        ]


class TraceFormat(NamedTuple):
    """A trace format: name, title, recognition by the beginning of a file, reader, and file names in a folder."""

    name: str
    title: str
    recognises: Callable[[str], bool]
    read: Callable[[Path, Assignment], JobTrace]
    files: tuple[str, ...] = ()
