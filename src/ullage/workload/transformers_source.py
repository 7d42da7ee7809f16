"""`hf:CLASS`: a class of transformers with a config of its own, a file's, or that of a model folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from torch import nn

from ullage.errors import InvalidValue, MissingPackage, UnknownName
from ullage.virtual.torchvision_operators import make_torchvision_importable
from ullage.workload.assumptions import assume
from ullage.workload.configuration import Configuration
from ullage.workload.names import model_names

_PRECISION_WORDS = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


def build_transformers(configuration: Configuration) -> nn.Module:
    """The model, untrained, with the attention that was asked for and without a cache of keys and values."""
    make_torchvision_importable()
    try:
        import transformers
    except ImportError:
        raise MissingPackage("transformers", "models named hf:CLASS") from None
    values, name = _values_and_class_name(configuration)
    made_by = getattr(transformers, name, None)
    if made_by is None or not hasattr(made_by, "from_pretrained"):
        raise UnknownName("transformers class", name, model_names("hf"))
    config = _config(configuration, made_by, values)
    make = made_by.from_config if name.startswith("AutoModel") else made_by._from_config
    options = {} if configuration.attn is None else {"attn_implementation": _implementation(configuration.attn)}
    try:
        model: Any = make(config, **options)
    except (TypeError, ValueError, KeyError, AttributeError, ImportError, ZeroDivisionError) as error:
        raise InvalidValue(f"hf:{name} cannot be built: {_first_line(error)}") from error
    if hasattr(model.config, "use_cache"):
        model.config.use_cache = False
    if (
        getattr(model.config, "is_encoder_decoder", False)
        and getattr(model.config, "decoder_start_token_id", None) is None
    ):
        model.config.decoder_start_token_id = getattr(model.config, "pad_token_id", None) or 0
    if getattr(model.config, "pad_token_id", None) is None and name.endswith("ForSequenceClassification"):
        model.config.pad_token_id = 0  # needed for batches of more than one
    built: nn.Module = model
    return built


def _values_and_class_name(configuration: Configuration) -> tuple[dict[str, Any], str]:
    """What the config file says, and the class to build."""
    file = Path(configuration.config_file) if configuration.config_file else None
    name = configuration.name
    if "/" in name or "\\" in name or name in (".", ".."):
        file, name = Path(name), ""
    values = _read_config(file) if file is not None else {}
    if not name:
        names = values.get("architectures") or []
        if not names:
            raise InvalidValue(f"{file} names no architecture; name the class: hf:CLASS --config {file}")
        name = names[0]
    return values, name


def _read_config(file: Path) -> dict[str, Any]:
    path = file / "config.json" if file.is_dir() else file
    try:
        values = json.loads(path.read_text())
    except OSError as error:
        raise InvalidValue(f"cannot read {path}: {error.strerror}") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise InvalidValue(f"{path} is not JSON ({error})") from None
    if not isinstance(values, dict):
        raise InvalidValue(f"{path}: needed a JSON object; found {type(values).__name__}")
    return values


def _config(configuration: Configuration, made_by: Any, values: dict[str, Any]) -> Any:
    import transformers

    if configuration.conf is not None:  # a measured run: the class and its arguments, no more
        if not hasattr(transformers, f"{configuration.conf}Config"):
            raise UnknownName("transformers class", f"{configuration.conf}Config", dir(transformers))
        return getattr(transformers, f"{configuration.conf}Config")(**configuration.hf_config)
    settings = dict(configuration.settings)
    config_class = _config_class(made_by, settings.pop("model_type", None) or values.get("model_type"))
    _check_settings(configuration, config_class, settings)
    if configuration.classes is not None:
        settings.setdefault("num_labels", configuration.classes)
    if configuration.input is not None:
        settings |= {"image_size": configuration.input[-1], "num_channels": configuration.input[0]}
    if configuration.seq is not None:
        settings |= _longer_positions(config_class, values | settings, configuration.seq)
    try:
        config = config_class.from_dict(_merged(values, settings))
    except Exception as error:  # its checks raise errors of several packages
        raise InvalidValue(f"{configuration.model}: its config cannot be made: {_first_line(error)}") from error
    if config.dtype is not None:
        if configuration.precision != _PRECISION_WORDS.get(str(config.dtype).removeprefix("torch.")):
            assume(f"weights as --precision {configuration.precision} says, not {config.dtype} as the config says")
        config.dtype = None
    return config


def _config_class(made_by: Any, model_type: str | None) -> Any:
    from transformers import CONFIG_MAPPING

    if model_type is not None:
        if model_type not in CONFIG_MAPPING:
            raise UnknownName("model_type", str(model_type), CONFIG_MAPPING.keys())
        return CONFIG_MAPPING[model_type]
    if getattr(made_by, "config_class", None) is None:
        raise InvalidValue(
            f"{made_by.__name__} needs to know which model: --config FILE.json, --config FOLDER, or "
            "--set model_type=gpt2"
        )
    return made_by.config_class


def _check_settings(configuration: Configuration, config_class: Any, settings: dict[str, Any]) -> None:
    """transformers takes any key, also a misspelt one, and then does nothing with it."""
    try:
        example = config_class()
    except Exception:
        return  # a config that cannot be made without arguments: nothing to compare with
    known = {name for name in dir(example) if not name.startswith("_")} | set(example.attribute_map)
    for key in settings:
        if key.partition(".")[0] not in known:
            keys = set(example.to_dict()) | set(example.attribute_map)
            raise UnknownName(f"setting of {configuration.name}", key, keys)


def _merged(values: dict[str, Any], settings: dict[str, Any]) -> dict[str, Any]:
    """The settings over the values; `text_config.hidden_size` reaches into a nested config."""
    merged: dict[str, Any] = json.loads(json.dumps(values))
    for key, value in settings.items():
        target, *path = merged, *key.split(".")
        for part in path[:-1]:
            target = target.setdefault(part, {})
            if not isinstance(target, dict):
                raise InvalidValue(f"{key!r} cannot be set: {part!r} is no nested config")
        target[path[-1]] = value
    return merged


def _longer_positions(config_class: Any, values: dict[str, Any], length: int) -> dict[str, int]:
    """A longer sequence than the model has places for: it gets more places."""
    for key in ("max_position_embeddings", "n_positions", "max_seq_len"):
        limit = values.get(key, getattr(config_class, key, None))
        if limit is None:
            try:
                limit = getattr(config_class(), key, None)
            except Exception:
                limit = None
        if isinstance(limit, int) and 0 < limit < length:
            assume(f"{key} raised from {limit} to {length} for this sequence length")
            return {key: length}
    return {}


def _implementation(attention: str) -> str:
    """`flash`, `efficient` and the like are kernels of scaled_dot_product_attention, chosen around the loop."""
    return "eager" if attention == "eager" else "sdpa"


def _first_line(error: BaseException) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()] or [""]
    return f"{type(error).__name__}: {lines[0]}"
