"""One training run in a few words: what is trained, on what batch, with which optimizer and precision.

A configuration is a line of a measured file: the same keys, so that a file of measurements is also a list of
workloads, and the same function trains it on a real GPU and on a virtual one.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from ullage.errors import InvalidValue

OPTIMIZERS = ("sgd", "sgdm", "adam", "adamw", "adamw_fused", "rmsprop", "adagrad", "adafactor")
PRECISIONS = ("fp32", "amp_bf16", "amp_fp16", "bf16")


@dataclass(frozen=True, kw_only=True)
class Configuration:
    """A training run. `model` is `tv:NAME` (torchvision), `timm:NAME`, `hf:CLASS` (transformers) or `mlp:NAME`.

    >>> Configuration.from_row({"model": "mlp:x", "widths": [8, 4], "batch": 2, "opt": "sgd", "peak_alloc": 1}).batch
    2
    """

    model: str
    batch: int
    opt: str = "adamw"
    precision: str = "fp32"
    input: list[int] | None = None
    classes: int = 1000
    channels_last: bool = False
    conf: str | None = None
    hf_config: dict[str, Any] = field(default_factory=dict)
    vocab: int | None = None
    seq: int | None = None
    attn: str = "sdpa"
    ckpt: bool = False
    widths: list[int] | None = None
    bn: bool = False
    drop: bool = False
    act: str = "ReLU"

    def __post_init__(self) -> None:
        for name, valid in (("opt", OPTIMIZERS), ("precision", PRECISIONS)):
            if getattr(self, name) not in valid:
                raise InvalidValue(f"needed {name} among {', '.join(valid)}; found {getattr(self, name)!r}")
        needed = {"tv": ("input",), "timm": ("input",), "hf": ("conf", "seq", "vocab"), "mlp": ("widths",)}
        if self.source not in needed:
            raise InvalidValue(
                f"needed a model such as tv:resnet50, timm:NAME, hf:CLASS or mlp:NAME; found {self.model!r}"
            )
        for name in needed[self.source]:
            if getattr(self, name) is None:
                raise InvalidValue(f"{self.model} needs {name!r}")

    @property
    def source(self) -> str:
        """The part before the colon."""
        return self.model.partition(":")[0]

    @property
    def name(self) -> str:
        """The part after the colon."""
        return self.model.partition(":")[2]

    @classmethod
    def from_row(cls, row: dict[str, Any]) -> Configuration:
        """The configuration in a line of measurements; keys that are not part of it are left out."""
        known = {spec.name for spec in fields(cls)}
        values = {key: value for key, value in row.items() if key in known and value is not None}
        try:
            return cls(**values)
        except TypeError as error:
            raise InvalidValue(f"this line is no training run: {error}") from None


def read_rows(file: Path) -> Iterator[dict[str, Any]]:
    """The lines of a JSONL file of configurations or measurements; a bad line is named by its number."""
    try:
        text = file.read_text()
    except OSError as error:
        raise InvalidValue(f"cannot read {file}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise InvalidValue(f"{file} is no text; needed a file of JSON objects, one a line") from None
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise InvalidValue(f"{file}, line {number}: not JSON ({error})") from None
        if not isinstance(row, dict):
            raise InvalidValue(f"{file}, line {number}: needed a JSON object; found {type(row).__name__}")
        yield row
