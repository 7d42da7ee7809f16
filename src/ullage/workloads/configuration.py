"""One training run in a few words: what is trained, on what batch, with which optimizer and precision.

A configuration is a line of a measured file: the same keys, so that a file of measurements is also a list of
workloads, and the same function trains it on a real GPU and on a virtual one.
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

# The words that options take, in one place and without importing PyTorch: shell completion needs them at once.

# Short name: class of torch.optim and its arguments. Any other class of torch.optim goes by its own name.
OPTIMIZERS: dict[str, tuple[str, dict[str, Any]]] = {
    "sgd": ("SGD", {"lr": 1e-3}),
    "sgdm": ("SGD", {"lr": 1e-3, "momentum": 0.9}),
    "adam": ("Adam", {"lr": 1e-4}),
    "adamw": ("AdamW", {"lr": 1e-4}),
    "sgd_fused": ("SGD", {"lr": 1e-3, "fused": True}),
    "sgdm_fused": ("SGD", {"lr": 1e-3, "momentum": 0.9, "fused": True}),
    "adam_fused": ("Adam", {"lr": 1e-4, "fused": True}),
    "adamw_fused": ("AdamW", {"lr": 1e-4, "fused": True}),
    "rmsprop": ("RMSprop", {"lr": 1e-4}),
    "adagrad": ("Adagrad", {"lr": 1e-4}),
    "adafactor": ("Adafactor", {"lr": 1e-4}),
}
OPTIMIZER_ALIASES = {
    "momentum": "sgdm",
    "sgd_momentum": "sgdm",
    "fused_adam": "adam_fused",
    "fused_adamw": "adamw_fused",
}

PRECISIONS = {
    "fp32": "weights and arithmetic in 32 bits",
    "tf32": "as fp32, matrix products in TensorFloat-32",
    "amp_fp16": "autocast to float16 with a GradScaler",
    "amp_bf16": "autocast to bfloat16",
    "bf16": "weights, gradients and arithmetic in bfloat16",
    "fp16": "weights, gradients and arithmetic in float16",
}

ATTENTIONS = {
    "sdpa": "scaled_dot_product_attention, with the kernel that PyTorch chooses",
    "eager": "matrix products and softmax, one after the other",
    "flash": "scaled_dot_product_attention, only its flash kernel",
    "efficient": "scaled_dot_product_attention, only its memory-efficient kernel",
    "cudnn": "scaled_dot_product_attention, only cuDNN's kernel",
    "math": "scaled_dot_product_attention, only its plain kernel",
}

SOURCES = {
    "torchvision": "torchvision:NAME, for example torchvision:resnet50",
    "timm": "timm:NAME, for example timm:vit_small_patch16_224",
    "hf": "hf:CLASS (transformers), for example hf:GPT2LMHeadModel, or hf:FOLDER with a config.json",
    "own": "package.module:factory or path/to/file.py:factory, a callable that gives an nn.Module",
}


DEFAULT_BATCH = 32
PREFIXES = {"torchvision": "torchvision", "tv": "torchvision", "timm": "timm", "hf": "hf", "mlp": "mlp"}

# The public names of options, as in `ullage.estimate(name, batch_size=64)` and `--batch-size 64`, and their fields.
OPTION_FIELDS = {
    "batch_size": "batch_size",
    "input_shape": "input",
    "sequence_length": "seq",
    "num_classes": "classes",
    "optimizer": "opt",
    "precision": "precision",
    "gradient_accumulation": "accumulation",
    "checkpointing": "ckpt",
    "attention": "attn",
    "channels_last": "channels_last",
    "freeze": "freeze",
    "lora_rank": "lora_rank",
    "inference": "inference",
    "config": "config_file",
    "set": "settings",
}

# Fields that files of measurements have under another key; a line may use either.
FILE_KEYS = {"batch_size": "batch"}
FIELDS_OF_FILE_KEYS = {key: name for name, key in FILE_KEYS.items()}


@dataclass(frozen=True, kw_only=True)
class Configuration:
    """A training run. `model` is `torchvision:NAME` (or `tv:NAME`), `timm:NAME`, `hf:CLASS` (transformers), `mlp:NAME`
    or `package.module:factory`.

    >>> Configuration.from_row({"model": "mlp:x", "widths": [8, 4], "batch": 2, "peak_alloc": 1}).batch_size
    2
    """

    model: str
    batch_size: int
    opt: str = "adamw"
    precision: str = "fp32"
    input: list[int] | None = None
    classes: int | None = None
    channels_last: bool = False
    conf: str | None = None
    hf_config: dict[str, Any] = field(default_factory=dict)
    vocab: int | None = None
    seq: int | None = None
    attn: str | None = None
    ckpt: bool = False
    widths: list[int] | None = None
    bn: bool = False
    drop: bool = False
    act: str = "ReLU"
    accumulation: int = 1
    inference: bool = False
    freeze: tuple[str, ...] = ()
    lora_rank: int | None = None
    config_file: str | None = None
    settings: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._check_source()
        _check_optimizer(self.opt)
        if self.precision not in PRECISIONS:
            raise UnknownName("precision", self.precision, PRECISIONS, hint="one of " + ", ".join(PRECISIONS))
        if self.attn is not None and self.attn not in ATTENTIONS:
            raise UnknownName("attention", self.attn, ATTENTIONS, hint="one of " + ", ".join(ATTENTIONS))
        for option, name in OPTION_FIELDS.items():
            value = getattr(self, name)
            if name in ("batch_size", "seq", "classes", "accumulation", "lora_rank") and value is not None:
                _check_positive(option, value)
        if self.input is not None:
            for length in self.input:
                _check_positive("input_shape", length)

    def _check_source(self) -> None:
        if not self.name or not self.model.partition(":")[0]:
            raise InvalidValue(f"needed {'; '.join(SOURCES.values())}. Found {self.model!r}" + _meant(self.model))
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

    @classmethod
    def from_row(cls, row: dict[str, Any]) -> Configuration:
        """The configuration in a line of measurements; keys that are not part of it are left out."""
        known = {spec.name for spec in fields(cls)}
        named = {FIELDS_OF_FILE_KEYS.get(key, key): value for key, value in row.items() if value is not None}
        values = {name: value for name, value in named.items() if name in known}
        if "freeze" in values:
            values["freeze"] = tuple(values["freeze"])
        try:
            return cls(**values)
        except TypeError as error:
            raise InvalidValue(f"this line is no training run: {error}") from None

    def to_row(self) -> dict[str, Any]:
        """The configuration as a line of measurements has it: plain values under the keys of such files.

        >>> Configuration(model="mlp:x", widths=[8, 4], batch_size=2).to_row()["batch"]
        2
        """
        values = {FILE_KEYS.get(name, name): value for name, value in asdict(self).items()}
        return {key: list(value) if isinstance(value, tuple) else value for key, value in values.items()}

    @classmethod
    def from_options(cls, model: str, **options: Any) -> Configuration:
        """The configuration that the public options describe; an option that is `None` was not given.

        >>> Configuration.from_options("torchvision:resnet18", batch_size=64, optimizer="sgd").opt
        'sgd'
        """
        values: dict[str, Any] = {}
        for option, value in options.items():
            if option not in OPTION_FIELDS:
                raise UnknownName("option", option, OPTION_FIELDS)
            if value is not None:
                values[OPTION_FIELDS[option]] = value
        values.setdefault("batch_size", DEFAULT_BATCH)
        if "freeze" in values:
            values["freeze"] = (values["freeze"],) if isinstance(values["freeze"], str) else tuple(values["freeze"])
        if "input" in values:
            values["input"] = list(values["input"])
        if isinstance(values.get("config_file"), dict):
            values["settings"] = values.pop("config_file") | values.get("settings", {})
        elif "config_file" in values:
            values["config_file"] = str(values["config_file"])
        return cls(model=model, **values)


def _check_positive(option: str, value: Any) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise InvalidValue(f"{option} needs a whole number of at least 1; found {value!r}")


def _check_optimizer(name: str) -> None:
    if name not in OPTIMIZERS and name not in OPTIMIZER_ALIASES:
        from ullage.workloads.optimizers import optimizer_class  # any class of torch.optim: that needs PyTorch

        optimizer_class(name)


def _meant(model: str) -> str:
    """Where somebody left out the source: the models that are called so."""
    from ullage.workloads.sources.names import model_names

    found = [f"{source}:{model}" for source in ("torchvision", "timm", "hf") if model in model_names(source)]
    return f"; did you mean {' or '.join(found)}?" if found else ""


def read_rows(file: Path) -> Iterator[dict[str, Any]]:
    """The lines of a JSONL file (also gzipped) of configurations or measurements; a bad line is named by its number."""
    try:
        content = file.read_bytes()
        text = (gzip.decompress(content) if file.suffix == ".gz" else content).decode()
    except (gzip.BadGzipFile, zlib.error, EOFError):
        raise InvalidValue(f"{file} is no gzip file, or a broken one") from None
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


def cut_torn_line(file: Path) -> None:
    """Take away what follows a file's last whole line, as a writer that was killed leaves it."""
    try:
        content = file.read_bytes()
        whole = content.rfind(b"\n") + 1
        if whole != len(content):
            os.truncate(file, whole)
    except OSError as error:
        raise InvalidValue(f"cannot read {file}: {error.strerror}") from None
