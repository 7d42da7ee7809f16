"""Measured runs for the ranking of estimators: the training, the GPU, and the measured figures."""

import csv
import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ullage.errors import InvalidValue
from ullage.jobs.model import PREFIXES, Model, read_rows
from ullage.jobs.sources.names import model_names
from ullage.units import MIB
from ullage_lab.clean.schema import read_parquet
from ullage_lab.judge.worker import Record

_COLUMNS = ("id", "configuration", "peak_allocated", "peak_reserved", "process_memory", "context")
FAMILIES = {"hf": "transformers", "mlp": "MLPs"}


@dataclass(frozen=True, kw_only=True)
class MeasuredRun:
    """One measured run; sizes are bytes, `None` if not measured.

    `row` is the configuration (with all other values in its file), `history` the file of its allocator's history. If
    the run ran out of memory (`oom`), its figures are those of the attempt, and not compared with estimates.
    """

    id: str
    row: dict[str, Any]
    family: str
    allocated: int | None = None
    reserved: int | None = None
    process: int | None = None
    oom: bool = False
    history: Path | None = None

    @property
    def context(self) -> int | None:
        """Return the process memory outside PyTorch's allocator."""
        return None if self.process is None or self.reserved is None else self.process - self.reserved

    def truth(self, kind: str) -> int | None:
        """Return the measured figure of a kind ("allocated", "reserved", "process"); that of the process by default."""
        value: int | None = getattr(self, kind)
        return self.process if value is None and self.reserved is None else value


@dataclass(frozen=True, kw_only=True)
class TruthSet:
    """The runs of one campaign on one GPU, and the number of omitted runs by reason.

    `published` are estimates in the table, by the authors of an estimator or its critics.
    """

    name: str
    gpu: str
    runs: list[MeasuredRun]
    published: list[Record] = field(default_factory=list)
    left_out: dict[str, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def read_truth(file: Path, gpu: str | None = None) -> list[TruthSet]:
    """Read the runs of a file: one for `measured_rows`, or one of the published A100 tables (CSV).

    A table with two campaigns gives two sets; their runs share ids, so that one estimate serves both.
    """
    if file.suffix == ".csv":
        return read_a100(file, gpu or "A100-40GB")
    runs, without = [], 0
    for number, row in enumerate(measured_rows(file)):
        run = run_of(row, number, file.parent)
        if run.oom or run.process is not None or run.reserved is not None or run.allocated is not None:
            runs.append(run)
        else:
            without += 1
    if not runs:
        raise InvalidValue(f"{file} holds no measured runs")
    left_out = {"nothing was measured": without} if without else {}
    name = gpu or "H200"
    return [TruthSet(name=f"{file.stem} on {name}", gpu=name, runs=runs, left_out=left_out)]


def measured_rows(file: Path) -> list[dict[str, Any]]:
    """Read the runs of a file, as dictionaries: JSONL of `ullage measure` or `ullage lab measure dataset`, without
    headers, or a data set of `ullage lab data clean` (Parquet).
    """
    if file.suffix != ".parquet":
        return [row for row in read_rows(file) if "header" not in row]
    return [_of_dataset(row) for row in read_parquet(file, _COLUMNS).to_dicts()]


def _of_dataset(row: dict[str, Any]) -> dict[str, Any]:
    """Return a run with the keys of measured files; runs of a shared process have no process figure."""
    process = None if row["context"] is None else row["process_memory"]
    figures = {"peak_alloc": row["peak_allocated"], "peak_reserved": row["peak_reserved"], "nvml_end": process}
    return {**json.loads(row["configuration"]), "id": row["id"], **figures}


def run_of(row: dict[str, Any], number: int, folder: Path) -> MeasuredRun:
    """Return the run of a line of a measured file; histories are next to the file, in `folder`."""
    reserved, end = row.get("peak_reserved"), row.get("nvml_end")
    process = None
    if reserved is not None and end is not None:
        process = end - row.get("end_reserved", reserved) + reserved
    events = row.get("events")
    history = folder / events if isinstance(events, str) else None
    return MeasuredRun(
        id=str(row.get("id") or f"r{number:04d}"),
        row=row,
        family=family_of(str(row.get("model", ""))),
        allocated=row.get("peak_alloc"),
        reserved=reserved,
        process=process,
        oom="oom" in row,
        history=history if history is not None and history.is_file() else None,
    )


def family_of(model: str) -> str:
    """Return the source of a model, as a heading.

    >>> family_of("tv:resnet50"), family_of("hf:GPT2LMHeadModel"), family_of("mlp:x")
    ('torchvision', 'transformers', 'MLPs')
    """
    prefix = PREFIXES.get(model.partition(":")[0], "own")
    return FAMILIES.get(prefix, prefix)


def sample(runs: Sequence[MeasuredRun], count: int | None) -> list[MeasuredRun]:
    """Return N of the runs, always the same ones: a smaller sample is part of every larger one.

    >>> runs = [MeasuredRun(id=str(number), row={}, family="") for number in range(9)]
    >>> len(sample(runs, 4)), set(map(id, sample(runs, 2))) < set(map(id, sample(runs, 4)))
    (4, True)
    """
    if count is None or count >= len(runs):
        return list(runs)
    drawn = sorted(runs, key=lambda run: hashlib.sha256(run.id.encode()).digest())[:count]
    chosen = {run.id for run in drawn}
    return [run for run in runs if run.id in chosen]


# The published A100-40GB measurements as runs: 40 models in two campaigns, and timm models at five batch sizes.
#
# Their truth is the whole GPU's `memory.used`, sampled once a second, so it has the CUDA context in it and can miss a
# short peak. The tables name a model and a batch size; what else a run needs is assumed here and said in the notes.

CLIPPED_MIB = 38_000  # of 40,960: above, runs pile up at the card's end, so the card and not the model set the figure
TIMM_OPTIMIZER = "adam"
CAMPAIGNS = {"May 2025": "actual_mib_2025_05", "September 2025": "actual_mib_2025_09"}

# Columns of estimates: the estimator, and what its figure is compared with.
_PUBLISHED = {
    "horus_mib": ("horus", "process"),
    "faketensor_mib": ("faketensor", "allocated"),
    "gpumemnet_mib": ("gpumemnet", "process"),
}
_CAPPED_MIB = 40_000.0  # in place of an estimate that was cut off or missing

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
    """Read the runs of one of the published tables, distinguished by their columns."""
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
        f"{file} must be a table of measured runs with the columns of realworld_a100.csv or "
        f"faketensor_timm_a100.csv, got {', '.join(sorted(columns)) or 'none'}"
    )


def _campaign(rows: list[dict[str, str]], campaign: str, column: str, gpu: str) -> TruthSet:
    runs, published, left_out = [], [], Counter[str]()
    for number, row in enumerate(rows):
        reason = _left_out(row, column)
        if reason:
            left_out[reason] += 1
            continue
        run, process = f"realworld-{number:02d}", round(float(row[column]) * MIB)
        published += _published(row, run, gpu)
        family = row.get("family") or "other"
        runs.append(MeasuredRun(id=run, row=_configuration(row), family=family, process=process))
    notes = [
        _WHOLE_GPU,
        "the two campaigns measured the same runs and disagree: in May 2025 most figures are 1 to 2 GB higher",
        "assumed: fp32, torchvision's models (timm's for xception), BertForMaskedLM and GPT2LMHeadModel at 512 tokens",
    ]
    name = f"realworld, {campaign}"
    return TruthSet(name=name, gpu=gpu, runs=runs, published=published, left_out=dict(left_out), notes=notes)


def _published(row: dict[str, str], run: str, gpu: str) -> list[Record]:
    records = []
    for column, (name, kind) in _PUBLISHED.items():
        if row.get(column) and float(row[column]) != _CAPPED_MIB:
            figure = round(float(row[column]) * MIB)
            records.append(Record(estimator=f"{name} (published)", run=run, gpu=gpu, figure=figure, kind=kind))
    return records


def _left_out(row: dict[str, str], column: str) -> str | None:
    if not row[column]:
        return "not measured in this campaign"
    if row.get("gpus") not in ("1", "1.0"):
        return "on two GPUs"
    if float(row[column]) >= CLIPPED_MIB:
        return "near the card's end, perhaps clipped"
    return None if row["model"] in _MODELS else "the table does not name the run"


def _configuration(row: dict[str, str]) -> dict[str, Any]:
    run = dict(_MODELS[row["model"]], batch=int(row["batch_size"]), opt=row["optimizer"].lower(), precision="fp32")
    if run["model"].startswith("hf:"):
        return run | {"seq": 512}
    return run | {"input": [int(length) for length in row["input"].split()[0].split("x")]}


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
            run, process = f"{row['model']}-{row['batch_size']}", round(float(row["actual_max_mib"]) * MIB)
            published += _published(row, run, gpu)
            configuration = {"model": f"timm:{name}", "batch": int(row["batch_size"]), "opt": TIMM_OPTIMIZER}
            configuration |= {"precision": "fp32"}
            runs.append(MeasuredRun(id=run, row=configuration, family="timm", process=process))
    notes = [
        _WHOLE_GPU,
        "assumed: fp32, the input size and classes that each model is made for",
        "the table does not name the optimizer; Adam was chosen because, of the usual optimizers, it comes nearest to "
        "the measured memory of six of these models, so that errors depend on this choice",
    ]
    return TruthSet(name="timm", gpu=gpu, runs=runs, published=published, left_out=dict(left_out), notes=notes)


# Finds the measured run of a configuration, if any.

_DEFAULTS = {"num_classes": 1000, "attention": "sdpa", "optimizer": "adamw", "precision": "fp32"}
_OF_THE_MODEL = ("name", "settings", "config")


def identity(configuration: Model) -> dict[str, Any]:
    """Return a key that is equal for two notations of the same run.

    >>> one = identity(Model("tv:resnet18", batch_size=8, num_classes=1000))
    >>> one == identity(Model("torchvision:resnet18", batch_size=8))
    True

    A size that is left to the model ("what it is made for") is only the same as one that is left to it too.
    """
    values = {name: value for name, value in asdict(configuration).items() if name not in _OF_THE_MODEL}
    values |= {name: default for name, default in _DEFAULTS.items() if values.get(name) is None}
    config = dict(configuration.settings)
    _ = config.pop("conf", None)
    config = {**config.pop("hf_config", {}), **config}
    if (vocab := config.pop("vocab", None)) is not None:
        config.setdefault("vocab_size", vocab)
    values["freeze"] = list(configuration.freeze)
    return values | {"model": f"{configuration.source}:{configuration.short_name}", "config": config}


def matching(configuration: Model, runs: Iterable[MeasuredRun]) -> list[MeasuredRun]:
    wanted, matches = identity(configuration), []
    for run in runs:
        try:
            same = identity(Model.from_row(run.row)) == wanted
        except InvalidValue:
            continue
        if same:
            matches.append(run)
    return matches
