"""The answer of an estimator that knows one figure: everything else is left out, and a note says what it means."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ullage.errors import InvalidValue
from ullage.estimate.result import BREAKDOWN_WORDS, Estimate
from ullage.gpus import GPU

_FIELDS = {"allocated": "peak_allocated", "reserved": "peak_reserved", "process": "process_memory"}


def answer(
    name: str,
    gpu: GPU,
    kind: str,
    parts: Mapping[str, int],
    *,
    seconds: float,
    notes: Sequence[str],
    known: Mapping[str, int | None] | None = None,
    source: str | None = None,
) -> Estimate:
    """An estimate whose figure is the sum of `parts` (names of the breakdown) and of the given kind.

    `known` are further figures that the estimator does know, such as `peak_reserved`.

    >>> from ullage.gpus import gpu
    >>> e = answer("horus", gpu("T4"), "process", {"parameters": 400, "activations": 600}, seconds=0.1, notes=[])
    >>> e.figure, e.peak_allocated, e.fits
    (1000, None, True)
    """
    unknown = set(parts) - set(BREAKDOWN_WORDS)
    if unknown or kind not in _FIELDS:
        raise InvalidValue(f"no such part or kind of memory: {', '.join(sorted(unknown)) or kind}")
    figure = sum(parts.values())
    figures: dict[str, Any] = dict.fromkeys(("peak_allocated", "peak_reserved", "process_memory", "upper"))
    figures |= dict(known or {}) | {_FIELDS[kind]: figure}
    return Estimate(
        gpu=gpu.name,
        gpu_memory=gpu.usable,
        breakdown={part: parts[part] for part in BREAKDOWN_WORDS if part in parts},
        fits=figure <= gpu.usable,
        headroom=gpu.usable - figure,
        steps=0,
        seconds=seconds,
        source=source,
        notes=list(notes),
        estimator=name,
        figure_kind=kind,
        **figures,
    )
