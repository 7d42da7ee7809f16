"""`mlp:NAME`: linear layers of given widths."""

from __future__ import annotations

from torch import nn

from ullage.workload.configuration import Configuration
from ullage.workload.tasks import Task


def build_perceptron(configuration: Configuration) -> nn.Module:
    """Linear layers, with batch norm and dropout between them where the configuration says so.

    >>> build_perceptron(Configuration(model="mlp:x", widths=[8, 4], batch=2))
    Sequential(
      (0): Linear(in_features=8, out_features=4, bias=True)
    )
    """
    widths = configuration.widths or []
    layers: list[nn.Module] = []
    for place, (inputs, outputs) in enumerate(zip(widths, widths[1:], strict=False)):
        layers.append(nn.Linear(inputs, outputs))
        if place == len(widths) - 2:
            break
        if configuration.bn:
            layers.append(nn.BatchNorm1d(outputs))
        layers.append(getattr(nn, configuration.act)())
        if configuration.drop:
            layers.append(nn.Dropout(0.3))
    return nn.Sequential(*layers)


def perceptron_task(configuration: Configuration, model: nn.Module) -> Task:
    """Classification of vectors."""
    widths = configuration.widths or [1]
    return Task([widths[0]], widths[-1])
