"""The published A100-40GB measurements as runs: 40 models in two campaigns, and timm models at five batch sizes.

Their truth is the whole GPU's `memory.used`, sampled once a second, so it has the CUDA context in it and can miss a
short peak. The tables name a model and a batch size; what else a run needs is assumed here and said in the notes.
"""

from __future__ import annotations

import csv
from collections import Counter
from pathlib import Path
from typing import Any

from ullage.errors import InvalidValue
from ullage.measure.ranking_worker import Record
from ullage.measure.truth import Run, TruthSet
from ullage.units import MIB
from ullage.workload.names import model_names

CLIPPED_MIB = 38_000  # of 40,960: above, runs pile up at the card's end, so the card and not the model set the figure
TIMM_OPTIMIZER = "adam"  # the table names none; of the usual ones it comes nearest to the truth of six models
CAMPAIGNS = {"May 2025": "actual_mib_2025_05", "September 2025": "actual_mib_2025_09"}

# Columns of estimates: the estimator, and what its figure is compared with.
_PUBLISHED = {
    "horus_mib": ("horus", "process"),
    "faketensor_mib": ("faketensor", "allocated"),
    "gpumemnet_mib": ("gpumemnet", "process"),
}
_CAPPED_MIB = 40_000.0  # stands where an estimate was cut off or missing

_BERT = {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072}
_BERT_LARGE = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}
_GPT2_XL = {"n_embd": 1600, "n_layer": 48, "n_head": 25}

# Names of the table: what they are here. Those that are missing have code or inputs that the table does not tell.
_MODELS: dict[str, dict[str, Any]] = {
    "vgg16": {"model": "torchvision:vgg16"},
    "resnet50": {"model": "torchvision:resnet50"},
    "xception": {"model": "timm:legacy_xception"},
    "mobilenet_v2": {"model": "torchvision:mobilenet_v2"},
    "efficientnet_b0": {"model": "torchvision:efficientnet_b0"},
    "inception_v3": {"model": "torchvision:inception_v3"},
    "bert_base": {"model": "hf:BertForMaskedLM", "conf": "Bert", "hf_config": _BERT, "vocab": 30522},
    "bert_large": {"model": "hf:BertForMaskedLM", "conf": "Bert", "hf_config": _BERT_LARGE, "vocab": 30522},
    "gpt2_xl": {"model": "hf:GPT2LMHeadModel", "conf": "GPT2", "hf_config": _GPT2_XL, "vocab": 50257},
    "efficientNet_cifar100": {"model": "torchvision:efficientnet_b0", "classes": 100},
    "resnet18_cifar100": {"model": "torchvision:resnet18", "classes": 100},
    "resnet34_cifar100": {"model": "torchvision:resnet34", "classes": 100},
}
_WHOLE_GPU = "the truth is the whole GPU's memory.used, sampled once a second: everything is compared with that"


def read_a100(file: Path, gpu: str) -> list[TruthSet]:
    """The runs of one of the published tables, told apart by their columns."""
    try:
        with file.open(newline="") as lines:
            rows = list(csv.DictReader(lines))
    except OSError as error:
        raise InvalidValue(f"cannot read {file}: {error.strerror}") from None
    columns = set(rows[0]) if rows else set()
    if {"model", "batch_size", *CAMPAIGNS.values()} <= columns:
        return [_campaign(rows, name, column, gpu) for name, column in CAMPAIGNS.items()]
    if {"model", "batch_size", "actual_max_mib"} <= columns:
        return [_timm(rows, gpu)]
    raise InvalidValue(
        f"{file} is no table of measured runs that is known: needed the columns of realworld_a100.csv or "
        f"faketensor_timm_a100.csv; found {', '.join(sorted(columns)) or 'none'}"
    )


def _campaign(rows: list[dict[str, str]], campaign: str, column: str, gpu: str) -> TruthSet:
    runs, published, left_out = [], [], Counter[str]()
    for number, row in enumerate(rows):
        reason = _left_out(row, column)
        if reason:
            left_out[reason] += 1
            continue
        published += _published(row, f"realworld-{number:02d}", gpu)
        runs.append(
            Run(
                id=f"realworld-{number:02d}",
                row=_configuration(row),
                family=row.get("family") or "other",
                process=round(float(row[column]) * MIB),
            )
        )
    notes = [
        _WHOLE_GPU,
        "the two campaigns measured the same runs and disagree: in May 2025 most figures are 1 to 2 GB higher",
        "assumed: fp32, torchvision's models (timm's for xception), BertForMaskedLM and GPT2LMHeadModel at 512 tokens",
    ]
    name = f"realworld, {campaign}"
    return TruthSet(name=name, gpu=gpu, runs=runs, published=published, left_out=dict(left_out), notes=notes)


def _published(row: dict[str, str], run: str, gpu: str) -> list[Record]:
    """The estimates in a row, as far as it has them."""
    found = []
    for column, (name, kind) in _PUBLISHED.items():
        if row.get(column) and float(row[column]) != _CAPPED_MIB:
            figure = round(float(row[column]) * MIB)
            found.append(Record(estimator=f"{name} (published)", run=run, gpu=gpu, figure=figure, kind=kind))
    return found


def _left_out(row: dict[str, str], column: str) -> str | None:
    if not row[column]:
        return "not measured in this campaign"
    if row.get("gpus") not in ("1", "1.0"):
        return "on two GPUs"
    if float(row[column]) >= CLIPPED_MIB:
        return "near the card's end, perhaps clipped"
    return None if row["model"] in _MODELS else "the table does not tell what was run"


def _configuration(row: dict[str, str]) -> dict[str, Any]:
    found = dict(_MODELS[row["model"]], batch=int(row["batch_size"]), opt=row["optimizer"].lower(), precision="fp32")
    if found["model"].startswith("hf:"):
        return found | {"seq": 512}
    return found | {"input": [int(length) for length in row["input"].split()[0].split("x")]}


def _timm(rows: list[dict[str, str]], gpu: str) -> TruthSet:
    names = set(model_names("timm"))
    runs, published, left_out = [], [], Counter[str]()
    for row in rows:
        name = row["model"].partition(".")[0]
        if float(row["actual_max_mib"]) >= CLIPPED_MIB:
            left_out["near the card's end, perhaps clipped"] += 1
        elif name not in names:
            left_out["not a model of the timm that is installed"] += 1
        else:
            published += _published(row, f"{row['model']}-{row['batch_size']}", gpu)
            configuration = {"model": f"timm:{name}", "batch": int(row["batch_size"]), "opt": TIMM_OPTIMIZER}
            runs.append(
                Run(
                    id=f"{row['model']}-{row['batch_size']}",
                    row=configuration | {"precision": "fp32"},
                    family="timm",
                    process=round(float(row["actual_max_mib"]) * MIB),
                )
            )
    notes = [_WHOLE_GPU, f"assumed: fp32, {TIMM_OPTIMIZER}, the input size and classes that each model is made for"]
    return TruthSet(name="timm", gpu=gpu, runs=runs, published=published, left_out=dict(left_out), notes=notes)
