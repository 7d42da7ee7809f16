"""From where a family's features are drawn: the appendix of the GPUMemNet paper, overridden by a TOML file.

    [cnn]
    side = [64, 128]                # from, to
    arch = ["residual", "dense"]    # one of these
    optimizer = { adam = 3, sgd = 1 }   # one of these, with weights

A range takes two numbers, a choice a list, a choice with weights a table.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from ullage.errors import InvalidValue, UnknownName
from ullage.learn.shapes import CNN_FORMS, MLP_FORMS, TRANSFORMER_FORMS
from ullage.workload.choices import OPTIMIZERS, PRECISIONS

FAMILIES = ("mlp", "cnn", "transformer")
_ACTIVATIONS = ("relu", "elu", "tanh", "gelu", "silu", "selu", "leaky_relu", "prelu", "mish", "softplus", "identity")
_OPTIMIZERS = {
    "adam": 7.0, "adamw": 1.0, "adamw_fused": 1.0, "sgd": 1.0, "sgdm": 1.0, "rmsprop": 1.0, "adagrad": 1.0,
    "adafactor": 1.0,
}  # fmt: skip
_PRECISIONS = {"fp32": 3.0, "amp_bf16": 1.0, "amp_fp16": 1.0, "bf16": 1.0}
_SHARED: dict[str, Any] = {
    "dropout": (0.1, 0.5),
    "with_dropout": (0.5,),
    "optimizer": _OPTIMIZERS,
    "precision": _PRECISIONS,
}

# A tuple of two numbers is a range, of one number a probability, a list a choice, a dictionary a choice with weights.
DEFAULTS: dict[str, dict[str, Any]] = {
    "mlp": _SHARED | {
        "arch": list(MLP_FORMS), "act": list(_ACTIVATIONS), "inputs": (4, 4096), "classes": (1, 1024),
        "hidden": (1, 11), "batch": (4, 1024), "with_batch_norm": (0.5,), "balanced": (0.2,),
    },
    "cnn": _SHARED | {
        "arch": list(CNN_FORMS), "act": list(_ACTIVATIONS[:-1]), "side": (32, 224), "channels": [1, 3],
        "classes": (2, 22_000), "filters": (16, 512), "depth": (1, 29), "batch": (2, 62), "kernel": [1, 3, 5, 7],
        "mixed_kernels": (0.3,), "down_by": ["max", "avg", "stride"], "with_batch_norm": (0.5,), "balanced": (0.5,),
    },
    "transformer": _SHARED | {
        "arch": list(TRANSFORMER_FORMS), "act": ["gelu", "relu", "silu"], "vocabulary": (50_000, 1_000_000),
        "length": [128, 192, 256, 384, 512, 640, 768, 896, 1024], "size": (128, 2048), "layers": (2, 39),
        "heads": [2, 4, 8, 12, 16], "middle": (2.0, 4.0), "classes": (400, 1000), "batch": (1, 128),
        "with_dropout": (0.75,), "norm_first": (0.6,), "conv1d": (0.3,), "fused": (0.6,), "eager": (0.3,),
        "words": (0.3,), "words_vocabulary": (8_000, 64_000), "balanced": (0.5,),
    },
}  # fmt: skip


def ranges(family: str, file: Path | None = None) -> dict[str, Any]:
    """The ranges of a family, with what the file's table of that name says instead.

    >>> ranges("mlp")["batch"]
    (4, 1024)
    """
    if family not in DEFAULTS:
        raise UnknownName("family", family, FAMILIES)
    known = dict(DEFAULTS[family])
    if file is None:
        return known
    for name, value in _table(file, family).items():
        if name not in known:
            raise UnknownName(f"setting of [{family}] in {file}", name, known)
        known[name] = _read(f"{file}, [{family}], {name}", name, value, DEFAULTS[family][name])
    return known


def _table(file: Path, family: str) -> dict[str, Any]:
    try:
        content = tomllib.loads(file.read_text())
    except OSError as error:
        raise InvalidValue(f"cannot read {file}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidValue(f"{file} is no TOML: {error}") from None
    for name in content:
        if name not in FAMILIES:
            raise UnknownName(f"table in {file}", name, FAMILIES)
    table = content.get(family, {})
    if not isinstance(table, dict):
        raise InvalidValue(f"{file}: needed a table [{family}]; found {table!r}")
    return table


def _read(where: str, name: str, value: Any, default: Any) -> Any:
    if isinstance(default, dict):
        return _weights(where, name, value)
    if isinstance(default, list):
        return _choice(where, name, value, default)
    if len(default) == 1:
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value <= 1:
            raise InvalidValue(f"{where}: needed a share from 0 to 1; found {value!r}")
        return (float(value),)
    whole = isinstance(default[0], int)
    numbers = isinstance(value, list) and len(value) == 2
    if not numbers or any(isinstance(end, bool) or not isinstance(end, int if whole else int | float) for end in value):
        kind = "whole numbers" if whole else "numbers"
        raise InvalidValue(f"{where}: needed two {kind}, [from, to]; found {value!r}")
    low, high = value
    if low > high or low < (1 if whole else 0) or (name == "dropout" and high >= 1):
        raise InvalidValue(f"{where}: needed a range of positive numbers, the smaller one first; found {value!r}")
    return (low, high) if whole else (float(low), float(high))


def _choice(where: str, name: str, value: Any, default: list[Any]) -> list[Any]:
    if not isinstance(value, list) or not value:
        raise InvalidValue(f"{where}: needed a list of one or more; found {value!r}")
    for one in value:
        if isinstance(default[0], str):
            if one not in default:
                raise UnknownName(f"{name} ({where})", str(one), default)
        elif not isinstance(one, int) or isinstance(one, bool) or one < 1:
            raise InvalidValue(f"{where}: needed whole numbers of at least 1; found {one!r}")
        elif name == "kernel" and one % 2 == 0:
            raise InvalidValue(f"{where}: needed odd sizes of filters, which keep the image's size; found {one!r}")
    return value


def _weights(where: str, name: str, value: Any) -> dict[str, float]:
    known = OPTIMIZERS if name == "optimizer" else PRECISIONS
    if isinstance(value, list):
        value = {str(one): 1.0 for one in value}
    if not isinstance(value, dict) or not value:
        raise InvalidValue(f"{where}: needed a list or a table of names and weights; found {value!r}")
    for one, weight in value.items():
        if one not in known:
            raise UnknownName(f"{name} ({where})", one, known)
        if not isinstance(weight, int | float) or isinstance(weight, bool) or weight <= 0:
            raise InvalidValue(f"{where}: needed a weight above 0 for {one}; found {weight!r}")
    return value
