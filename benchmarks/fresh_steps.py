"""Draws training runs of families that no fit and no earlier test has seen: to measure how long their steps take.

    python benchmarks/fresh_steps.py runs.jsonl sets.jsonl
    ullage dataset measure runs.jsonl --out fresh.jsonl --utilization --seconds 0.5 --workers 20     # needs a GPU
    ullage measure together sets.jsonl --out fresh_together.jsonl --seconds 0.7                      # needs a GPU

`runs.jsonl` has real CNNs, Transformers and MLPs, and networks that are made here and in `fresh_networks.py`, some of
them compiled; and a few runs of families for the fit, which say how fast the host is. `sets.jsonl` has pairs of such
jobs, each job alone several times between them, and some pairs twice. The seed is no setting: a list that was looked at
is used up.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parent))
import fresh_networks
from ullage.research.datasets.generate import DrawingLimits
from ullage.research.datasets.model_families import family_of, is_for_testing
from ullage.research.datasets.real_models import counted, draw_real
from ullage.units import GIB

SEED = "20261117 steps"
MEMORY, SHORTEST, LONGEST = 14 * GIB, 0.008, 0.05
BATCHES = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
OPTIMIZERS = ("adamw", "adamw", "adam", "sgdm", "sgdm", "sgd", "adamw_fused", "rmsprop")
PRECISIONS = ("fp32", "tf32", "amp_bf16", "amp_bf16", "amp_fp16", "bf16")
VISION = {
    "vovnet": ("ese_vovnet19b_dw", "ese_vovnet39b"), "mixnet": ("mixnet_s", "mixnet_m"),
    "gernet": ("gernet_s", "gernet_m"), "selecsls": ("selecsls42b",), "hgnet": ("hgnet_tiny", "hgnetv2_b1"),
    "starnet": ("starnet_s1", "starnet_s3"), "mambaout": ("mambaout_femto",), "mobileone": ("mobileone_s1",),
    "davit": ("davit_tiny",), "nest": ("nest_tiny",), "crossvit": ("crossvit_tiny_240", "crossvit_small_240"),
    "convit": ("convit_tiny",), "pit": ("pit_xs_224", "pit_s_224"), "hiera": ("hiera_tiny_224",),
}  # fmt: skip
_BERT = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
# Class, its configuration, and how that names hidden size, layers, heads and the width between.
TEXT = {
    "gemma": ("GemmaForCausalLM", "Gemma", _BERT), "falcon": ("FalconForCausalLM", "Falcon", _BERT),
    "cohere": ("CohereForCausalLM", "Cohere", _BERT), "mpnet": ("MPNetForMaskedLM", "MPNet", _BERT),
    "roformer": ("RoFormerForMaskedLM", "RoFormer", _BERT), "convbert": ("ConvBertForMaskedLM", "ConvBert", _BERT),
    "xglm": ("XGLMForCausalLM", "XGLM", ("d_model", "num_layers", "attention_heads", "ffn_dim")),
    "mpt": ("MptForCausalLM", "Mpt", ("d_model", "n_layers", "n_heads", None)),
}  # fmt: skip
SHAPES = ((256, 4, 4), (384, 6, 6), (512, 8, 8), (768, 8, 12), (1024, 8, 16))
NETWORKS = ("unet", "waves", "volumes", "oblong", "inverted")
MLPS = ("tabular", "gated", "autoencoder", "experts")


class Block(nn.Module):
    """What a body adds to its input, after a norm."""

    def __init__(self, width: int, body: nn.Module, norm: type[nn.Module]) -> None:
        super().__init__()
        self.norm, self.body = norm(width), body

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        """The sum."""
        added: torch.Tensor = value + self.body(self.norm(value))
        return added


class Gated(nn.Module):
    """Two products, one of which opens and shuts the other, and a third one."""

    def __init__(self, width: int, middle: int) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(width, middle), nn.Linear(width, middle), nn.Linear(middle, width)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        """As wide as the input."""
        out: torch.Tensor = self.down(nn.functional.silu(self.gate(value)) * self.up(value))
        return out


class Experts(nn.Module):
    """Several networks side by side, by batched products, weighed by a gate."""

    def __init__(self, width: int, middle: int, count: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, count)
        self.first = nn.Parameter(torch.randn(count, width, middle) * width**-0.5)
        self.second = nn.Parameter(torch.randn(count, middle, width) * middle**-0.5)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        """As wide as the input."""
        weights = self.gate(value).softmax(-1).t().unsqueeze(-1)
        inner = torch.bmm(value.expand(len(self.first), *value.shape), self.first)
        return (weights * torch.bmm(nn.functional.gelu(inner), self.second)).sum(0)


def tabular(features: int, width: int, depth: int, num_classes: int) -> nn.Module:
    """A residual network over columns of a table, with batch norms and dropout."""

    def body() -> nn.Module:
        return nn.Sequential(nn.Linear(width, 2 * width), nn.ReLU(), nn.Dropout(0.1), nn.Linear(2 * width, width))

    blocks = [Block(width, body(), nn.BatchNorm1d) for _ in range(depth)]
    return nn.Sequential(nn.Linear(features, width), *blocks, nn.Linear(width, num_classes))


def gated(features: int, width: int, depth: int, num_classes: int) -> nn.Module:
    """Gated blocks with layer norms."""
    blocks = [Block(width, Gated(width, 8 * width // 3), nn.LayerNorm) for _ in range(depth)]
    return nn.Sequential(nn.Linear(features, width), *blocks, nn.Linear(width, num_classes))


def autoencoder(features: int, width: int, depth: int, num_classes: int) -> nn.Module:
    """Down to a few numbers and up again, then classes."""
    down = [max(8, width >> place) for place in range(depth)]
    widths = [features, *down, *down[-2::-1], features]
    layers = [nn.Sequential(nn.Linear(a, b), nn.Tanh()) for a, b in zip(widths, widths[1:], strict=False)]
    return nn.Sequential(*layers, nn.Linear(features, num_classes))


def experts(features: int, width: int, depth: int, num_classes: int) -> nn.Module:
    """Blocks of four experts each."""
    blocks = [Block(width, Experts(width, 2 * width, 4), nn.LayerNorm) for _ in range(depth)]
    return nn.Sequential(nn.Linear(features, width), *blocks, nn.Linear(width, num_classes))


def _image(chance: random.Random, family: str) -> dict[str, Any]:
    name = chance.choice(VISION[family])
    side = 240 if family == "crossvit" else 224 if family_of({"model": f"timm:{name}"}).kind == "transformer" else None
    side = side or chance.choice((96, 128, 160, 192, 224, 224, 256))
    return {"model": f"timm:{name}", "input": [3, side, side], "channels_last": chance.random() < 0.2}


def _text(chance: random.Random, family: str) -> dict[str, Any]:
    name, configuration, (hidden, layers, heads, middle) = TEXT[family]
    size, depth, count = chance.choice(SHAPES)
    length, vocabulary = chance.choice((64, 128, 256, 384, 512, 1024)), chance.choice((8_000, 30_522, 32_000))
    settings: dict[str, Any] = {"vocab_size": vocabulary, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    settings |= {hidden: size, layers: depth, heads: count}
    if middle:
        settings[middle] = size * chance.choice((3, 4))
    if family in ("gemma", "cohere"):
        settings["num_key_value_heads"] = chance.choice((count, count // 2))
    if family == "gemma":
        settings["head_dim"] = size // count
    if family in ("mpnet", "roformer", "convbert", "xglm"):
        settings["max_position_embeddings"] = max(512, length + 8)
    if family in ("roformer", "convbert"):
        settings["embedding_size"] = size
    if family == "mpt":
        settings["max_seq_len"] = max(512, length)
    attention = {"attn": chance.choice(("sdpa", "eager"))} if family in ("gemma", "cohere", "falcon") else {}
    return {"model": f"hf:{name}", "conf": configuration, "hf_config": settings, "vocab": vocabulary, "seq": length,
            **attention}  # fmt: skip


def _mlp(chance: random.Random, family: str) -> dict[str, Any]:
    features, classes = chance.choice((40, 100, 256, 784, 1000)), chance.choice((2, 10, 100, 1000))
    width, depth = chance.choice((128, 200, 256, 384, 512, 768, 1024, 1500, 2048)), chance.randint(2, 8)
    depth = min(depth, 5) if family == "autoencoder" else depth
    return {"model": f"benchmarks/fresh_steps.py:{family}", "input": [features], "classes": classes,
            "settings": {"features": features, "width": width, "depth": depth},
            "batch": chance.choice((64, 256, 1000, 1024, 4096, 8192, 16384))}  # fmt: skip


def drawn(family: str, number: int) -> dict[str, Any] | None:
    """One run of a family: each has a source of chance of its own. `None` where the model does not run."""
    chance = random.Random(f"{SEED} {family} {number}")
    ways = {"opt": chance.choice(OPTIMIZERS), "precision": chance.choice(PRECISIONS)}
    busy = chance.random() < 0.6
    if family in NETWORKS:
        place = list(fresh_networks.FAMILIES).index(family) + len(fresh_networks.FAMILIES) * chance.randrange(10**6)
        row = {key: value for key, value in fresh_networks.drawn(place).items() if key not in ("id", "odd", "family")}
        row |= ways
    elif family in MLPS:
        row = _mlp(chance, family) | ways
    else:
        row = (_text if family in TEXT else _image)(chance, family) | ways
    return with_batch(row, chance, busy, f"fresh-{family}-{number:02d}", family)


def with_batch(row: dict[str, Any], chance: random.Random, busy: bool, name: str, family: str) -> dict[str, Any] | None:
    """The run with a batch that fits, and if it shall be `busy` with one that takes long enough; `None` for none."""
    cost = counted({**row, "batch": 2})
    if cost is None:
        return None
    precision = "bf16" if row["precision"] == "tf32" else row["precision"]
    convolves = family_of(row).kind == "cnn"
    fitting = [
        batch for batch in ([row["batch"]] if "batch" in row else BATCHES)
        if cost.process(batch, row["opt"], row["precision"]) <= MEMORY
        and cost.seconds(batch, precision, convolves) <= LONGEST
    ]  # fmt: skip
    if not fitting:
        return None
    long = [batch for batch in fitting if cost.seconds(batch, precision, convolves) >= SHORTEST]
    row["batch"] = chance.choice(long or fitting[-1:]) if busy else chance.choice(fitting)
    return {
        "id": name, "family": family_of(row).kind, "arch": family, **row,
        "parameters": cost.parameters, "need": cost.memory(row["batch"], row["opt"], row["precision"]),
        "guess": cost.process(row["batch"], row["opt"], row["precision"]),
    }  # fmt: skip


def runs_of(
    families: Sequence[str], each: int, draw: Callable[[str, int], dict[str, Any] | None] = drawn
) -> list[dict[str, Any]]:
    """So many runs of each family."""
    found = []
    for family in families:
        rows = [row for number in range(3 * each) if (row := draw(family, number)) is not None][:each]
        print(f"{family}: {len(rows)} runs", file=sys.stderr)
        found += rows
    return found


def known_runs(count: int) -> list[dict[str, Any]]:
    """Runs of families for the fit, most of which wait for their host."""
    found: list[dict[str, Any]] = []
    limits = DrawingLimits(memory=8 * GIB, seconds=0.03)
    number = 0
    while len(found) < count:
        row = draw_real(number, 77, limits)
        number += 1
        if not is_for_testing(family_of(row).name) and row["opt"] != "adafactor":
            found.append(row)
    return found


def sets_of(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """28 jobs, 48 pairs of them, eight of these a second time, and every job alone at the beginning and the end."""
    chance = random.Random(f"{SEED} sets")
    small = [row for row in rows if row["guess"] <= 5 * GIB and not row.get("compiled")]
    by_kind = {kind: [row for row in small if row["family"] == kind] for kind in ("cnn", "transformer", "mlp")}
    jobs = [row for kind, several in by_kind.items() for row in chance.sample(several, 8 if kind == "mlp" else 10)]
    names = [row["id"] for row in jobs]
    pairs: list[tuple[str, str]] = []
    while len(pairs) < 48:
        order = chance.sample(names, len(names))
        pairs += zip(order[::2], order[1::2], strict=False)
    sets = [{"set": f"pair-{number:02d}", "jobs": list(pair)} for number, pair in enumerate(pairs[:48])]
    sets += [{"set": f"again-{number:02d}", "jobs": list(pair)} for number, pair in enumerate(pairs[:8])]
    alone = [{"set": f"alone-{name}", "jobs": [name]} for name in names]
    return [*jobs, *sets, *alone]


def compiled_runs(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Some of the runs once more, compiled."""
    chance = random.Random(f"{SEED} compiled")
    wanted = []
    for kind, count in (("cnn", 6), ("transformer", 6), ("mlp", 4)):
        some = [row for row in rows if row["family"] == kind and row["parameters"] < 60e6]
        wanted += chance.sample(some, count)
    return [{**row, "id": f"{row['id']}-compiled", "compiled": True} for row in wanted]


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path)
    parser.add_argument("sets", type=Path)
    options = parser.parse_args()
    rows = runs_of(tuple(VISION), 3) + runs_of(tuple(TEXT), 4) + runs_of(NETWORKS, 3) + runs_of(MLPS, 6)
    random.Random(SEED).shuffle(rows)
    every = rows[:]
    for place, row in enumerate(known_runs(16)):
        every.insert(7 * place, row)
    every += compiled_runs(rows)
    for path, lines in ((options.runs, every), (options.sets, sets_of(rows))):
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    print(f"{len(rows)} runs, {len(every) - len(rows)} others", file=sys.stderr)


if __name__ == "__main__":
    main()
