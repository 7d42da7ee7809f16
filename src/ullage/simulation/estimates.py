"""What a job is promised: what an estimator says of its kind, recorded in the trace or asked here."""

from __future__ import annotations

import functools
from dataclasses import replace

from ullage.errors import InvalidValue, UllageError
from ullage.estimation.asking import estimate
from ullage.estimation.estimators.registry import check_name
from ullage.simulation.known import MEASURED_ON, known_workloads
from ullage.simulation.trace import JobKind, JobTrace


def promise_of(kind: JobKind, estimator: str) -> int | None:
    """Bytes by an estimator: what the trace has recorded, of a range its upper edge; "oracle" knows the truth, "none"
    nothing. None: it has no answer.

    >>> kind = JobKind("toy", memory=3 << 30, estimates={"horus": 5 << 30})
    >>> promise_of(kind, "oracle") >> 30, promise_of(kind, "none"), promise_of(kind, "horus") >> 30
    (3, None, 5)
    """
    if estimator == "oracle":
        return kind.memory
    if estimator == "none":
        return None
    if estimator not in kind.estimates:
        found = ", ".join(["oracle", "none", *kind.estimates])
        raise InvalidValue(f"needed an estimate by {estimator} for jobs like {kind.name}; the trace has: {found}")
    return kind.estimates[estimator]


def with_estimates(trace: JobTrace, estimator: str, gpu: str = MEASURED_ON) -> JobTrace:
    """The trace with estimates by `estimator` on `gpu`: those that it has, and else what the estimator itself says of
    the known workload.

    >>> from ullage.simulation.known import known_workload
    >>> from ullage.simulation.trace import TraceJob
    >>> trace = JobTrace("one", [TraceJob(1, 0.0, known_workload("resnet50 b64").kind, work_s=60.0)])
    >>> with_estimates(trace, "horus") is trace  # it has them
    True
    """
    if estimator in ("oracle", "none"):
        return trace
    check_name(estimator)
    asked = {id(kind): _asked(kind, estimator, gpu) for kind in trace.kinds if estimator not in kind.estimates}
    if not asked:
        return trace
    return replace(trace, jobs=[replace(job, kind=asked.get(id(job.kind), job.kind)) for job in trace.jobs])


def _asked(kind: JobKind, estimator: str, gpu: str) -> JobKind:
    known = known_workloads().get(kind.name)
    if known is None or "model" not in known.training:
        needed = f"a column estimate_{estimator} in the trace, or jobs of known workloads"
        raise InvalidValue(f"there is no estimate by {estimator} for jobs like {kind.name}: needed {needed}")
    return replace(kind, estimates={**kind.estimates, estimator: _answer(kind.name, estimator, gpu)})


@functools.lru_cache(maxsize=4096)
def _answer(name: str, estimator: str, gpu: str) -> int | None:
    """What an estimator says of a known workload; None where it has no answer."""
    options = dict(known_workloads()[name].training)
    model = options.pop("model")
    try:
        return estimate(model, gpu=gpu, estimator=estimator, **options).bound
    except UllageError:
        return None
