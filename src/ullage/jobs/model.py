"""`Model`: a model by name with its batch, optimizer and precision.

A line in a file of measurements also describes one. The same model can be trained on a real GPU and on a virtual one.
Nothing here imports PyTorch, because shell completion needs these names fast.
"""

import gzip
import json
import lzma
import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, fields, replace
from pathlib import Path
from typing import Any

from ullage.errors import InvalidValue, UnknownName
from ullage.fields import described
from ullage.jobs.optimizers import check_optimizer
from ullage.jobs.sources.hub import is_checkpoint, quantization_of, read_config, weights_type


@dataclass(frozen=True)
class Precision:
    """Types of stored and multiplied numbers, by their names in PyTorch."""

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

# The types of loaded weights, and the precision that uses only that type.
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

DEFAULT_BATCH_SIZE, DEFAULT_PRECISION = 32, "fp32"


def parse_shape(text: str, what: str) -> list[int]:
    """Parse a shape, numbers separated by commas or x; `what` names it in a message."""
    parts = text.replace("x", ",").split(",")
    if not all(part.strip().isdigit() and int(part) for part in parts):
        raise InvalidValue(f"{what} must be whole numbers such as 3,224,224, got {text[:40]!r}")
    return [int(part) for part in parts]


_POSITIVE = ("batch_size", "sequence_length", "num_classes", "gradient_accumulation", "lora")

# The values of a line in a file of measurements, in order, with the shorter keys that are written. A line may use
# either. Most are fields of `Model`; those of `_OF_SOURCES` are values in its `settings`.
ROW_KEYS = {
    "model": "model",
    "batch_size": "batch",
    "optimizer": "opt",
    "precision": "precision",
    "input_shape": "input",
    "num_classes": "classes",
    "channels_last": "channels_last",
    "conf": "conf",
    "hf_config": "hf_config",
    "vocab": "vocab",
    "sequence_length": "seq",
    "attention": "attn",
    "checkpointing": "ckpt",
    "widths": "widths",
    "bn": "bn",
    "drop": "drop",
    "act": "act",
    "gradient_accumulation": "accumulation",
    "inference": "inference",
    "compiled": "compiled",
    "freeze": "freeze",
    "lora": "lora_rank",
    "lora_targets": "lora_targets",
    "quantize": "quantize",
    "dtype": "dtype",
    "config_file": "config_file",
    "settings": "settings",
}
_OTHER_NAMES = {"model": "name", "config_file": "config"}
_OF_SOURCES: dict[str, dict[str, Any]] = {
    "mlp": {"widths": None, "bn": False, "drop": False, "act": "ReLU"},
    "hf": {"conf": None, "hf_config": {}, "vocab": None},
}
_IN_SETTINGS = {key: default for keys in _OF_SOURCES.values() for key, default in keys.items()}
# Files that were measured before factories moved to ullage-lab have their old paths. The first match counts.
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
    """Return the present name of a model.

    >>> current_name("ullage.learn.families:mlp"), current_name("tv:resnet18")
    ('ullage_lab.networks.generated:mlp', 'tv:resnet18')
    """
    for old, new in _MOVED_FACTORIES.items():
        if model.startswith(old):
            return new + model.removeprefix(old)
    return model


Names = Sequence[str]


@dataclass(frozen=True)
class Model:
    """A model by name and how it is trained.

    `name` is `torchvision:NAME` (or `tv:NAME`), `timm:NAME`, `hf:ORG/NAME` (the Hugging Face hub), `hf:FOLDER` (with a
    config.json), `hf:CLASS` (transformers), `package.module:factory`, `path/to/file.py:factory`, or `mlp:NAME` with
    `settings={"widths": [...]}`.

    >>> Model("torchvision:resnet50", batch_size=64, precision="amp_bf16").in_words()
    'batch size 64, precision amp_bf16'
    """

    name: str
    _: KW_ONLY
    batch_size: int = described(DEFAULT_BATCH_SIZE, "Samples in a batch.", letter="b", metavar="N")
    input_shape: Sequence[int] | None = described(
        None, "Shape of one sample, such as 3,224,224.", metavar="C,H,W", default="the model's own"
    )
    sequence_length: int | None = described(
        None, "Tokens in a sample.", metavar="N", default="the model's limit, at most 1024"
    )
    num_classes: int | None = described(None, "Number of classes.", metavar="N", default="the model's own")
    optimizer: str = described(
        "adamw",
        "sgd, sgdm, adam, adamw, adamw_fused, rmsprop, adafactor, or a class of torch.optim.",
        letter="O",
        metavar="NAME",
    )
    precision: str | None = described(
        None,
        "fp32, tf32, amp_fp16, amp_bf16, bf16 or fp16.",
        letter="p",
        metavar="NAME",
        default="fp32, or that of saved weights",
    )
    dtype: str | None = described(
        None, "The type that the weights are loaded in: float32, bfloat16 or float16.", metavar="NAME"
    )
    gradient_accumulation: int = described(1, "Batches for each optimizer step.", metavar="N")
    checkpointing: bool = described(False, "Recompute activations in the backward pass.")
    attention: str | None = described(
        None, "sdpa, eager, or one of PyTorch's kernels: flash, efficient, cudnn, math.", metavar="NAME"
    )
    channels_last: bool = described(False, "Keep images and weights in channels-last order.")
    freeze: str | Names = described(
        (), "Layers that are not trained, such as 'layer1' or 'blocks.[0-5].*'.", metavar="PATTERN"
    )
    lora: int | None = described(None, "Train only LoRA adapters of this rank (needs peft).", metavar="N")
    lora_targets: str | Names = described(
        (), "The layers that get adapters, such as q_proj,v_proj; every linear one but the last.", metavar="NAMES"
    )
    quantize: str | None = described(
        None, "For hf: models, hold the frozen weights in nf4, fp4 or int8 (needs bitsandbytes).", metavar="NAME"
    )
    inference: bool = described(False, "Run the forward pass only, without gradients.")
    compiled: bool = described(False, "Compile the model with torch.compile.")
    config: str | Path | Mapping[str, Any] | None = described(
        None,
        "The config for hf:CLASS: a JSON file, a folder with a config.json, a name of the hub, or its values.",
        metavar="PATH",
    )
    settings: Mapping[str, Any] = described(
        {}, "Values of the config of an hf: model, or arguments of another model.", metavar="NAME=VALUE"
    )

    def __post_init__(self) -> None:
        self._check_source()
        self._put_in_one_form()
        check_optimizer(self.optimizer)
        _check_name("precision", self.precision, PRECISIONS)
        _check_name("attention", self.attention, ATTENTIONS)
        _check_name("dtype", self.dtype, DTYPES)
        if self.dtype is not None and self._precision.weights not in ("float32", self.dtype):
            raise InvalidValue(f"precision {self.precision} has its own type of weights: leave out dtype {self.dtype}")
        self._check_adapters()
        for name in _POSITIVE:
            if getattr(self, name) is not None:
                _check_positive(name, getattr(self, name))
        for length in self.input_shape or ():
            _check_positive("input_shape", length)

    def _check_source(self) -> None:
        if not isinstance(self.name, str) or not self.short_name or not self.name.partition(":")[0]:
            raise InvalidValue(
                f"model must be {'; '.join(SOURCES.values())}. Got {self.name!r}" + _suggestion(str(self.name))
            )
        if self.source == "mlp" and "widths" not in self.settings:
            raise InvalidValue(f"{self.name} needs 'widths'")

    def _put_in_one_form(self) -> None:
        """Normalize values: a single name to a list, a config with values to settings, and `dtype` to a precision.

        The precision of saved weights stays unset, because it requires reading their config (`as_saved`).
        """
        values: dict[str, Any] = {}
        for name in ("freeze", "lora_targets"):
            given = getattr(self, name)
            values[name] = (given,) if isinstance(given, str) else tuple(given)
        if self.input_shape is not None:
            values["input_shape"] = list(self.input_shape)
        if isinstance(self.config, Mapping):
            values |= {"config": None, "settings": {**self.config, **self.settings}}
        elif self.config is not None:
            values["config"] = str(self.config)
        if self.precision is None and not self.is_saved:
            known = self.dtype is not None and self.dtype in DTYPES
            values |= (
                {"precision": DTYPES[str(self.dtype)], "dtype": None} if known else {"precision": DEFAULT_PRECISION}
            )
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def _check_adapters(self) -> None:
        if self.lora_targets and self.lora is None:
            raise InvalidValue("LoRA targets need a rank: add --lora 16 (in Python: lora=16)")
        if self.quantize is None:
            return
        _check_name("quantization", self.quantize, QUANTIZATIONS)
        if self.source != "hf":
            raise InvalidValue(f"{self.name} cannot be quantized: that is for models of transformers, hf:ORG/NAME")
        if self.lora is None and not self.inference:
            raise InvalidValue(
                f"weights in {self.quantize} are not trained themselves: add --lora 16 (in Python: lora=16), or "
                "--inference"
            )

    @property
    def source(self) -> str:
        """Return the source of the model: "torchvision", "timm", "hf", "mlp", or "own" for a factory."""
        return PREFIXES.get(self.name.partition(":")[0], "own")

    @property
    def short_name(self) -> str:
        return self.name.partition(":")[2]

    @property
    def is_saved(self) -> bool:
        """Whether the name refers to saved weights, on the hub or in a folder."""
        return self.source == "hf" and is_checkpoint(self.short_name)

    @property
    def types(self) -> Precision:
        """Return the types of weights and arithmetic, from `precision` and `dtype`."""
        return self._precision if self.dtype is None else replace(self._precision, weights=self.dtype)

    @property
    def _precision(self) -> Precision:
        return PRECISIONS[self.precision or DEFAULT_PRECISION]

    @classmethod
    def from_row(cls, row: Mapping[str, Any]) -> "Model":
        """Read the model in a line of measurements; ignore other keys of the line."""
        named = {name: row.get(key) if row.get(key) is not None else row.get(name) for name, key in ROW_KEYS.items()}
        values = {name: value for name, value in named.items() if value is not None}
        missing = [ROW_KEYS[name] for name in ("model", "batch_size") if name not in values]
        if missing:
            raise InvalidValue(f"a line must have {' and '.join(missing)} to describe a training run")
        values["model"] = current_name(str(values["model"]))
        known = _OF_SOURCES.get(PREFIXES.get(str(values["model"]).partition(":")[0], ""), {})
        own = {name: values[name] for name, default in known.items() if values.get(name, default) != default}
        given = {_OTHER_NAMES.get(name, name): value for name, value in values.items() if name not in _IN_SETTINGS}
        settings = {**own, **given.pop("settings", {})}
        return cls(given.pop("name"), **{"precision": DEFAULT_PRECISION, **given, "settings": settings})

    def to_row(self) -> dict[str, Any]:
        """Return the model as a line of measurements: plain values under the keys of such files."""
        known = _OF_SOURCES.get(self.source, {})
        values = {name: getattr(self, _OTHER_NAMES.get(name, name)) for name in ROW_KEYS if name not in _IN_SETTINGS}
        values |= _IN_SETTINGS | {name: self.settings.get(name, default) for name, default in known.items()}
        values["precision"] = self.precision or DEFAULT_PRECISION
        values["settings"] = {name: value for name, value in self.settings.items() if name not in known}
        plain = {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}
        return {key: plain[name] for name, key in ROW_KEYS.items()}

    def as_saved(self) -> "Model":
        """Return the model with the type and quantization of its saved weights, as `from_pretrained` loads them.

        Other models, and values that the user set, stay unchanged.
        """
        if not self.is_saved:
            return self
        saved = read_config(self.short_name)
        made = replace(self, quantize=self.quantize or quantization_of(saved, self.name))
        if made.precision is not None:
            return made
        dtype = made.dtype or weights_type(saved)
        return replace(made, precision=DTYPES[dtype], dtype=None)

    def in_words(self) -> str:
        """Return the options that differ from their defaults, for messages; always with the batch size."""
        words = []
        for spec in fields(self)[1:]:
            value = getattr(self, spec.name)
            default = DEFAULT_PRECISION if spec.name == "precision" else spec.default
            if spec.name == "batch_size" or (value != default and value not in ({}, (), None)):
                text = ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
                words.append(f"{spec.name.replace('_', ' ')} {text}")
        return ", ".join(words)


def _check_name(kind: str, name: str | None, valid: Mapping[str, Any]) -> None:
    if name is not None and name not in valid:
        raise UnknownName(kind, name, valid, hint="one of " + ", ".join(valid))


def _check_positive(option: str, value: Any) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise InvalidValue(f"{option} must be a whole number of at least 1, got {value!r}")


def _suggestion(model: str) -> str:
    """Suggest models for a name without its source."""
    from ullage.jobs.sources.names import model_names

    suggestions = [f"{source}:{model}" for source in ("torchvision", "timm", "hf") if model in model_names(source)]
    return f"; did you mean {' or '.join(suggestions)}?" if suggestions else ""


_PACKED = {"gz": "a gzip", "xz": "an xz"}


def read_rows(file: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a JSONL file (perhaps compressed) of configurations or measurements; errors name the line."""
    packed = file.suffix.removeprefix(".")
    unpack = {"gz": gzip.decompress, "xz": lzma.decompress}.get(packed, bytes)
    try:
        text = unpack(file.read_bytes()).decode()
    except (gzip.BadGzipFile, zlib.error, lzma.LZMAError, EOFError):
        raise InvalidValue(f"{file} is not {_PACKED[packed]} file, or it is damaged") from None
    except OSError as error:
        raise InvalidValue(f"cannot read {file}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise InvalidValue(f"{file} must be a text file of JSON objects, one per line") from None
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise InvalidValue(f"{file}, line {number}: not JSON ({error})") from None
        if not isinstance(row, dict):
            raise InvalidValue(f"{file}, line {number} must be a JSON object, got {type(row).__name__}")
        yield row


def rows_so_far(file: Path) -> list[dict[str, Any]]:
    """Return the rows of a file before adding more; none if there is no file."""
    if not file.exists():
        return []
    try:
        content = file.read_bytes()
        whole = content.rfind(b"\n") + 1
        if content[:1] == content[whole : whole + 1] == b"{":
            os.truncate(file, whole)
    except OSError as error:
        raise InvalidValue(f"cannot read {file}: {error.strerror}") from None
    return list(read_rows(file))
