"""`gpumemnet` and `gpumemnet+transformer`: GPUMemNet as published, trained on this project's measurements.

Yousefzadeh-Asl-Miandoab, Karimzadeh, Yorulmaz, Ibragimov and Tozun, arXiv 2602.17817, and chapter 5 of the first
author's dissertation. Features, networks and classes of memory are theirs; the jobs that the networks learned from were
generated and measured by this project.
"""

import time
from pathlib import Path
from typing import Any

from ullage.errors import InvalidValue
from ullage.estimation.estimators.answer import answer, read_options, summary_with_batch, supports_training_by_name
from ullage.estimation.estimators.gpumemnet.features import family_of, summary_of
from ullage.estimation.estimators.gpumemnet.networks import WIDTHS, jobs_of, shipped, trained
from ullage.estimation.estimators.printed_summary import ModelSummary
from ullage.estimation.estimators.registry import estimator
from ullage.estimation.estimators.weights import ModelCard, probabilities
from ullage.estimation.result import Estimate
from ullage.hardware import GPU
from ullage.jobs.job import JobRequest
from ullage.units import GIB, format_bytes, parse_bytes

SOURCE = (
    "Yousefzadeh-Asl-Miandoab et al., GPUMemNet, arXiv 2602.17817, 2026; trained here "
    "(src/ullage/estimation/estimators/data/gpumemnet.md)"
)


NEEDS = "the model by name, or a model summary and the batch size; no GPU"


def classify(summary: ModelSummary, kind: str, options: dict[str, Any]) -> tuple[list[float], ModelCard]:
    """Return the probabilities of the classes, and the card of the network.

    `options`: "bin" for another width of classes, "weights" for a file of weights.
    """
    family = family_of(summary)
    if options.get("weights"):
        file = Path(options["weights"])
    else:
        file = shipped(family, kind, _width(options["bin"], family, kind) if options.get("bin") else None)
    network, card = trained(file)
    return probabilities(network, jobs_of([summary], card.family))[0].tolist(), card


def _width(given: str, family: str, kind: str) -> int:
    width, there = parse_bytes(given), WIDTHS[family, kind]
    if width % GIB or width // GIB not in there:
        known = " or ".join(f"{gib}GiB" for gib in sorted(there))
        raise InvalidValue(f"gpumemnet.bin must be {known} for the family {family}, got {given!r}")
    return width


def supports(request: JobRequest) -> str | None:
    return None if request.summary is not None else supports_training_by_name(request)


def read_request(request: JobRequest) -> ModelSummary:
    """Return the summary of a job that it supports."""
    if request.summary is not None:
        return summary_with_batch(request.summary)
    assert request.model is not None
    return summary_of(request.model)


def _estimate(name: str, kind: str, request: JobRequest, gpu: GPU) -> Estimate:
    begin = time.perf_counter()
    options = read_options("gpumemnet", request.options, {"bin": "", "weights": ""})
    summary = read_request(request)
    odds, card = classify(summary, kind, options)
    best = max(range(len(odds)), key=odds.__getitem__)
    return answer(
        name,
        gpu,
        "process",
        {"activations": (best + 1) * card.bin},
        seconds=time.perf_counter() - begin,
        notes=[*_notes(odds, best, card, gpu), *summary.notes],
    )


def _notes(odds: list[float], best: int, card: ModelCard, gpu: GPU) -> list[str]:
    test = card.figures.get("test", {})
    accuracy = ", ".join(
        f"{name} in {test[key]:.1%}"
        for name, key in (("the right class", "accuracy"), ("one too low", "under"))
        if key in test
    )
    notes = [
        f"the figure is the upper edge of the most probable class ({odds[best]:.0%}), {format_bytes(best * card.bin)} "
        f"to {format_bytes((best + 1) * card.bin)}; it knows nothing of optimizer, precision, allocator or kernels",
        f"a network trained on {card.rows} generated jobs of the family {card.family}, measured on an {card.gpu}; on "
        f"held-out ones it told {accuracy or 'an unknown share right'}",
    ]
    if best == card.bins - 1:
        notes.append("this is the highest class that it knows: the memory may be more")
    if gpu.name != card.gpu:
        notes.append(f"trained on an {card.gpu} alone: the figure is that of an {card.gpu}, not of {gpu.name}")
    return notes


def _register(name: str, kind: str, title: str) -> None:
    @estimator(name, title=title, source=SOURCE, needs=NEEDS, supports=supports)
    def run(request: JobRequest, gpu: GPU) -> Estimate:
        return _estimate(name, kind, request, gpu)


_register("gpumemnet", "mlp", "GPUMemNet as published: an ensemble of perceptrons over totals of the model summary")
_register("gpumemnet+transformer", "transformer", "GPUMemNet as published: Transformers over the sequence of layers")
