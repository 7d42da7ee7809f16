"""The input of a simulation: jobs, with their arrivals, needs and work."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ullage.errors import InvalidValue
from ullage.performance.result import Utilization


@dataclass(frozen=True, eq=False, slots=True)
class Phase:
    """A part of a job: starting, warming up, working, evaluating, saving. Alone it takes `seconds` or, if None, the
    job's work. A phase that does not use the GPU neither slows others nor is slowed by them. `alone` is its activity by
    GPU; empty: that of the job's kind. A job allocates its memory in the first phase with `holds_memory`, and keeps it.

    >>> Phase("saving", 2.0, holds_memory=True).uses_gpu
    False
    """

    name: str
    seconds: float | None
    uses_gpu: bool = False
    holds_memory: bool = False
    alone: Mapping[str, Utilization] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not 0 <= (self.seconds or 0.0) < math.inf:
            raise InvalidValue(f"the seconds of {self.name} must be 0 or more, got {self.seconds}")


WORKING = Phase("working", None, uses_gpu=True, holds_memory=True)


@dataclass(frozen=True, eq=False, slots=True)
class JobKind:
    """The kind of a job, shared by many.

    `memory` is its true peak on each GPU in bytes, as in `nvidia-smi`. `alone` is its activity alone by GPU,
    `estimates` are bytes by estimator (None: no estimate). Without `phases` a job works after the usual start-up time.
    `file` is the job file that describes it, if any.

    >>> JobKind("resnet50 b64", memory=8 << 30).estimates
    {}
    """

    name: str
    memory: int
    alone: Mapping[str, Utilization] = field(default_factory=dict)
    estimates: Mapping[str, int | None] = field(default_factory=dict)
    phases: Sequence[Phase] = ()
    file: Path | None = None

    def __post_init__(self) -> None:
        if self.memory < 0:
            raise InvalidValue(f"the memory of {self.name} must be 0 bytes or more, got {self.memory}")
        if self.phases and sum(phase.seconds is None for phase in self.phases) != 1:
            raise InvalidValue(f"one phase of {self.name} must be its work (seconds=None), got {self.phases}")


@dataclass(frozen=True, slots=True)
class TraceJob:
    """A job of a trace: it arrives at `arrival` and has `work_s` seconds of work when alone on its `gpus` GPUs.
    `submitted` decides its place in the queue, if it could only start later, such as after its estimate.

    >>> TraceJob(1, 0.0, JobKind("resnet50 b64", memory=8 << 30), work_s=600.0).gpus
    1
    """

    id: int
    arrival: float
    kind: JobKind
    work_s: float
    gpus: int = 1
    user: str = "user"
    priority: int = 0
    time_limit: float | None = None
    submitted: float | None = None

    def __post_init__(self) -> None:
        if not (0 <= self.arrival < math.inf and 0 <= self.work_s < math.inf and self.gpus >= 1):
            values = f"arrival {self.arrival}, work_s {self.work_s}, gpus {self.gpus}"
            raise InvalidValue(f"job {self.id} must have arrival >= 0, work_s >= 0 and gpus >= 1, got {values}")


@dataclass(frozen=True)
class JobTrace:
    """Jobs in order of arrival. `notes` are assumptions; `gpu` is the GPU of their work (None: the same on all)."""

    name: str
    jobs: Sequence[TraceJob]
    notes: Sequence[str] = ()
    gpu: str | None = None

    @property
    def kinds(self) -> list[JobKind]:
        """Return the kinds of the jobs, each once, in order of arrival."""
        return list({id(job.kind): job.kind for job in self.jobs}.values())
