"""Draws training runs that wait for their host, of many families none of which is kept for testing.

    python benchmarks/host_runs.py runs.jsonl
    ullage dataset measure runs.jsonl --out host.jsonl --utilization --seconds 0.2 --workers 20     # needs a GPU
    ullage dataset clean host.jsonl --out host_h200.parquet

What the host takes for a step does not depend on the batch, so batches are small; those of images are larger, so that
the time on the GPU says something, too. One model of each family of timm, Transformers of many classes, recurrent
networks, and generated ones. Every beginning of the list is a fair sample. Takes some minutes.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ullage.research.datasets.generate import DEFAULTS, generate
from ullage.research.datasets.model_families import family_of, is_for_testing
from ullage.research.datasets.real_models import counted
from ullage.research.measure.drawing import draw_t5, draw_transformer, names_of, native_side
from ullage.research.rates.rarer_models import rarer_runs

SEED = "host 1"
BATCHES = (2, 3, 4, 8)
OPTIMIZERS = ("adamw", "adamw", "adam", "sgdm", "sgdm", "sgd", "adamw_fused", "rmsprop", "adagrad", "adamw_single")
PRECISIONS = ("fp32", "tf32", "amp_bf16", "amp_bf16", "amp_fp16", "bf16")
PARAMETERS, SIDE, NEED = 60_000_000, 256, 6 * 2**30
TORCHVISION = (
    "mnasnet0_5",
    "regnet_y_400mf",
    "shufflenet_v2_x1_0",
    "squeezenet1_1",
    "swin_t",
    "vgg11",
    "convnext_tiny",
)
# Nearly a family for testing under another name, or too much for a step.
LEFT_OUT = ("resne", "botnet", "test_", "samvit", "nasnetalarge", "pnasnet", "senet", "legacy_se")
_BERT = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
# Class, the name of its configuration, and how that names hidden size, layers, heads and the width between.
TEXT: tuple[tuple[str, str, tuple[str, str, str, str | None]], ...] = (
    ("OPTForCausalLM", "OPT", ("hidden_size", "num_hidden_layers", "num_attention_heads", "ffn_dim")),
    ("NystromformerForMaskedLM", "Nystromformer", _BERT), ("SqueezeBertForMaskedLM", "SqueezeBert", _BERT),
    ("RemBertForMaskedLM", "RemBert", _BERT), ("MegatronBertForMaskedLM", "MegatronBert", _BERT),
    ("IBertForMaskedLM", "IBert", _BERT), ("GlmForCausalLM", "Glm", _BERT), ("ErnieForMaskedLM", "Ernie", _BERT),
    ("HeliumForCausalLM", "Helium", _BERT), ("EsmForMaskedLM", "Esm", _BERT), ("MixtralForCausalLM", "Mixtral", _BERT),
    ("BigBirdForMaskedLM", "BigBird", _BERT), ("MobileBertForMaskedLM", "MobileBert", _BERT),
    ("OpenAIGPTLMHeadModel", "OpenAIGPT", ("n_embd", "n_layer", "n_head", None)),
    ("FunnelForMaskedLM", "Funnel", ("d_model", "num_decoder_layers", "n_head", "d_inner")),
)  # fmt: skip
SHAPES = ((128, 2, 2), (256, 4, 4), (384, 6, 6), (512, 8, 8))


def image_runs(chance: random.Random) -> Iterator[dict[str, Any]]:
    """One model of each family of timm, and some of torchvision's."""
    families: dict[str, list[str]] = {}
    for name in names_of("timm"):
        family = family_of({"model": f"timm:{name}"}).name
        if not is_for_testing(family) and not any(word in name for word in LEFT_OUT) and native_side(name) <= SIDE:
            families.setdefault(family, []).append(f"timm:{name}")
    several = [*families.values(), *([f"tv:{name}"] for name in TORCHVISION)]
    chance.shuffle(several)
    for names in several:
        for model in chance.sample(names, min(6, len(names))):
            side = native_side(model[5:]) if model.startswith("timm:") else 224
            row = _trained(chance, {"model": model, "input": [3, side, side], "channels_last": chance.random() < 0.2})
            if row is not None:
                yield row
                break


def text_runs(chance: random.Random) -> Iterator[dict[str, Any]]:
    """Transformers by their class, with few layers and short texts."""
    for name, configuration, (hidden, layers, heads, middle) in chance.sample(TEXT, len(TEXT)):
        size, depth, count = chance.choice(SHAPES)
        settings: dict[str, Any] = {"vocab_size": 8000, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
        settings |= {hidden: size, layers: depth, heads: count, **({middle: 3 * size} if middle else {})}
        row = {"model": f"hf:{name}", "conf": configuration, "hf_config": settings, "vocab": 8000}
        found = _trained(chance, row | {"seq": chance.choice((64, 128))})
        if found is not None:
            yield found
    seen: dict[str, int] = {}
    for number in range(400):
        row = draw_t5(chance) if number % 20 == 0 else draw_transformer(chance)
        model = row["model"]
        if _is_test(row) or row["seq"] > 256 or seen.get(model, 0) == 2:
            continue
        found = _trained(chance, row | {"ckpt": chance.random() < 0.1})
        if found is not None:
            seen[model] = seen.get(model, 0) + 1
            yield found


def made_runs(chance: random.Random) -> Iterator[dict[str, Any]]:
    """Generated MLPs, most of all, CNNs and Transformers, and networks with operators that are seldom called."""
    several = {kind: generate(kind, 400, 5, DEFAULTS[kind]) for kind in ("mlp", "cnn", "transformer")}
    rarer = [row for row in rarer_runs(16, 5) if not _is_test(row)]
    for number in range(48):
        kind = ("mlp", "mlp", "cnn", "mlp", "transformer")[number % 5]
        row = rarer.pop() if number % 6 == 5 else next(row for row in several[kind] if not _is_test(row))
        found = _trained(chance, {**row, "batch": min(row["batch"], chance.choice((8, 32, 64)))})
        if found is not None:
            yield found


def _is_test(row: dict[str, Any]) -> bool:
    return is_for_testing(family_of(row).name)


def _trained(chance: random.Random, row: dict[str, Any]) -> dict[str, Any] | None:
    """The run with a batch, an optimizer and a precision; `None` where the model is too large or does not run."""
    ways = {"opt": chance.choice(OPTIMIZERS), "precision": chance.choice(PRECISIONS)}
    few = chance.choice(BATCHES)
    row = {"batch": 4 * few if "channels_last" in row else few, **row, **ways}
    cost = counted(row)
    if cost is None or cost.parameters > PARAMETERS:
        return None
    need = cost.memory(row["batch"], row["opt"], row["precision"])
    kind = family_of(row)
    return {"family": kind.kind, **row, "parameters": cost.parameters, "need": need} if need < NEED else None


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    options = parser.parse_args()
    chance = random.Random(SEED)
    kinds = [list(make(chance)) for make in (image_runs, text_runs, made_runs)]
    for several in kinds:
        chance.shuffle(several)
    turns = itertools.zip_longest(*(_spread(several, max(map(len, kinds))) for several in kinds))
    rows = [row for some in turns for row in some if row is not None]
    with options.out.open("w") as file:
        for number, row in enumerate(rows):
            file.write(json.dumps({**row, "id": f"host-1-{number:03d}"}) + "\n")
    print({name: len(several) for name, several in zip(("images", "text", "made"), kinds, strict=True)})


def _spread(several: list[dict[str, Any]], length: int) -> list[dict[str, Any] | None]:
    """So long a list, with these at equal distances."""
    places = {number * length // len(several): one for number, one in enumerate(several)}
    return [places.get(number) for number in range(length)]


if __name__ == "__main__":
    main()
