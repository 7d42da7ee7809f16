"""Draws runs that were read once, to be read again with care: those for testing, and some that wait for their host.

    python benchmarks/careful_steps.py runs.jsonl
    ullage dataset measure runs.jsonl --out careful.jsonl --utilization --seconds 0.2 --readings 3     # needs a GPU
    ullage dataset clean careful.jsonl --out careful_steps_h200.parquet

The first are all runs of `data/utilization_h200.parquet` that `ullage evaluate utilization` judges. Others belong to
families for the fit: runs of all lengths, which say how fast the host is, and small networks that are compiled. What a
run takes of the GPU's memory is known from its first reading, so that many are ready at once. The order is drawn, those
that are compiled first: a session that ends early has read a fair sample.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ullage.performance.rates import load
from ullage.research.datasets.generate import DEFAULTS, generate
from ullage.research.datasets.measuring import MARGIN, need
from ullage.research.datasets.model_families import family_of, is_for_testing
from ullage.research.training.protocol import read_rows
from ullage.research.training.utilization.judging import of_one_host
from ullage.research.training.utilization.runs import read_alone

DATA = Path(__file__).parent / "data"
SEED = "20261118 careful"
WAITING, EACH = 0.6, 11
FORMS = {"mlp": 3, "cnn": 6, "transformer": 3}
TEXT = (
    ("BertForMaskedLM", "Bert"), ("GPT2LMHeadModel", "GPT2"), ("LlamaForCausalLM", "Llama"), ("OPTForCausalLM", "OPT"),
)  # fmt: skip
_NAMES = {"GPT2": ("n_embd", "n_layer", "n_head", "n_inner"), "OPT": ("hidden_size", "num_hidden_layers",
          "num_attention_heads", "ffn_dim")}  # fmt: skip
_USUAL = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")


def as_line(row: dict[str, Any]) -> dict[str, Any]:
    """A row of a data set as a line to measure, with the memory that it took."""
    line = json.loads(row["configuration"]) | {name: row[name] for name in ("id", "arch", "parameters", "family")}
    taken = 1.1 * row["peak_reserved"]
    share = need({**line, "need": 10**9}) - MARGIN
    return {**line, "need": max(0, round((taken - MARGIN) * 1e9 / share))}


def tested() -> list[dict[str, Any]]:
    """The runs that are judged."""
    rows = {str(row["id"]): row for row in read_rows(DATA / "utilization_h200.parquet")}
    judged = of_one_host([run for run in read_alone(list(rows.values())) if run.is_test], load())
    return [as_line(rows[run.id]) for run in judged]


def waiting(chance: random.Random) -> list[dict[str, Any]]:
    """Runs of families for the fit that wait for their host: of each kind so many, short ones and long ones."""
    rows = {str(row["id"]): row for name in ("host", "utilization") for row in read_rows(DATA / f"{name}_h200.parquet")}
    known = [
        run for run in read_alone(list(rows.values()))
        if not run.is_test and run.gpu_s < WAITING * run.step_s and '"adafactor"' not in rows[run.id]["configuration"]
    ]  # fmt: skip
    found = []
    for kind in ("cnn", "other", "transformer", "mlp"):
        several = sorted((run for run in known if run.kind == kind), key=lambda run: run.step_s)
        parts = [several[len(several) * place // EACH : len(several) * (place + 1) // EACH] for place in range(EACH)]
        found += [as_line(rows[chance.choice(part).id]) for part in parts]
    return found


def compiled(chance: random.Random) -> Iterator[dict[str, Any]]:
    """Small networks of families for the fit that are compiled: larger ones take minutes for it."""
    for kind, count in FORMS.items():
        several = (row for row in generate(kind, 400, 17, DEFAULTS[kind]) if not is_for_testing(family_of(row).name))
        for _ in range(count):
            row = next(several)
            settings = row["settings"]
            if kind == "cnn":
                row["input"] = [row["input"][0], 32, 32]
                size = chance.randint(3, 6)
                settings |= {"filters": settings["filters"][:size], "kernels": settings["kernels"][:size], "down": [2]}
            if kind == "transformer":
                settings |= {"layers": chance.randint(2, 4), "vocabulary": 8000}
            yield {**row, "batch": min(row["batch"], 8), "classes": 10}
    for model, configuration in TEXT:
        names = _NAMES.get(configuration, _USUAL)
        sizes = dict(zip(names, (chance.choice((128, 256)), chance.randint(2, 4), 4, 512), strict=True))
        settings = {"vocab_size": 8000, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, **sizes}
        yield {"model": f"hf:{model}", "conf": configuration, "hf_config": settings, "vocab": 8000, "seq": 64,
               "batch": 4, "family": "transformer", "parameters": 10**7, "need": 2**29}  # fmt: skip


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path)
    options = parser.parse_args()
    chance = random.Random(SEED)
    ways = [{"opt": opt, "precision": how} for opt in ("adamw", "sgdm") for how in ("fp32", "amp_bf16", "bf16", "tf32")]
    first = [
        {**row, **ways[number % len(ways)], "compiled": True, "id": f"careful-compiled-{number:02d}", "need": 2**29}
        for number, row in enumerate(compiled(chance))
    ]
    rest = tested() + waiting(chance)
    chance.shuffle(rest)
    options.runs.write_text("".join(json.dumps(row) + "\n" for row in [*first, *rest]))
    print(f"{len(rest)} runs, {len(first)} that are compiled")


if __name__ == "__main__":
    main()
