"""`walknet` and `walknet+transformer`: networks over features from a walk through our allocator model.

Like GPUMemNet (`gpumemnet/`) they tell the class of memory that a job falls into. Unlike it, they read what a walk
through a training step reserves in a model of PyTorch's caching allocator, and what cuDNN is known to take. They were
trained on jobs that this project generated and measured, by `ullage lab train walknet`.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ullage.errors import InvalidValue
from ullage.estimation.estimators.answer import answer, read_options, supports_training_by_name
from ullage.estimation.estimators.registry import estimator
from ullage.estimation.result import Estimate
from ullage.hardware import GPU
from ullage.jobs.job import JobRequest
from ullage.units import format_bytes, parse_bytes
from ullage_lab.estimators.walknet.inputs import family_of, inputs_of, row_of
from ullage_lab.estimators.walknet.networks import ModelCard, batched, probabilities, shipped, trained

SOURCE = (
    "this project, after GPUMemNet (Yousefzadeh-Asl-Miandoab et al., 2025): networks over features from a walk through "
    "our allocator model; trained here (src/ullage/estimation/estimators/data/walknet.md)"
)
SURE = 0.99  # the share of probability that lies below `upper`


def classify(
    row: Mapping[str, Any], kind: str, options: Mapping[str, Any]
) -> tuple[np.ndarray[Any, Any], ModelCard, int]:
    """The probabilities of the bins for the facts of a job, the card of the network, and the width of a bin.

    `options`: "bin" for bins that are wider than those of the network, "weights" for a file of one's own.
    """
    file = Path(options["weights"]) if options.get("weights") else shipped(family_of(row), kind)
    network, card = trained(file)
    found = probabilities(network, batched([inputs_of(row)]))[0].numpy()
    width = parse_bytes(options["bin"]) if options.get("bin") else card.bin
    factor, rest = divmod(width, card.bin)
    if rest or not factor:
        raise InvalidValue(f"walknet.bin needs a multiple of {format_bytes(card.bin)}; found {options['bin']!r}")
    padded = np.pad(found, (0, -len(found) % factor))
    return padded.reshape(-1, factor).sum(1), card, width


def _estimate(name: str, kind: str, request: JobRequest, gpu: GPU) -> Estimate:
    begin = time.perf_counter()
    options = read_options("walknet", request.options, {"bin": "", "weights": ""})
    assert request.model is not None
    row = row_of(request.model)
    found, card, width = classify(row, kind, options)
    best = int(found.argmax())
    upper = int(np.searchsorted(found.cumsum(), SURE)) + 1
    return answer(
        name,
        gpu,
        "process",
        {"activations": (best + 1) * width},
        seconds=time.perf_counter() - begin,
        notes=_notes(found, card, width, gpu),
        known={"upper": max(upper, best + 1) * width},
    )


def _notes(found: np.ndarray[Any, Any], card: ModelCard, width: int, gpu: GPU) -> list[str]:
    best = int(found.argmax())
    order = [int(place) for place in np.argsort(-found)[:3] if found[place] >= 0.005]
    classes = ", ".join(f"{_bin(place, width)}: {found[place]:.0%}" for place in order)
    notes = [
        f"the figure is the upper edge of the most probable class, {_bin(best, width)}; the parts are not told apart",
        f"classes by probability: {classes}; upper is where {SURE:.0%} of the probability lies below",
        f"a network trained on {card.rows} generated jobs of the family {card.family}, measured on an {card.gpu}; on "
        f"held-out ones it told the right class of {format_bytes(card.bin)} in {_share(card, 'accuracy')} and one too "
        f"low in {_share(card, 'under')}",
    ]
    if card.range and best * width >= card.range[1]:
        notes.append(f"more than any job that it was trained on ({format_bytes(card.range[1])}): it extrapolates")
    if gpu.name != card.gpu:
        notes.append(f"trained on an {card.gpu} alone: the figure is that of an {card.gpu}, not of {gpu.name}")
    return notes


def _share(card: ModelCard, name: str) -> str:
    value = card.figures.get("test", {}).get(name)
    return "an unknown share" if value is None else f"{value:.1%}"


def _bin(place: int, width: int) -> str:
    return f"{format_bytes(place * width)} to {format_bytes((place + 1) * width)}"


@estimator(
    "walknet",
    title="an ensemble of perceptrons over a walk through our allocator model",
    source=SOURCE,
    needs="the model by name; no GPU",
    supports=supports_training_by_name,
)
def run(request: JobRequest, gpu: GPU) -> Estimate:
    """Estimate by the ensemble of the family that the model's layers belong to."""
    return _estimate("walknet", "mlp", request, gpu)


@estimator(
    "walknet+transformer",
    title="a Transformer over the layers and a walk through our allocator model",
    source=SOURCE,
    needs="the model by name; no GPU",
    supports=supports_training_by_name,
)
def run_transformer(request: JobRequest, gpu: GPU) -> Estimate:
    """Estimate by the Transformer of the family that the model's layers belong to."""
    return _estimate("walknet+transformer", "transformer", request, gpu)
