"""GPUUtilNet as published: the class of SMACT, SMOCC and DRAMA from the features of GPUMemNet.

Yousefzadeh-Asl-Miandoab, Karimzadeh, Yorulmaz, Ibragimov and Tozun, arXiv 2602.17817. Features and classes (Table 7)
are theirs; the jobs that the networks learned from were generated and measured by this project. The paper does not say
how large the networks are: they are GPUMemNet's ensembles of perceptrons.
"""

import functools
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ullage.errors import InvalidValue
from ullage.estimation.estimators.answer import answer, read_options
from ullage.estimation.estimators.gpumemnet.estimator import NEEDS, read_request, supports
from ullage.estimation.estimators.gpumemnet.features import family_of, names_of
from ullage.estimation.estimators.gpumemnet.networks import DEPTHS, Perceptrons, jobs_of
from ullage.estimation.estimators.printed_summary import ModelSummary
from ullage.estimation.estimators.registry import estimator
from ullage.estimation.estimators.weights import plain_products, read_weights
from ullage.estimation.result import Estimate
from ullage.hardware import GPU
from ullage.jobs.job import JobRequest
from ullage_lab.estimators.weights import write_weights

SHIPPED = Path(__file__).parent / "data" / "gpuutilnet.safetensors"
CLASSES = ("low", "medium", "high")
# Where the medium and the high class begin (Table 7).
BINS: Mapping[tuple[str, str], tuple[float, float]] = {
    ("mlp", "smact"): (0.2, 0.7),
    ("mlp", "smocc"): (0.1, 0.3),
    ("mlp", "drama"): (0.2, 0.7),
    ("cnn", "smact"): (0.3, 0.9),
    ("cnn", "smocc"): (0.1, 0.3),
    ("cnn", "drama"): (0.3, 0.9),
    ("transformer", "smact"): (0.3, 0.8),
    ("transformer", "smocc"): (0.3, 0.4),
    ("transformer", "drama"): (0.3, 0.8),
}
METRICS = ("smact", "smocc", "drama")


def classes_of(values: Sequence[float] | npt.NDArray[np.float64], edges: tuple[float, float]) -> npt.NDArray[np.int64]:
    """Return the class of each share: 0 low, 1 medium, 2 high."""
    return np.digitize(np.asarray(values, dtype=np.float64), edges).astype(np.int64)


@dataclass(frozen=True)
class GPUUtilNet:
    """Trained networks by family and metric, with the rows, held-out rows and figures of each."""

    networks: Mapping[tuple[str, str], Perceptrons]
    cards: Mapping[tuple[str, str], Mapping[str, Any]]
    gpu: str

    def probabilities(self, summaries: Sequence[ModelSummary], family: str, metric: str) -> npt.NDArray[np.float64]:
        """Return the probabilities of the three classes [jobs, 3]."""
        network = self.networks[family, metric]
        with torch.inference_mode(), plain_products():
            probabilities = torch.softmax(network(jobs_of(summaries, family).totals), dim=1)
        return probabilities.double().numpy()


def empty_network(family: str) -> Perceptrons:
    return Perceptrons(len(names_of(family)), len(CLASSES), DEPTHS[family])


def save(model: GPUUtilNet, path: Path) -> None:
    from safetensors.torch import save as packed

    tensors: dict[str, torch.Tensor] = {}
    cards = []
    for (family, metric), network in model.networks.items():
        tensors |= {f"{family}.{metric}.{name}": value.contiguous() for name, value in network.state_dict().items()}
        cards.append([family, metric, model.cards[family, metric]])
    write_weights(path, packed(tensors, {"gpu": model.gpu, "cards": json.dumps(cards)}))


@functools.cache
def load(path: Path = SHIPPED) -> GPUUtilNet:
    networks, cards = {}, {}
    with read_weights("gpuutilnet", path) as (tensors, metadata):
        for family, metric, card in json.loads(metadata["cards"]):
            prefix = f"{family}.{metric}."
            own = {name.removeprefix(prefix): each for name, each in tensors.items() if name.startswith(prefix)}
            network = empty_network(family)
            network.load_state_dict(own)
            networks[family, metric], cards[family, metric] = network.eval(), card
        return GPUUtilNet(networks, cards, metadata["gpu"])


@estimator(
    "gpuutilnet",
    title="GPUUtilNet as published: classes of SMACT, SMOCC and DRAMA; no memory",
    source="Yousefzadeh-Asl-Miandoab et al., GPUUtilNet, arXiv 2602.17817, 2026, Table 7; trained here",
    needs=NEEDS,
    supports=supports,
)
def run(request: JobRequest, gpu: GPU) -> Estimate:
    """Predict the classes of a model by name, or of the text of a summary."""
    begin, options = time.perf_counter(), read_options("gpuutilnet", request.options, {"weights": ""})
    model = load(Path(options["weights"] or SHIPPED))
    summary = read_request(request)
    family, activity = family_of(summary), {}
    known_metrics = [metric for metric in METRICS if (family, metric) in model.networks]
    if not known_metrics:
        raise InvalidValue(f"gpuutilnet.weights must have networks of the family {family}, got {options['weights']!r}")
    for metric in known_metrics:
        odds = model.probabilities([summary], family, metric)[0]
        best, edges = int(odds.argmax()), (0.0, *BINS[family, metric], 1.0)
        known = {"class": CLASSES[best], "least": edges[best], "most": edges[best + 1]}
        activity[metric] = known | {"probability": float(odds[best])}
    rows = model.cards[family, known_metrics[0]]["rows"]
    notes = [
        f"networks trained on {rows} generated jobs of the family {family}, measured on an {model.gpu}; the classes "
        "are those of a job that has such a GPU to itself",
        *summary.notes,
    ]
    seconds = time.perf_counter() - begin
    return answer("gpuutilnet", gpu, "process", {}, seconds=seconds, notes=notes, activity=activity)
