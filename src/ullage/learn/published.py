"""The authors' tables of measured networks (CSV), as rows of a data set."""

from __future__ import annotations

import ast
import csv
from pathlib import Path
from typing import Any

from ullage.errors import InvalidValue
from ullage.estimators.gpumemnet_inputs import COUNTS, kind_of
from ullage.units import MIB

GPU = "A100-40GB"
_COLUMNS = (
    "Filename",
    "Activations-Params",
    "Total Activations",
    "Total Parameters",
    "Batch Size",
    "Max GPU Memory (MiB)",
)


def read_published(file: Path) -> list[dict[str, Any]]:
    """The rows of a table; the settings of a network are in the name of its log. Runs out of memory are left out.

    >>> read_published(Path("gpumemnet_mlp_a100.csv"))[0]["batch_size"]      # doctest: +SKIP
    996
    """
    try:
        with file.open(newline="") as source:
            lines = list(csv.DictReader(source))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise InvalidValue(f"cannot read {file}: {error}") from None
    missing = [name for name in _COLUMNS if not lines or name not in lines[0]]
    if missing:
        raise InvalidValue(f"{file} is no table of the GPUMemNet authors: it has no column {missing[0]!r}")
    return [_row(line, number, file) for number, line in enumerate(lines, 2) if "OOM" not in (line.get("Status") or "")]


def _row(line: dict[str, str], number: int, file: Path) -> dict[str, Any]:
    try:
        layers = [
            {"type": str(kind), "activations": int(outputs), "parameters": int(own)}
            for kind, outputs, own in ast.literal_eval(line["Activations-Params"])
        ]
        settings = _settings(line["Filename"])
        kinds = [kind_of(str(layer["type"])) for layer in layers]
        return {
            "id": line["Filename"], "family": "cnn" if "conv2d" in kinds else "mlp", "arch": settings.get("arch"),
            "configuration": line["Filename"], "batch_size": int(line["Batch Size"]),
            "input_elements": _input(settings), "sequence_length": None,
            "parameters": int(line["Total Parameters"]), "activations": int(line["Total Activations"]),
            "depth": sum(kind in ("linear", "conv2d") for kind in kinds), "layers": layers,
            **{name: kinds.count(name.removeprefix("count_")) for name in COUNTS},
            "activation_function": settings.get("act"), "optimizer": "adam", "precision": "fp32",
            "process_memory": int(float(line["Max GPU Memory (MiB)"]) * MIB), "gpu": GPU,
            "source": "GPUMemNet's authors",
        }  # fmt: skip
    except (ValueError, SyntaxError, TypeError, KeyError) as error:
        raise InvalidValue(f"{file}, line {number}: cannot be read ({error})") from None


def _settings(name: str) -> dict[str, str]:
    """The settings in a name such as "input:2346_output:197_act:leaky_relu_dropout:True.out".

    >>> _settings("input:4_act:leaky_relu_batchnorm:True.out")
    {'input': '4', 'act': 'leaky_relu', 'batchnorm': 'True'}
    """
    found: dict[str, str] = {}
    key = ""
    for word in name.removesuffix(".out").split("_"):
        if ":" in word:
            before, _, value = word.partition(":")
            key = before
            found[key] = value
        elif key:
            found[key] += "_" + word
    return found


def _input(settings: dict[str, str]) -> int:
    """Numbers of one sample: a vector's length, or channels times the image; a key's first word may be cut off."""
    if "input" in settings:
        return int(settings["input"])
    side, channels = int(settings.get("size", 0)), int(settings.get("channels", 3))
    return channels * side * side
