"""What a simulation is given: jobs, when they come, what they need and how long they work."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ullage.errors import InvalidValue
from ullage.performance.result import Utilization


@dataclass(frozen=True, eq=False, slots=True)
class Phase:
    """A part of a job: starting, warming up, working, evaluating, saving. Alone it takes `seconds`, or for None, the
    job's work. A phase that does not use the GPU slows nobody, and nobody slows it. `alone` is its activity by GPU;
    empty: that of the job's kind. A job takes its memory in the first phase that holds it, and keeps it.

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
    `estimates` are bytes by estimator (None: no answer). Without `phases` a job works after the usual start-up time.

    >>> JobKind("resnet50 b64", memory=8 << 30).estimates
    {}
    """

    name: str
    memory: int
    alone: Mapping[str, Utilization] = field(default_factory=dict)
    estimates: Mapping[str, int | None] = field(default_factory=dict)
    phases: Sequence[Phase] = ()

    def __post_init__(self) -> None:
        if self.memory < 0:
            raise InvalidValue(f"the memory of {self.name} must be 0 bytes or more, got {self.memory}")
        if self.phases and sum(phase.seconds is None for phase in self.phases) != 1:
            raise InvalidValue(f"one phase of {self.name} must be its work (seconds=None), got {self.phases}")


@dataclass(frozen=True, slots=True)
class TraceJob:
    """A job of a trace: it comes at `arrival` and has `work_s` seconds of work on `gpus` GPUs that it has to itself.
    `submitted` is its place in the queue, if it could start only later than that, such as after its estimate.

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
    """Jobs in the order of arrival. `notes` are assumptions. `gpu` is the GPU to which their work refers; None: it is
    the same on all."""

    name: str
    jobs: Sequence[TraceJob]
    notes: Sequence[str] = ()
    gpu: str | None = None

    @property
    def kinds(self) -> list[JobKind]:
        """Return the kinds of its jobs, each once, in the order of arrival."""
        return list({id(job.kind): job.kind for job in self.jobs}.values())
