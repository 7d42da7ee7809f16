"""Models for operators that those of torchvision, timm and transformers seldom call: recurrent, one- and
three-dimensional, and with transposed convolutions.
"""

import random
from typing import Any

import torch
from torch import nn

_HERE = "ullage_lab.networks.rarer"
_WAYS: dict[str, tuple[str, ...]] = {
    "opt": ("sgdm", "adam", "adamw", "adamw_fused"),
    "precision": ("fp32", "fp32", "amp_bf16", "amp_fp16", "bf16"),
}


class Recurrent(nn.Module):
    """A recurrent network over vectors, and a linear layer over its last state."""

    def __init__(self, kind: str, inputs: int, hidden: int, layers: int, both: bool, classes: int) -> None:
        super().__init__()
        made: type[nn.Module] = getattr(nn, kind)
        self.body = made(inputs, hidden, layers, batch_first=True, bidirectional=both)
        self.head = nn.Linear(hidden * (2 if both else 1), classes)

    def forward(self, vectors: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.head(self.body(vectors)[0][:, -1])
        return scores


recurrent = Recurrent


def volumes(dimensions: int, channels: int, width: int, classes: int) -> nn.Module:
    """Convolutions over one, two or three dimensions, down and up again, with norms of groups and of instances."""
    convolution, transposed, pool, norm = (
        getattr(nn, f"{name}{dimensions}d") for name in ("Conv", "ConvTranspose", "AvgPool", "InstanceNorm")
    )
    return nn.Sequential(
        convolution(channels, width, 3, padding=1),
        nn.GroupNorm(4, width),
        nn.SiLU(),
        pool(2),
        convolution(width, 2 * width, 3, padding=1),
        norm(2 * width, affine=True),
        nn.LeakyReLU(0.1),
        transposed(2 * width, width, 2, stride=2),
        nn.GroupNorm(4, width),
        nn.PReLU(),
        convolution(width, classes, 1),
        nn.Flatten(2),
        _Mean(),
    )


class _Mean(nn.Module):
    def forward(self, places: torch.Tensor) -> torch.Tensor:
        return places.mean(-1)


def rarer_runs(count: int, seed: int) -> list[dict[str, Any]]:
    """Return N runs of these models in the form of a file of configurations."""
    chance = random.Random(f"rarer {seed}")
    rows: list[dict[str, Any]] = []
    for number in range(count):
        classes = chance.choice((10, 100, 1000))
        ways = {name: chance.choice(values) for name, values in _WAYS.items()}
        if number % 2:
            kind, inputs = chance.choice(("LSTM", "LSTM", "GRU", "RNN")), chance.choice((32, 80, 256, 512))
            settings: dict[str, Any] = {
                "kind": kind,
                "inputs": inputs,
                "hidden": chance.choice((64, 256, 512, 1024)),
                "layers": chance.choice((1, 2, 3)),
                "both": chance.random() < 0.4,
            }
            shape, name = [chance.choice((16, 64, 200)), inputs], "recurrent"
        else:
            dimensions, channels = chance.choice((1, 2, 3)), chance.choice((1, 3, 16))
            settings = {"dimensions": dimensions, "channels": channels, "width": chance.choice((16, 32, 64))}
            shape, name = [channels, *[{1: 4096, 2: 96, 3: 32}[dimensions]] * dimensions], "volumes"
        batch = chance.choice((1, 4, 16, 64))
        rows.append(
            {
                "id": f"rarer-{seed}-{number:03d}",
                "family": "rarer",
                "model": f"{_HERE}:{name}",
                "batch": batch,
                "input": shape,
                **ways,
                "settings": {**settings, "classes": classes},
            }
        )
    return rows
