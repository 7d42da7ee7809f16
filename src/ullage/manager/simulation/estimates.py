"""What a job is promised: what an estimator says of its kind, as the trace has it or by asking the estimator itself."""

from __future__ import annotations

import functools

from ullage.errors import InvalidValue, UllageError
from ullage.estimation.asking import answer_request
from ullage.estimation.estimators.registry import check_name
from ullage.jobs.job import request_of
from ullage.manager.simulation.known import MEASURED_ON, known_workloads
from ullage.manager.simulation.trace import JobKind


def promise_of(kind: JobKind, estimator: str) -> int | None:
    """Bytes by an estimator; None where it has no answer. "oracle" knows the truth, "none" nothing.

    Of a range that an estimator gives, the upper edge is promised. An estimator of which the trace has nothing is asked
    for known workloads, as they run on an A100-40GB.

    >>> kind = JobKind("toy", memory=3 << 30, estimates={"horus": 5 << 30})
    >>> promise_of(kind, "oracle") >> 30, promise_of(kind, "none"), promise_of(kind, "horus") >> 30
    (3, None, 5)
    """
    if estimator == "oracle":
        return kind.memory
    if estimator == "none":
        return None
    if estimator in kind.estimates:
        return kind.estimates[estimator]
    check_name(estimator)
    known = known_workloads().get(kind.name)
    if known is None or "model" not in known.training:
        found = ", ".join(["oracle (true memory)", "none", *kind.estimates])
        needed = f"needed an estimate by {estimator} for jobs like {kind.name}; the trace has none"
        raise InvalidValue(f"{needed}: name another estimator, of {found}")
    return _answer(kind.name, estimator)


@functools.cache
def _answer(name: str, estimator: str) -> int | None:
    options = dict(known_workloads()[name].training)
    model = options.pop("model")
    request = request_of(model, options, estimator)
    try:
        return answer_request(request, MEASURED_ON).bound
    except UllageError:
        return None
