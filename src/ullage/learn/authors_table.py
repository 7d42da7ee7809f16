"""Reads the tables that the authors of GPUMemNet published (CSV, measured on an A100-40GB) as rows of a data set.

Their memory is the whole GPU's, sampled once a second; every run is in 32 bits with Adam; -1 means not measured.
"""

from __future__ import annotations

import ast
import csv
import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

from ullage.errors import InvalidValue
from ullage.learn.drop_reasons import DUPLICATE, IMPOSSIBLE, OUT_OF_MEMORY, Report, share, too_little
from ullage.learn.schema import COUNTED
from ullage.units import MIB

GPU = "A100-40GB"
_NEEDED = (
    "Filename", "Activations-Params", "Activation Function", "Total Activations", "Total Parameters", "Batch Size",
    "Max GPU Memory (MiB)",
)  # fmt: skip
_KINDS = {
    "batch_normalization": "batch_norm", "batchnorm1d": "batch_norm", "batchnorm2d": "batch_norm",
    "layernorm": "layer_norm", "adaptive_avg_pool2d": "pooling", "maxpool2d": "pooling",
}  # fmt: skip
# A name such as "input_channels:3_arch:uniform_act:leaky_relu_dropout:0.3_dropout:True.out": keys and values may hold
# an underscore themselves, so that known keys are looked for.
_KEYS = (
    "input_channels", "num_classes", "base_filters", "input_size", "input", "output", "depth", "arch", "batch", "act",
    "dropout", "batchnorm",
)  # fmt: skip
_SETTING = re.compile(rf"(?:^|_)({'|'.join(_KEYS)}):(.*?)(?=_(?:{'|'.join(_KEYS)}):|$)")


def read_authors(file: Path, report: Report) -> list[dict[str, Any]]:
    """The rows of a table; those that cannot be used are noted in the report."""
    lines = _lines(file)
    report.files.append(str(file))
    rows: dict[str, dict[str, Any]] = {}
    for number, line in enumerate(lines, 2):
        report.read += 1
        name = line["Filename"].removesuffix(".out")
        if "OOM" in (line.get("Status") or ""):
            report.drop(name, OUT_OF_MEMORY, f"at {line['Max GPU Memory (MiB)']} MiB", file.name)
            continue
        try:
            row = _row(name, line, file.name, report)
        except (ValueError, SyntaxError, TypeError, KeyError) as error:
            raise InvalidValue(f"{file}, line {number}: cannot be read ({error})") from None
        if too_little(row["process_memory"], row["parameters"], "fp32"):
            report.drop(name, IMPOSSIBLE, "less memory than weights and gradients take", file.name)
        elif name in rows:
            report.drop(name, DUPLICATE, "", file.name)
        else:
            rows[name] = row
    report.kept += len(rows)
    return list(rows.values())


def _lines(file: Path) -> list[dict[str, str]]:
    try:
        with file.open(newline="") as source:
            reader = csv.DictReader(source)
            lines = list(reader)
    except OSError as error:
        raise InvalidValue(f"cannot read {file}: {error.strerror}") from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise InvalidValue(f"{file} is no CSV file: {error}") from None
    missing = [name for name in _NEEDED if name not in (reader.fieldnames or ())]
    if missing:
        raise InvalidValue(f"{file} is no table of GPUMemNet's authors: it has no column {missing[0]!r}")
    return lines


def settings_of(name: str) -> dict[str, str]:
    """The settings in a run's name; "dropout" comes twice there: the rate, then whether it is used.

    >>> settings_of("input:4_act:leaky_relu_dropout:0.3_dropout:True")
    {'input': '4', 'act': 'leaky_relu', 'dropout': '0.3', 'with_dropout': 'True'}
    """
    found: dict[str, str] = {}
    for key, value in _SETTING.findall(name):
        found["with_dropout" if key in found else key] = value
    return found


def _row(name: str, line: dict[str, str], source: str, report: Report) -> dict[str, Any]:
    settings = settings_of(name)
    layers = [
        (_KINDS.get(kind.lower(), kind.lower()), int(outputs), int(own))
        for kind, outputs, own in ast.literal_eval(line["Activations-Params"])
    ]
    kinds = Counter(kind for kind, _, _ in layers)
    batch, activations = int(line["Batch Size"]), int(line["Total Activations"])
    return {
        "id": name,
        "family": "cnn" if kinds["conv2d"] else "mlp",
        "arch": settings.get("arch"),
        "configuration": json.dumps(settings, separators=(",", ":")),
        "batch_size": batch,
        "input_elements": _input_elements(settings),
        "parameters": int(line["Total Parameters"]),
        "activations": activations,
        "activations_batch": activations * batch,
        "depth": kinds["linear"] + kinds["conv2d"],
        **{f"count_{kind}": kinds[kind] for kind in COUNTED},
        "activation_function": line["Activation Function"].lower(),
        "optimizer": "adam",
        "precision": "fp32",
        "layers": layers,
        "process_memory": round(float(line["Max GPU Memory (MiB)"]) * MIB),
        **_shares(line, report),
        "gpu": GPU,
        "source": source,
    }


def _input_elements(settings: dict[str, str]) -> int | None:
    if "input" in settings:
        return int(settings["input"])
    if "input_size" not in settings:
        return None
    return int(settings.get("input_channels", 3)) * int(settings["input_size"]) ** 2


def _shares(line: dict[str, str], report: Report) -> dict[str, float | None]:
    found: dict[str, float | None] = {}
    for name in ("gract", "smact", "smocc"):
        text = line.get(f"Avg {name.upper()}")
        found[name] = share(float(text)) if text else None
        report.blanked[name] += found[name] is None
    report.blanked += type(report.blanked)()  # without zeros
    return found
