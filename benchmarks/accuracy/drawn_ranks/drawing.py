"""Which trainings there are, at random."""

from __future__ import annotations

import random

from drawn_ranks.models import Row

GIB = 1 << 30
_SHAPES = (  # width, layers, heads, groups, middle
    (768, 12, 12, 12, 3072),
    (1024, 16, 16, 8, 2816),
    (1280, 20, 20, 20, 5120),
    (1536, 24, 16, 8, 4096),
    (2048, 16, 32, 8, 8192),
    (2048, 24, 16, 16, 5504),
    (2560, 32, 32, 8, 6912),
    (3072, 28, 24, 8, 8192),
    (4096, 16, 32, 8, 11008),
    (4096, 32, 32, 8, 14336),
)
STRATEGIES = ("fsdp2", "fsdp1", "tp", "fsdp2+tp", "hsdp", "ddp")
_SHARES = (32, 22, 14, 12, 8, 12)
MOST = 60 * GIB


def draw(count: int, seed: int, most: int = MOST, only: str | None = None, limited: float = 0.8) -> list[Row]:
    """So many random trainings that take about `most` bytes or less; the same seed draws the same."""
    chance = random.Random(seed)
    rows: list[Row] = []
    while len(rows) < count:
        row = _one(chance, limited)
        if row is not None and rough_need(row) <= most and only in (None, row["strategy"]):
            rows.append({"id": f"r{seed}n{len(rows):03d}", **row})
    return rows


def _one(chance: random.Random, limited: float) -> Row | None:
    strategy = chance.choices(STRATEGIES, _SHARES)[0]
    own = "tp" in strategy
    model = "own" if own else chance.choice(("own", "llama", "qwen2", "gpt2"))
    width, layers, heads, groups, middle = chance.choice(_SHAPES)
    if model == "gpt2":
        groups, middle = heads, 4 * width
    row: Row = {
        "strategy": strategy,
        "model": model,
        "width": width,
        "layers": layers,
        "heads": heads,
        "groups": groups,
        "middle": middle,
        "vocabulary": chance.choice((32000, 32000, 50257, 50304, 128256)),
        "batch": chance.choice((1, 1, 2, 3, 4, 8)),
        "length": chance.choice((256, 512, 1024, 2048)),
        "ranks": 1 if strategy == "ddp" else chance.choice((2, 3, 4, 6, 8, 8, 16, 24, 32, 64)),
        "checkpointing": chance.random() < 0.35,
        "optimizer": chance.choice(("adamw", "adamw", "adamw_fused", "sgdm")),
        "accumulation": chance.choice((1, 1, 1, 2)),
        "clip": chance.random() < 0.4,
        "reads_loss": chance.random() < 0.4,
        "offload": False,
        "made_on": chance.choice(("cpu", "meta", "cuda")),
        "precision": "fp32",
    }
    if strategy == "ddp":
        row |= {
            "made_on": "cuda",
            "precision": chance.choice(("fp32", "autocast", "pure_bf16")),
            "bucket_mb": chance.choice((None, None, 10, 100)),
            "bucket_views": chance.random() < 0.5,
            "static_graph": chance.random() < 0.2,
            "find_unused": chance.random() < 0.2,
            "hook": chance.choice((None, None, None, "fp16", "bf16", "powersgd")),
        }
        if row["static_graph"]:
            row["find_unused"] = False
    elif strategy == "tp":
        split = chance.choice((2, 4, 8))
        if groups % split:
            return None
        row |= {"ranks": split, "precision": chance.choice(("fp32", "autocast", "pure_bf16"))}
    else:
        row |= {"precision": chance.choice(("fp32", "bf16", "mixed", "mixed", "pure_bf16", "autocast"))}
        row |= {"offload": chance.random() < 0.15, "prefetch": chance.random() < 0.3}
    if strategy in ("fsdp2", "hsdp", "fsdp2+tp"):
        row["reshard"] = chance.choice((True, True, True, False))
    if strategy == "hsdp":
        copies = [copies for copies in (2, 3, 4, 8) if row["ranks"] % copies == 0 and row["ranks"] > copies]
        if not copies:
            return None
        row["copies"] = chance.choice(copies)
    if strategy == "fsdp2+tp":
        split = chance.choice((2, 4, 8))
        if groups % split or row["ranks"] % split or row["ranks"] == split:
            return None
        row["split"] = split
    if own:
        row["sequence_parallel"] = chance.random() < 0.5
        row["clip"] &= row["sequence_parallel"]  # norms of parameters on different meshes cannot be added
    if strategy == "fsdp1":
        row |= {
            "sharding": chance.choice(("FULL_SHARD", "FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD")),
            "backward_prefetch": chance.choice(("pre", "pre", "post", "none")),
            "original_parameters": chance.random() < 0.6,
            "limit_all_gathers": chance.random() < limited,
        }
        if row["offload"] and row["accumulation"] > 1:
            return None
    if row["offload"]:
        row["clip"], row["optimizer"] = False, "adamw"
        if row["made_on"] == "cuda":
            return None
    if row["offload"] and strategy == "fsdp1" and row["made_on"] == "meta":
        return None
    parameters = parameters_of(row)
    if parameters > 9e9 or (row["made_on"] == "cpu" and parameters > 1.6e9):
        return None
    if row["offload"] and parameters / row["ranks"] > 6e8:
        return None
    return row


def draw_pipelines(count: int, seed: int, most: int = MOST) -> list[Row]:
    """So many random ranks of pipelines of about `most` bytes or less: first, middle and last ones of each schedule."""
    chance = random.Random(seed)
    rows: list[Row] = []
    while len(rows) < count:
        schedule, place = ("gpipe", "1f1b", "interleaved")[len(rows) // 3 % 3], len(rows) % 3
        row = _one_of_a_pipeline(chance, schedule, place)
        if rough_need(row) <= most:
            rows.append({"id": f"p{seed}n{len(rows):03d}", **row})
    return rows


def _one_of_a_pipeline(chance: random.Random, schedule: str, place: int) -> Row:
    width, layers, heads, groups, middle = chance.choice([shape for shape in _SHAPES if shape[1] % 16 == 0])
    ranks = chance.choice((4, 8) if place == 1 else (2, 4, 8))
    batches = ranks * chance.choice((1, 2, 3))
    return {
        "strategy": "pp",
        "schedule": schedule,
        "model": "own",
        "width": width,
        "layers": layers,
        "heads": heads,
        "groups": groups,
        "middle": middle,
        "vocabulary": chance.choice((32000, 50304)),
        "batch": batches * chance.choice((1, 1, 2, 4)),
        "length": chance.choice((256, 512, 1024)),
        "ranks": ranks,
        "rank": (0, chance.randint(1, max(ranks - 2, 1)), ranks - 1)[place],
        "microbatches": batches,
        "checkpointing": chance.random() < 0.3,
        "optimizer": chance.choice(("adamw", "adamw_fused", "sgdm")),
        "clip": chance.random() < 0.4,
        "made_on": chance.choice(("cuda", "meta")),
        "precision": chance.choice(("fp32", "autocast", "pure_bf16")),
    }


def parameters_of(row: Row) -> int:
    """About how many parameters the model has."""
    width = row["width"]
    attention = 2 * width * width + 2 * width * width * row["groups"] // row["heads"]
    layer = attention + (2 if row["model"] == "gpt2" else 3) * width * row["middle"]
    return int(row["layers"] * layer + (1 if row["model"] == "gpt2" else 2) * row["vocabulary"] * width)


def rough_need(row: Row) -> int:
    """About how many bytes the training takes; only to know how many can run at once."""
    parameters, strategy = parameters_of(row), row["strategy"]
    share = 1 if strategy == "ddp" or row.get("sharding") == "NO_SHARD" else row["ranks"] // row.get("copies", 1)
    states = 16 * parameters / share + (6 * parameters if row.get("reshard") is False else 0)
    if row["made_on"] == "cuda" or row.get("sharding") in ("SHARD_GRAD_OP", "NO_SHARD") or strategy == "ddp":
        states += 8 * parameters
    split = row["ranks"] if strategy == "tp" else row.get("split", 1)
    tokens = row["batch"] * row["length"]
    layer = 34 * tokens * row["width"] * 2 / split**0.5
    layers = row["layers"] // (row["ranks"] if strategy == "pp" else 1)
    activations = layer * (3 if row["checkpointing"] else layers) + tokens * row["vocabulary"] * 16
    return int(1.3 * (states + activations) + 3 * GIB)
