"""`dnnperf`: a graph network that reads the computation graph of a training step and predicts memory and step time.

After Gao, Gu, Zhang, Lin and Yang, "Runtime Performance Prediction for Deep Learning Models with Graph Neural Network",
ICSE-SEIP 2023: nodes are operators with hyper-parameters, sizes and FLOPs, edges are tensors with their sizes, and an
attention-based node-edge encoder reads both. The authors published no weights; these were trained on runs that this
project measured (`data/dnnperf.md`), by `dnnperf_training`.
"""

from __future__ import annotations

import functools
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ullage.errors import InvalidValue, UllageError
from ullage.estimation.estimators.answer import answer
from ullage.estimation.estimators.dnnperf.graph import Graph, graph_of
from ullage.estimation.estimators.dnnperf.network import Network, folded, tensors_of
from ullage.estimation.estimators.registry import estimator
from ullage.estimation.result import Estimate
from ullage.hardware import GPU
from ullage.units import format_duration
from ullage.workloads.configuration import Configuration
from ullage.workloads.workload import Workload

WEIGHTS = Path(__file__).parents[1] / "data" / "dnnperf.safetensors"
MEASURED_ON = "H200"


@dataclass(frozen=True)
class Prediction:
    """What the network says: bytes of reserved memory, seconds a training step.

    >>> Prediction(2**30, 0.05).step_seconds
    0.05
    """

    peak_reserved: int
    step_seconds: float


def supports(workload: Workload) -> str | None:
    """Training runs of a named model.

    >>> supports(Workload(script="train.py"))
    'it needs the computation graph of a training step: a model by name'
    """
    if workload.configuration is None:
        return "it needs the computation graph of a training step: a model by name"
    return "it was trained on training steps; this is inference" if workload.configuration.inference else None


@functools.cache
def network(path: Path = WEIGHTS) -> tuple[Network, dict[str, Any]]:
    """The trained network and the facts of its training (data, versions, errors on held-out families)."""
    from safetensors import safe_open

    made = Network()
    try:
        with safe_open(path, "pt") as file:
            card = json.loads(file.metadata()["card"])
            made.load_state_dict({name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118
    except (OSError, RuntimeError, KeyError, TypeError) as error:
        raise InvalidValue(f"needed the weights of dnnperf in {path}: {error}") from None
    return made.eval(), card


def predict(configuration: Configuration) -> Prediction:
    """Memory and step time of a training run on an H200.

    >>> predict(Configuration(model="mlp:x", widths=[64, 64, 10], batch_size=8)).peak_reserved > 2**20
    True
    """
    return predict_graph(_graph(configuration))


def predict_graph(graph: Graph, path: Path = WEIGHTS) -> Prediction:
    """Memory and step time of a graph."""
    made, _ = network(path)
    with torch.no_grad():
        memory, seconds = made(folded(tensors_of(graph)))[0].exp().tolist()
    return Prediction(int(memory), seconds)


def _graph(configuration: Configuration) -> Graph:
    try:
        graph = graph_of(configuration)
    except UllageError:
        raise
    except Exception as error:
        lines = [line for line in str(error).splitlines() if line.strip()] or [""]
        raise InvalidValue(f"{configuration.model} gave no graph: {type(error).__name__}: {lines[0]}") from error
    if not graph.nodes:
        raise InvalidValue(f"{configuration.model} gave an empty graph: no operator ran between input and loss")
    return graph


@estimator(
    "dnnperf",
    title="a graph network with an attention-based node-edge encoder on the computation graph",
    source="Gao et al.: Runtime Performance Prediction for Deep Learning Models with Graph Neural Network, "
    "ICSE-SEIP 2023; trained here (src/ullage/estimators/data/dnnperf.md)",
    needs="the model by name; no GPU",
    supports=supports,
)
def run(workload: Workload, gpu: GPU) -> Estimate:
    """Estimate by the trained network.

    >>> from ullage.hardware import gpu
    >>> workload = Workload(configuration=Configuration(model="mlp:x", widths=[8, 4], batch_size=2))
    >>> run(workload, gpu("H200")).figure_kind
    'reserved'
    """
    begin = time.perf_counter()
    assert workload.configuration is not None
    graph = _graph(workload.configuration)
    predicted = predict_graph(graph)
    held_out = network()[1]["held_out"]
    return answer(
        "dnnperf",
        gpu,
        "reserved",
        _parts(graph, predicted.peak_reserved),
        seconds=time.perf_counter() - begin,
        notes=_notes(gpu, predicted, held_out),
    )


def _parts(graph: Graph, total: int) -> dict[str, int]:
    """Weights, gradients and optimizer state are counted in the graph; the rest of the prediction is activations."""
    counted = {"parameters": graph.parameters, "gradients": graph.gradients, "optimizer": graph.state}
    if sum(counted.values()) > total:
        return {"activations": total}  # the network stays below the count: no split can be told
    return counted | {"activations": total - sum(counted.values())}


def _notes(gpu: GPU, predicted: Prediction, held_out: dict[str, float]) -> list[str]:
    notes = [
        "the figure stands for reserved memory, without the CUDA context; it is a trained network's prediction",
        f"on model families that it was not trained on its median error is {held_out['memory_median_error']:.0%} for "
        f"memory and {held_out['time_median_error']:.0%} for step time, over {held_out['runs']:.0f} runs",
        f"step time {format_duration(predicted.step_seconds)} on an {MEASURED_ON}; the step times it learned from were "
        "measured while other processes used the GPU",
    ]
    if gpu.name != MEASURED_ON:
        notes.append(f"trained on an {MEASURED_ON} alone: the figures are those of an {MEASURED_ON}, not of {gpu.name}")
    return notes
