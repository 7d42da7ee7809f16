"""Training of DNNPerf's network on measured runs: `ullage lab train dnnperf --data DATA --out FILE`.

DATA is a file of measured runs, a line of JSON each (also .gz): a configuration with `peak_reserved` and `step_s`. The
folds of the cross-validation are whole model families, so that a figure shows the error on an unseen family.
"""

import json
import re
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from ullage.errors import InvalidValue
from ullage.jobs.model import Model, read_rows
from ullage_lab.estimators.dnnperf import GraphNetwork, GraphTensors, folded, graph_of, joined, tensors_of
from ullage_lab.estimators.weights import write_weights

SEED = 20
FOLDS = 5
EPOCHS = 24
TIME_WEIGHT = 0.3  # step times are noisier than memory and must not dominate


@dataclass
class Sample:
    """A graph with its measurements: logarithms of bytes and seconds."""

    family: str
    graph: GraphTensors
    truth: torch.Tensor


def family(model: str) -> str:
    """Return the family of a model: the leading letters of its name.

    >>> family("timm:vit_small_patch16_224"), family("hf:GPT2LMHeadModel"), family("tv:resnet50")
    ('vit', 'gpt', 'resnet')
    """
    name = model.partition(":")[2].removeprefix("wide_")
    begin = re.match(r"[A-Z]*[a-z]+|[A-Z]+", re.split(r"For[A-Z]|LMHead", name)[0])
    return begin.group(0).casefold() if begin else name.casefold()


def samples(path: Path, seen: Callable[[], None] = lambda: None) -> list[Sample]:
    """Return every run of the file with a measured peak and step time, as a graph; call `seen` after each."""
    graphs = []
    for row in read_rows(path):
        if not row.get("peak_reserved") or not row.get("step_s"):
            continue
        configuration = Model.from_row(row)
        if configuration.inference:
            continue
        truth = torch.tensor([float(row["peak_reserved"]), float(row["step_s"])]).log()
        graphs.append(Sample(family(row["model"]), folded(tensors_of(graph_of(configuration))), truth))
        seen()
    if not graphs:
        raise InvalidValue(f"{path} has no line with peak_reserved and step_s")
    return graphs


def fit(training: list[Sample], epochs: int = EPOCHS, seed: int = SEED, batch: int = 8) -> GraphNetwork:
    """Return a network trained on these samples; the same seed gives the same network on the same machine."""
    torch.manual_seed(seed)
    network = GraphNetwork()
    optimizer = torch.optim.AdamW(network.parameters(), lr=3e-3, weight_decay=1e-2)
    steps = max(1, epochs * -(-len(training) // batch))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=steps)
    weights = torch.tensor([1.0, TIME_WEIGHT])
    for _ in range(epochs):
        order = torch.randperm(len(training)).tolist()
        for start in range(0, len(order), batch):
            chosen = [training[place] for place in order[start : start + batch]]
            truth = torch.stack([sample.truth for sample in chosen])
            answers = network(joined([sample.graph for sample in chosen]))
            error = functional.smooth_l1_loss(answers, truth, reduction="none", beta=0.1)
            (error * weights).sum(dim=1).mean().backward()
            torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
    return network.eval()


def ratios(network: GraphNetwork, held_out: list[Sample]) -> list[tuple[float, float]]:
    """Return predicted over measured memory and time for each sample."""
    with torch.no_grad():
        pairs = [(network(sample.graph)[0] - sample.truth).exp().tolist() for sample in held_out]
    return [(memory, time) for memory, time in pairs]


def cross_validate(
    graphs: list[Sample], folds: int = FOLDS, epochs: int = EPOCHS, seen: Callable[[], None] = lambda: None
) -> dict[str, float]:
    """Return the errors on families outside the training; call `seen` after each fold."""
    families = sorted({sample.family for sample in graphs})
    if len(families) < 2 or folds < 2:
        raise InvalidValue(f"model families and folds must be two or more, got {len(families)} and {folds}")
    fold_of = {name: place % folds for place, name in enumerate(families)}
    met: list[tuple[float, float]] = []
    for fold in range(folds):
        held_out = [sample for sample in graphs if fold_of[sample.family] == fold]
        training = [sample for sample in graphs if fold_of[sample.family] != fold]
        if held_out and training:
            met += ratios(fit(training, epochs), held_out)
        seen()
    return figures(met) | {"families": len(families)}


def figures(met: list[tuple[float, float]]) -> dict[str, float]:
    """Return relative errors of memory and time, and the share of memory figures that are too low.

    >>> figures([(1.1, 0.5), (0.9, 1.0)])["memory_median_error"]
    0.1
    """
    memory, time = [abs(pair[0] - 1) for pair in met], [abs(pair[1] - 1) for pair in met]
    values = {
        "memory_median_error": statistics.median(memory),
        "memory_mean_error": statistics.mean(memory),
        "memory_underestimates": sum(pair[0] < 1 for pair in met) / len(met),
        "time_median_error": statistics.median(time),
        "time_mean_error": statistics.mean(time),
    }
    return {"runs": len(met)} | {name: round(value, 4) for name, value in values.items()}


def save(network: GraphNetwork, path: Path, card: dict[str, Any]) -> None:
    from safetensors.torch import save as packed

    path.parent.mkdir(parents=True, exist_ok=True)
    write_weights(path, packed(network.state_dict(), metadata={"card": json.dumps(card)}))


def trained(
    graphs: list[Sample], data: str, folds: int, epochs: int, seen: Callable[[], None] = lambda: None
) -> tuple[GraphNetwork, dict[str, Any]]:
    """Return the network trained on all samples, and its card with the errors on held-out families."""
    torch.set_num_threads(1)  # one order of sums, for a reproducible file
    held_out = cross_validate(graphs, folds, epochs, seen)
    network = fit(graphs, epochs)
    seen()
    card = {
        "data": data,
        "torch": torch.__version__,
        "seed": SEED,
        "epochs": epochs,
        "folds": folds,
        "held_out": held_out,
        "trained_on": figures(ratios(network, graphs)),
    }
    return network, card
