"""Shared by estimators with a single figure: their answer, their options, and the jobs that learned ones support."""

from collections.abc import Mapping, Sequence
from typing import Any

from ullage.errors import InvalidValue, UnknownName
from ullage.estimation.estimators.printed_summary import ModelSummary, read_summary
from ullage.estimation.result import Estimate
from ullage.estimation.words import BREAKDOWN_WORDS
from ullage.hardware import GPU
from ullage.jobs.job import JobRequest, Summary

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
    activity: Mapping[str, dict[str, Any]] | None = None,
) -> Estimate:
    """Return an estimate whose figure is the sum of `parts` (by the names of the breakdown).

    `kind` is the kind of the figure: allocated, reserved or process memory. `known` has further known figures, such as
    `peak_reserved`. Everything else is unknown; `notes` explain the figure. An estimator of `activity` has no parts.
    """
    unknown = set(parts) - set(BREAKDOWN_WORDS)
    if unknown or kind not in _FIELDS:
        raise InvalidValue(f"no such part or kind of memory: {', '.join(sorted(unknown)) or kind}")
    figure = sum(parts.values()) if parts or not activity else None
    figures: dict[str, Any] = dict.fromkeys(("peak_allocated", "peak_reserved", "process_memory", "upper"))
    figures |= dict(known or {}) | {_FIELDS[kind]: figure}
    return Estimate(
        gpu=gpu.name,
        gpu_memory=gpu.usable,
        breakdown={part: parts[part] for part in BREAKDOWN_WORDS if part in parts},
        fits=None if figure is None else figure <= gpu.usable,
        headroom=None if figure is None else gpu.usable - figure,
        steps=0,
        seconds=seconds,
        source=source,
        notes=list(notes),
        estimator=name,
        figure_kind=kind,
        activity=dict(activity or {}),
        **figures,
    )


def read_options(name: str, given: Mapping[str, Any], defaults: dict[str, Any]) -> dict[str, Any]:
    """Return an estimator's options, from `settings={"NAME.key": value}` or `--set NAME.key=value`, with their
    defaults.

    Unknown names and values of another type are refused.
    """
    for key, value in given.items():
        if key not in defaults:
            valid = [f"{name}.{option}" for option in defaults]
            raise UnknownName("option", f"{name}.{key}", valid, hint="all: " + ", ".join(valid))
        wanted = type(defaults[key])
        if defaults[key] is not None and type(value) is not wanted:
            raise InvalidValue(f"{name}.{key} must be a value like {defaults[key]!r}, got {value!r}")
        if wanted is int and value < 0:
            raise InvalidValue(f"{name}.{key} must be at least 0, got {value!r}")
    return {**defaults, **given}


def supports_training_by_name(request: JobRequest) -> str | None:
    """Return the reason why a learned estimator refuses a request; `None` for the training of a model by name."""
    if request.model is None:
        return "it reads the layers of a model: a model by name"
    return "it was trained on training runs; this is inference" if request.model.inference else None


def supports_names(request: JobRequest) -> str | None:
    """Return the reason why an estimator that reads a model's parameters does not support a request, or `None`."""
    if request.kind != "model":
        return f"it needs a model by its name; this is a {request.kind}"
    return None


def summary_with_batch(given: Summary) -> ModelSummary:
    """Return the summary of a text, with the batch size that was given, or else that of the text."""
    summary = read_summary(given.text, given.sequence_length)
    batch = given.batch_size or summary.batch_size
    if batch is None:
        raise InvalidValue("the summary must have a batch size, or give it with --batch-size")
    return summary._replace(batch_size=batch)
