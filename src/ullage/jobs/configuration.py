"""A training run by name: the model, the batch, the optimizer and the precision.

A configuration is also what one line of a file of measurements describes. The same configuration can be trained on a
real GPU and on a virtual one. Nothing here imports PyTorch, because shell completion needs these names at once.
"""

from __future__ import annotations

import gzip
import json
import lzma
import os
import zlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from ullage.errors import InvalidValue, UnknownName
from ullage.jobs.optimizers import check_optimizer
from ullage.jobs.sources.hub import is_checkpoint, quantization_of, read_config, weights_type


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

# The types that weights are loaded in, and the precision that has nothing else.
DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}

QUANTIZATIONS = {
    "nf4": "frozen weights in 4 bits (NormalFloat), as QLoRA has them",
    "fp4": "frozen weights in 4 bits (floating point)",
    "int8": "frozen weights in 8 bits, by LLM.int8()",
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
    "hf": "hf:ORG/NAME (the Hugging Face hub), for example hf:Qwen/Qwen3-8B, hf:FOLDER with a config.json, or hf:CLASS "
    "(transformers), for example hf:GPT2LMHeadModel",
    "own": "package.module:factory or path/to/file.py:factory, a callable that returns an nn.Module",
}
PREFIXES = {"torchvision": "torchvision", "tv": "torchvision", "timm": "timm", "hf": "hf", "mlp": "mlp"}

DEFAULT_BATCH_SIZE = 32


def parse_shape(text: str, what: str) -> list[int]:
    """A shape from numbers separated by commas or x; `what` names it in a message.

    >>> parse_shape("3x224x224", "shape"), parse_shape("3, 224,224", "shape")
    ([3, 224, 224], [3, 224, 224])
    """
    parts = text.replace("x", ",").split(",")
    if not all(part.strip().isdigit() and int(part) for part in parts):
        raise InvalidValue(f"{what}: needed whole numbers such as 3,224,224; found {text[:40]!r}")
    return [int(part) for part in parts]


# The options of `ullage.estimate` and of the command line that describe a model and its training. Each is the field of
# `Configuration` with the same name, except for two.
MODEL_OPTIONS = (
    "batch_size", "input_shape", "sequence_length", "num_classes", "optimizer", "precision", "gradient_accumulation",
    "checkpointing", "attention", "channels_last", "freeze", "lora", "lora_targets", "quantize", "dtype", "inference",
    "config", "set",
)  # fmt: skip
_FIELDS_OF_OPTIONS = {"config": "config_file", "set": "settings"}
_POSITIVE = ("batch_size", "sequence_length", "num_classes", "gradient_accumulation", "lora")

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
    "lora": "lora_rank",
}
# Files that were measured before factories moved to ullage-lab name them by the old path. The first that fits counts.
_MOVED_FACTORIES = {
    "ullage.learn.families:": "ullage_lab.networks.generated:",
    "ullage.research.datasets.families:": "ullage_lab.networks.generated:",
    "ullage.research.rates.rarer_models:": "ullage_lab.networks.rarer:",
    "ullage.research.datasets.networks:": "ullage_lab.networks.drawn:",
    "benchmarks/later_steps.py:generator": "ullage_lab.networks.drawn:image_generator",
    "benchmarks/later_steps.py:": "ullage_lab.networks.drawn:",
    "benchmarks/fresh_steps.py:": "ullage_lab.networks.drawn:",
    "benchmarks/fresh_networks.py:": "ullage_lab.networks.drawn:",
}


def current_name(model: str) -> str:
    """The name by which a model is known now.

    >>> current_name("ullage.learn.families:mlp"), current_name("tv:resnet18")
    ('ullage_lab.networks.generated:mlp', 'tv:resnet18')
    """
    for old, new in _MOVED_FACTORIES.items():
        if model.startswith(old):
            return new + model.removeprefix(old)
    return model


@dataclass(frozen=True, kw_only=True)
class Configuration:
    """A training run. `model` is `torchvision:NAME` (or `tv:NAME`), `timm:NAME`, `hf:ORG/NAME` (the hub), `hf:CLASS`
    (transformers), `mlp:NAME` or `package.module:factory`.

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
    compiled: bool = False
    freeze: tuple[str, ...] = ()
    lora: int | None = None
    lora_targets: tuple[str, ...] = ()
    quantize: str | None = None
    dtype: str | None = None
    config_file: str | None = None
    settings: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._check_source()
        check_optimizer(self.optimizer)
        if self.precision not in PRECISIONS:
            raise UnknownName("precision", self.precision, PRECISIONS, hint="one of " + ", ".join(PRECISIONS))
        if self.attention is not None and self.attention not in ATTENTIONS:
            raise UnknownName("attention", self.attention, ATTENTIONS, hint="one of " + ", ".join(ATTENTIONS))
        if self.dtype is not None and self.dtype not in DTYPES:
            raise UnknownName("dtype", self.dtype, DTYPES, hint="one of " + ", ".join(DTYPES))
        if self.dtype is not None and self._precision.weights not in ("float32", self.dtype):
            raise InvalidValue(f"precision {self.precision} has its own type of weights: leave out dtype {self.dtype}")
        self._check_adapters()
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

    def _check_adapters(self) -> None:
        if self.lora_targets and self.lora is None:
            raise InvalidValue("LoRA targets need a rank: add --lora 16 (in Python: lora=16)")
        if self.quantize is None:
            return
        if self.quantize not in QUANTIZATIONS:
            raise UnknownName("quantization", self.quantize, QUANTIZATIONS, hint="one of " + ", ".join(QUANTIZATIONS))
        if self.source != "hf":
            raise InvalidValue(f"{self.model} cannot be quantized: that is for models of transformers, hf:ORG/NAME")
        if self.lora is None and not self.inference:
            raise InvalidValue(
                f"weights in {self.quantize} are not trained themselves: add --lora 16 (in Python: lora=16), or "
                "--inference"
            )

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
        """What `precision` and `dtype` mean: the types of weights and arithmetic."""
        return self._precision if self.dtype is None else replace(self._precision, weights=self.dtype)

    @property
    def _precision(self) -> Precision:
        return PRECISIONS[self.precision]

    @classmethod
    def from_row(cls, row: dict[str, Any]) -> Configuration:
        """The configuration in a line of measurements; other keys of the line are left out."""
        keys = {spec.name: (FILE_KEYS.get(spec.name, spec.name), spec.name) for spec in fields(cls)}
        found = {
            name: next((row[key] for key in either if row.get(key) is not None), None) for name, either in keys.items()
        }
        values = {name: value for name, value in found.items() if value is not None}
        for name in ("freeze", "lora_targets"):
            if name in values:
                values[name] = tuple(values[name])
        if "model" in values:
            values["model"] = current_name(str(values["model"]))
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

        Weights that were saved, on the hub or in a folder, have the type and the quantization in which they were saved,
        as `from_pretrained` loads them, unless the options say otherwise.

        >>> Configuration.from_options("torchvision:resnet18", batch_size=64, optimizer="sgd").optimizer
        'sgd'
        """
        values: dict[str, Any] = {"batch_size": DEFAULT_BATCH_SIZE}
        for option, value in options.items():
            if option not in MODEL_OPTIONS:
                raise UnknownName("option", option, MODEL_OPTIONS)
            if value is not None:
                values[_FIELDS_OF_OPTIONS.get(option, option)] = value
        for name in ("freeze", "lora_targets"):
            if name in values:
                values[name] = (values[name],) if isinstance(values[name], str) else tuple(values[name])
        if "input_shape" in values:
            values["input_shape"] = list(values["input_shape"])
        if isinstance(values.get("config_file"), dict):
            values["settings"] = values.pop("config_file") | values.get("settings", {})
        elif "config_file" in values:
            values["config_file"] = str(values["config_file"])
        made = cls(model=model, **values)
        if made.source == "hf" and is_checkpoint(made.name):
            saved = read_config(made.name)
            made = replace(made, quantize=made.quantize or quantization_of(saved, made.model))
            if "precision" not in values and made.dtype is None:
                made = replace(made, dtype=weights_type(saved))
        if "precision" not in values and made.dtype is not None:
            made = replace(made, precision=DTYPES[made.dtype], dtype=None)
        return made

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
    from ullage.jobs.sources.names import model_names

    found = [f"{source}:{model}" for source in ("torchvision", "timm", "hf") if model in model_names(source)]
    return f"; did you mean {' or '.join(found)}?" if found else ""


_PACKED = {"gz": "a gzip", "xz": "an xz"}


def read_rows(file: Path) -> Iterator[dict[str, Any]]:
    """The lines of a JSONL file (also packed) of configurations or measurements; a bad line is named by its number."""
    packed = file.suffix.removeprefix(".")
    unpack = {"gz": gzip.decompress, "xz": lzma.decompress}.get(packed, bytes)
    try:
        text = unpack(file.read_bytes()).decode()
    except (gzip.BadGzipFile, zlib.error, lzma.LZMAError, EOFError):
        raise InvalidValue(f"{file} is not {_PACKED[packed]} file, or it is damaged") from None
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


def rows_so_far(file: Path) -> list[dict[str, Any]]:
    """The rows of a file that more are to be added to; there may be no file yet."""
    if not file.exists():
        return []
    cut_torn_line(file)
    return list(read_rows(file))


def cut_torn_line(file: Path) -> None:
    """Cut off an incomplete last row, as a writer leaves it that was killed. Other text is left alone."""
    try:
        content = file.read_bytes()
        whole = content.rfind(b"\n") + 1
        if content[:1] == content[whole : whole + 1] == b"{":
            os.truncate(file, whole)
    except OSError as error:
        raise InvalidValue(f"cannot read {file}: {error.strerror}") from None
