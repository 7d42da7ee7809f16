"""What a job is promised: what an estimator says of its kind."""

from __future__ import annotations

from ullage.errors import UnknownName
from ullage.simulation.trace import JobKind


def promise_of(kind: JobKind, estimator: str) -> int | None:
    """Bytes by an estimator; "oracle" knows the truth, "none" nothing.

    >>> kind = JobKind("toy", memory=3 << 30, estimates={"horus": 5 << 30})
    >>> promise_of(kind, "oracle") >> 30, promise_of(kind, "none"), promise_of(kind, "horus") >> 30
    (3, None, 5)
    """
    if estimator == "oracle":
        return kind.memory
    if estimator == "none":
        return None
    if estimator not in kind.estimates:
        raise UnknownName("estimate", estimator, ["oracle", "none", *kind.estimates], hint=f"for jobs like {kind.name}")
    return kind.estimates[estimator]
