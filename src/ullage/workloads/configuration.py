"""A training run by name: the model, the batch, the optimizer and the precision.

A configuration is also what one line of a file of measurements describes. The same configuration can be trained on a
real GPU and on a virtual one. Nothing here imports PyTorch, because shell completion needs these names at once.
"""

from __future__ import annotations

import gzip
import json
import os
import zlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from ullage.errors import InvalidValue, UnknownName
from ullage.workloads.optimizers import check_optimizer


@dataclass(frozen=True)
class Precision:
    """How numbers are stored and multiplied; types are the names that PyTorch gives them."""

    meaning: str
    weights: str = "float32"
    autocast: str | None = None
    grad_scaler: bool = False
    tensor_float_32: bool = False


PRECISIONS = {
    "fp32": Precision("weights and arithmetic in 32 bits"),
    "tf32": Precision("like fp32, with matrix products in TensorFloat-32", tensor_float_32=True),
    "amp_fp16": Precision("autocast to float16, with a GradScaler", autocast="float16", grad_scaler=True),
    "amp_bf16": Precision("autocast to bfloat16", autocast="bfloat16"),
    "bf16": Precision("weights, gradients and arithmetic in bfloat16", weights="bfloat16"),
    "fp16": Precision("weights, gradients and arithmetic in float16", weights="float16"),
}

ATTENTIONS = {
    "sdpa": "scaled_dot_product_attention, with the kernel that PyTorch chooses",
    "eager": "matrix products and softmax, one after the other",
    "flash": "scaled_dot_product_attention, flash kernel only",
    "efficient": "scaled_dot_product_attention, memory-efficient kernel only",
    "cudnn": "scaled_dot_product_attention, cuDNN kernel only",
    "math": "scaled_dot_product_attention, plain kernel only",
}

SOURCES = {
    "torchvision": "torchvision:NAME, for example torchvision:resnet50",
    "timm": "timm:NAME, for example timm:vit_small_patch16_224",
    "hf": "hf:CLASS (transformers), for example hf:GPT2LMHeadModel, or hf:FOLDER with a config.json",
    "own": "package.module:factory or path/to/file.py:factory, a callable that returns an nn.Module",
}
PREFIXES = {"torchvision": "torchvision", "tv": "torchvision", "timm": "timm", "hf": "hf", "mlp": "mlp"}

DEFAULT_BATCH_SIZE = 32

# The options of `ullage.estimate` and of the command line that describe a model and its training. Each is the field of
# `Configuration` with the same name, except for two.
MODEL_OPTIONS = (
    "batch_size", "input_shape", "sequence_length", "num_classes", "optimizer", "precision", "gradient_accumulation",
    "checkpointing", "attention", "channels_last", "freeze", "lora_rank", "inference", "config", "set",
)  # fmt: skip
_FIELDS_OF_OPTIONS = {"config": "config_file", "set": "settings"}
_POSITIVE = ("batch_size", "sequence_length", "num_classes", "gradient_accumulation", "lora_rank")

# Files of measurements have shorter keys for these fields. A line may use either; lines are written with these.
FILE_KEYS = {
    "batch_size": "batch",
    "optimizer": "opt",
    "input_shape": "input",
    "num_classes": "classes",
    "sequence_length": "seq",
    "attention": "attn",
    "checkpointing": "ckpt",
    "gradient_accumulation": "accumulation",
}
# Files that were measured before a module moved name its factories by the old path.
_MOVED_FACTORIES = {"ullage.learn.families:": "ullage.research.datasets.families:"}


@dataclass(frozen=True, kw_only=True)
class Configuration:
    """A training run. `model` is `torchvision:NAME` (or `tv:NAME`), `timm:NAME`, `hf:CLASS` (transformers), `mlp:NAME`
    or `package.module:factory`.

    >>> Configuration.from_row({"model": "mlp:x", "widths": [8, 4], "batch": 2, "peak_alloc": 1}).batch_size
    2
    """

    model: str
    batch_size: int
    optimizer: str = "adamw"
    precision: str = "fp32"
    input_shape: list[int] | None = None
    num_classes: int | None = None
    channels_last: bool = False
    conf: str | None = None
    hf_config: dict[str, Any] = field(default_factory=dict)
    vocab: int | None = None
    sequence_length: int | None = None
    attention: str | None = None
    checkpointing: bool = False
    widths: list[int] | None = None
    bn: bool = False
    drop: bool = False
    act: str = "ReLU"
    gradient_accumulation: int = 1
    inference: bool = False
    freeze: tuple[str, ...] = ()
    lora_rank: int | None = None
    config_file: str | None = None
    settings: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._check_source()
        check_optimizer(self.optimizer)
        if self.precision not in PRECISIONS:
            raise UnknownName("precision", self.precision, PRECISIONS, hint="one of " + ", ".join(PRECISIONS))
        if self.attention is not None and self.attention not in ATTENTIONS:
            raise UnknownName("attention", self.attention, ATTENTIONS, hint="one of " + ", ".join(ATTENTIONS))
        for name in _POSITIVE:
            if getattr(self, name) is not None:
                _check_positive(name, getattr(self, name))
        for length in self.input_shape or ():
            _check_positive("input_shape", length)

    def _check_source(self) -> None:
        if not self.name or not self.model.partition(":")[0]:
            raise InvalidValue(f"needed {'; '.join(SOURCES.values())}. Found {self.model!r}" + _suggestion(self.model))
        if self.source == "mlp" and self.widths is None:
            raise InvalidValue(f"{self.model} needs 'widths'")

    @property
    def source(self) -> str:
        """Where the model comes from: "torchvision", "timm", "hf", "mlp", or "own" for a factory."""
        return PREFIXES.get(self.model.partition(":")[0], "own")

    @property
    def name(self) -> str:
        """The part after the colon."""
        return self.model.partition(":")[2]

    @property
    def types(self) -> Precision:
        """What `precision` means: the types of weights and arithmetic."""
        return PRECISIONS[self.precision]

    @classmethod
    def from_row(cls, row: dict[str, Any]) -> Configuration:
        """The configuration in a line of measurements; other keys of the line are left out."""
        keys = {spec.name: (FILE_KEYS.get(spec.name, spec.name), spec.name) for spec in fields(cls)}
        found = {
            name: next((row[key] for key in either if row.get(key) is not None), None) for name, either in keys.items()
        }
        values = {name: value for name, value in found.items() if value is not None}
        if "freeze" in values:
            values["freeze"] = tuple(values["freeze"])
        for old, new in _MOVED_FACTORIES.items():
            if str(values.get("model", "")).startswith(old):
                values["model"] = new + values["model"].removeprefix(old)
        try:
            return cls(**values)
        except TypeError as error:
            raise InvalidValue(f"this line does not describe a training run: {error}") from None

    def to_row(self) -> dict[str, Any]:
        """The configuration as a line of measurements: plain values under the keys of such files.

        >>> Configuration(model="mlp:x", widths=[8, 4], batch_size=2).to_row()["batch"]
        2
        """
        values = {FILE_KEYS.get(name, name): value for name, value in asdict(self).items()}
        return {key: list(value) if isinstance(value, tuple) else value for key, value in values.items()}

    @classmethod
    def from_options(cls, model: str, **options: Any) -> Configuration:
        """The configuration that the options of `ullage.estimate` describe; `None` means that one was not given.

        >>> Configuration.from_options("torchvision:resnet18", batch_size=64, optimizer="sgd").optimizer
        'sgd'
        """
        values: dict[str, Any] = {"batch_size": DEFAULT_BATCH_SIZE}
        for option, value in options.items():
            if option not in MODEL_OPTIONS:
                raise UnknownName("option", option, MODEL_OPTIONS)
            if value is not None:
                values[_FIELDS_OF_OPTIONS.get(option, option)] = value
        if "freeze" in values:
            values["freeze"] = (values["freeze"],) if isinstance(values["freeze"], str) else tuple(values["freeze"])
        if "input_shape" in values:
            values["input_shape"] = list(values["input_shape"])
        if isinstance(values.get("config_file"), dict):
            values["settings"] = values.pop("config_file") | values.get("settings", {})
        elif "config_file" in values:
            values["config_file"] = str(values["config_file"])
        return cls(model=model, **values)

    def in_words(self) -> str:
        """The options that differ from their defaults, for messages; always with the batch size.

        >>> Configuration.from_options("timm:vit_tiny_patch16_224", input_shape=(3, 64, 64)).in_words()
        'batch size 32, input shape 3,64,64'
        """
        defaults = {spec.name: spec.default for spec in fields(self)}
        words = []
        for option in MODEL_OPTIONS:
            name = _FIELDS_OF_OPTIONS.get(option, option)
            value = getattr(self, name)
            if name == "batch_size" or (value != defaults[name] and value not in ({}, (), None)):
                text = ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
                words.append(f"{option.replace('_', ' ')} {text}")
        return ", ".join(words)


def _check_positive(option: str, value: Any) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise InvalidValue(f"{option} needs a whole number of at least 1; found {value!r}")


def _suggestion(model: str) -> str:
    """The models of that name, for somebody who left out where it comes from."""
    from ullage.workloads.sources.names import model_names

    found = [f"{source}:{model}" for source in ("torchvision", "timm", "hf") if model in model_names(source)]
    return f"; did you mean {' or '.join(found)}?" if found else ""


def read_rows(file: Path) -> Iterator[dict[str, Any]]:
    """The lines of a JSONL file (also gzipped) of configurations or measurements; a bad line is named by its number."""
    try:
        content = file.read_bytes()
        text = (gzip.decompress(content) if file.suffix == ".gz" else content).decode()
    except (gzip.BadGzipFile, zlib.error, EOFError):
        raise InvalidValue(f"{file} is not a gzip file, or it is damaged") from None
    except OSError as error:
        raise InvalidValue(f"cannot read {file}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise InvalidValue(f"{file} is not text; needed a file of JSON objects, one per line") from None
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


def cut_torn_line(file: Path) -> None:
    """Cut off an incomplete last line, as a writer leaves it that was killed."""
    try:
        content = file.read_bytes()
        whole = content.rfind(b"\n") + 1
        if whole != len(content):
            os.truncate(file, whole)
    except OSError as error:
        raise InvalidValue(f"cannot read {file}: {error.strerror}") from None
