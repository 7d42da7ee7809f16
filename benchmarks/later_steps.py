"""Draws training runs of families that are in no data set: a second test of step times, read more carefully.

    python benchmarks/later_steps.py runs.jsonl
    ullage dataset measure runs.jsonl --out later.jsonl --utilization --seconds 0.25 --workers 20     # needs a GPU
    python benchmarks/later_steps.py --middle later.jsonl middle.jsonl
    ullage dataset clean middle.jsonl --out later_steps_h200.parquet

A step that waits for its host repeats within a tenth only, so every run is in the list three times, in three rounds,
each in an order of its own: the middle of its readings counts. Runs of families for the fit, short ones and long ones,
say how fast the host is. The seed is no setting: a list that was looked at is used up.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parent))
from fresh_steps import OPTIMIZERS, PRECISIONS, SHAPES, Block, known_runs, runs_of, with_batch

from ullage.research.datasets.generate import DEFAULTS, generate
from ullage.research.datasets.model_families import family_of, is_for_testing

SEED = "20261118 later steps"
READINGS = 3
IMAGES = {
    "repvit": ("repvit_m0_9", "repvit_m1_1"), "lambda": ("lambda_resnet26t",), "botnet": ("botnet26t_256",),
    "gcvit": ("gcvit_xxtiny", "gcvit_xtiny"), "mvit": ("mvitv2_tiny",),
    "efficientformerv": ("efficientformerv2_s0", "efficientformerv2_s1"), "vitamin": ("vitamin_small_224",),
    "gmixer": ("gmixer_12_224",),
}  # fmt: skip
SIDES = {"lambda": (128, 192, 256), "repvit": (128, 192, 224), "botnet": (256,)}
_BERT = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
# Class, its configuration, and how that names hidden size, layers, heads and the width between.
TEXT = {
    "xlnet": ("XLNetLMHeadModel", "XLNet", ("d_model", "n_layer", "n_head", "d_inner")),
    "ctrl": ("CTRLLMHeadModel", "CTRL", ("n_embd", "n_layer", "n_head", "dff")),
    "fnet": ("FNetForMaskedLM", "FNet", ("hidden_size", "num_hidden_layers", None, "intermediate_size")),
    "gptneo": ("GPTNeoForCausalLM", "GPTNeo", ("hidden_size", "num_layers", "num_heads", "intermediate_size")),
    "modernbert": ("ModernBertForMaskedLM", "ModernBert", _BERT), "biogpt": ("BioGptForCausalLM", "BioGpt", _BERT),
    "flaubert": ("FlaubertWithLMHeadModel", "Flaubert", ("emb_dim", "n_layers", "n_heads", None)),
}  # fmt: skip
CNNS, MLPS = ("temporal", "upscaling", "generator"), ("crossed", "sines", "highway")


class Temporal(nn.Module):
    """Two convolutions over time that see the past alone, ever further back."""

    def __init__(self, width: int, dilation: int) -> None:
        super().__init__()
        self.behind = 2 * dilation
        self.first, self.second = (nn.Conv1d(width, width, 3, dilation=dilation) for _ in range(2))

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        """As long as the input."""
        inner = torch.relu(self.first(nn.functional.pad(value, (self.behind, 0))))
        return torch.relu(value + self.second(nn.functional.pad(inner, (self.behind, 0))))


class Mean(nn.Module):
    """The mean over all places."""

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        """One number a channel."""
        return value.flatten(2).mean(2)


class Crossed(nn.Module):
    """A product of the columns of a table with themselves, as the deep and cross network makes it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width)

    def forward(self, pair: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """The table, and what was made of it."""
        first, last = pair
        return first, first * self.inner(last) + last


class CrossedTable(nn.Module):
    """Crossed layers beside a plain network."""

    def __init__(self, features: int, width: int, depth: int, num_classes: int) -> None:
        super().__init__()
        self.crossed = nn.Sequential(*(Crossed(features) for _ in range(depth)))
        widths = [features, *[width] * depth]
        self.deep = nn.Sequential(
            *(nn.Sequential(nn.Linear(a, b), nn.ReLU()) for a, b in zip(widths, widths[1:], strict=False))
        )
        self.head = nn.Linear(features + width, num_classes)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        """Classes."""
        out: torch.Tensor = self.head(torch.cat([self.crossed((value, value))[1], self.deep(value)], 1))
        return out


class Sine(nn.Module):
    """A layer with a sine."""

    def __init__(self, inner: int, outer: int) -> None:
        super().__init__()
        self.linear = nn.Linear(inner, outer)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        """As networks for images and fields have it."""
        return torch.sin(30 * self.linear(value))


class Highway(nn.Module):
    """A layer that lets its input through as far as a gate is open."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.change, self.gate = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        """As wide as the input."""
        gate = torch.sigmoid(self.gate(value))
        return gate * torch.tanh(self.change(value)) + (1 - gate) * value


def temporal(channels: int, width: int, depth: int, num_classes: int) -> nn.Module:
    """A network over time."""
    blocks = [Temporal(width, 2**place) for place in range(depth)]
    return nn.Sequential(nn.Conv1d(channels, width, 1), *blocks, Mean(), nn.Linear(width, num_classes))


def upscaling(channels: int, width: int, depth: int, num_classes: int) -> nn.Module:
    """Residual blocks without norms, and then twice as many places, as for super-resolution."""

    def body() -> nn.Module:
        return nn.Sequential(nn.Conv2d(width, width, 3, padding=1), nn.ReLU(), nn.Conv2d(width, width, 3, padding=1))

    blocks = [Block(width, body(), lambda _: nn.Identity()) for _ in range(depth)]  # type: ignore[arg-type]
    larger = [nn.Conv2d(width, 4 * width, 3, padding=1), nn.PixelShuffle(2), nn.Conv2d(width, 16, 3, padding=1)]
    return nn.Sequential(nn.Conv2d(channels, width, 3, padding=1), *blocks, *larger, Mean(), nn.Linear(16, num_classes))


def generator(channels: int, width: int, depth: int, num_classes: int) -> nn.Module:
    """Transposed convolutions, as those that make images have them."""
    layers: list[nn.Module] = []
    for place in range(depth):
        inner, outer = (max(16, width >> (place + more)) for more in (0, 1))
        layers += [nn.ConvTranspose2d(inner, outer, 4, 2, 1, bias=False), nn.BatchNorm2d(outer), nn.ReLU()]
    return nn.Sequential(nn.Conv2d(channels, width, 1), *layers, Mean(), nn.Linear(outer, num_classes))


def crossed(features: int, width: int, depth: int, num_classes: int) -> nn.Module:
    """A deep and cross network."""
    return CrossedTable(features, width, depth, num_classes)


def sines(features: int, width: int, depth: int, num_classes: int) -> nn.Module:
    """Layers with sines."""
    layers = [Sine(features, width), *(Sine(width, width) for _ in range(depth))]
    return nn.Sequential(*layers, nn.Linear(width, num_classes))


def highway(features: int, width: int, depth: int, num_classes: int) -> nn.Module:
    """Layers with gates."""
    return nn.Sequential(
        nn.Linear(features, width), *(Highway(width) for _ in range(depth)), nn.Linear(width, num_classes)
    )


def _image(chance: random.Random, family: str) -> dict[str, Any]:
    side = chance.choice(SIDES.get(family, (224,)))
    return {"model": f"timm:{chance.choice(IMAGES[family])}", "input": [3, side, side],
            "channels_last": chance.random() < 0.2}  # fmt: skip


def _text(chance: random.Random, family: str) -> dict[str, Any]:
    name, configuration, (hidden, layers, heads, middle) = TEXT[family]
    size, depth, count = chance.choice(SHAPES)
    length, vocabulary = chance.choice((64, 128, 256, 512)), chance.choice((8_000, 30_522))
    settings: dict[str, Any] = {"vocab_size": vocabulary, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    settings |= {hidden: size, layers: depth} | ({heads: count} if heads else {})
    settings |= {middle: size * chance.choice((3, 4))} if middle else {}
    if family == "gptneo":
        settings["attention_types"] = [[["global", "local"], depth // 2]]
    if family == "modernbert":
        settings |= {"cls_token_id": 1, "sep_token_id": 2}
    if family in ("gptneo", "biogpt", "modernbert", "flaubert", "fnet"):
        settings["max_position_embeddings"] = 1024
    return {"model": f"hf:{name}", "conf": configuration, "hf_config": settings, "vocab": vocabulary, "seq": length}


def _made(chance: random.Random, family: str) -> dict[str, Any]:
    row: dict[str, Any] = {"model": f"benchmarks/later_steps.py:{family}", "classes": chance.choice((2, 10, 100))}
    if family in MLPS:
        features = chance.choice((40, 100, 256, 784))
        sizes = {"width": chance.choice((128, 200, 256, 512, 1024, 2048)), "depth": chance.randint(2, 8)}
        batch = chance.choice((64, 256, 1000, 4096, 16384))
        return {**row, "input": [features], "settings": {"features": features, **sizes}, "batch": batch}
    shape = {"temporal": (chance.choice((1, 12)), chance.choice((256, 1000, 2048))),
             "upscaling": (3, *[chance.choice((32, 48, 64, 96))] * 2),
             "generator": (100, *[chance.choice((4, 7))] * 2)}[family]  # fmt: skip
    sizes = {"width": chance.choice((32, 64, 96, 128) if family != "generator" else (256, 512)),
             "depth": chance.randint(3, 8) if family != "generator" else chance.randint(3, 5)}  # fmt: skip
    return {**row, "input": list(shape), "settings": {"channels": shape[0], **sizes}}


def drawn(family: str, number: int) -> dict[str, Any] | None:
    """One run of a family: each has a source of chance of its own. `None` where the model does not run."""
    chance = random.Random(f"{SEED} {family} {number}")
    ways = {"opt": chance.choice(OPTIMIZERS), "precision": chance.choice(PRECISIONS)}
    make = _image if family in IMAGES else _text if family in TEXT else _made
    return with_batch(make(chance, family) | ways, chance, chance.random() < 0.5, f"later-{family}-{number}", family)


def short_known_runs(count: int) -> list[dict[str, Any]]:
    """Generated networks of families for the fit, whose steps take a few milliseconds."""
    chance, found = random.Random(f"{SEED} short"), []
    several = {kind: generate(kind, 200, 11, DEFAULTS[kind]) for kind in ("mlp", "transformer")}
    while len(found) < count:
        row = next(several[("mlp", "mlp", "transformer")[len(found) % 3]])
        if not is_for_testing(family_of(row).name):
            ways = {"opt": chance.choice(OPTIMIZERS), "precision": chance.choice(PRECISIONS)}
            found.append({**row, **ways, "batch": min(row["batch"], 4), "id": f"known-{len(found):02d}"})
    return found


def middle(readings: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Of the readings of a run the one with the middle step.

    >>> middle([{"step_s": 3.0}, {"step_s": 1.0}, {"step_s": 2.0}])
    {'step_s': 2.0}
    """
    return sorted(readings, key=lambda row: row["step_s"])[(len(readings) - 1) // 2]


def write_middle(measured: Path, out: Path) -> None:
    """The header of a file of readings, and of each run the middle reading; runs that failed are left out."""
    lines = [json.loads(line) for line in measured.read_text().splitlines()]
    readings: dict[str, list[dict[str, Any]]] = {}
    for line in lines:
        if "step_s" in line:
            readings.setdefault(line["id"].partition("#")[0], []).append(line)
    kept = [line for line in lines if "header" in line]
    kept += [{**middle(several), "id": name} for name, several in readings.items()]
    out.write_text("".join(json.dumps(line) + "\n" for line in kept))


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path)
    parser.add_argument(
        "--middle", type=Path, metavar="MEASURED", help="write the middle readings of this file instead"
    )
    options = parser.parse_args()
    if options.middle:
        write_middle(options.middle, options.runs)
        return
    rows = runs_of([*IMAGES, *TEXT], 2, drawn) + runs_of([*CNNS, *MLPS], 3, drawn)
    every = rows + known_runs(10) + short_known_runs(12)
    chance = random.Random(SEED)
    lines = []
    for turn in range(READINGS):
        for row in chance.sample(every, len(every)):
            lines.append({**row, "id": f"{row['id']}#{turn}"})
    options.runs.write_text("".join(json.dumps(line) + "\n" for line in lines))
    print(f"{len(rows)} runs, {len(every) - len(rows)} others, {len(lines)} readings", file=sys.stderr)


if __name__ == "__main__":
    main()
