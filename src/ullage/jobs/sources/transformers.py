"""Models of transformers: `hf:ORG/NAME` with its config on the hub, `hf:FOLDER` with that in a folder, or `hf:CLASS`.

Inputs (text, images or speech) and labels follow from the config. `main_input_name` names the kind of input, and the
class name shows the model's purpose.
"""

import importlib.util
import inspect
import json
import logging
from typing import Any

import torch
from torch import nn

from ullage.errors import InvalidValue, MissingPackage, UllageError, UnknownName
from ullage.jobs.model import Model, Precision
from ullage.jobs.sources.hub import is_checkpoint, read_config
from ullage.jobs.sources.names import model_names
from ullage.jobs.tasks import Task, assume
from ullage.sandbox.protocol import error_text
from ullage.virtual.torch_cuda.torchvision import make_torchvision_importable


def build_transformers(configuration: Model) -> nn.Module:
    """Build the untrained model, with the chosen attention and without a key-value cache."""
    make_torchvision_importable()
    try:
        import transformers
    except ImportError:
        raise MissingPackage("transformers", "models named hf:NAME") from None
    values, name = _values_and_class_name(configuration)
    made_by = getattr(transformers, name, None)
    if made_by is None or not hasattr(made_by, "from_pretrained"):
        raise UnknownName("transformers class", name, model_names("hf"))
    config = _config(configuration, made_by, values)
    make = made_by.from_config if name.startswith("AutoModel") else made_by._from_config
    options = (
        {} if configuration.attention is None else {"attn_implementation": _implementation(configuration.attention)}
    )
    try:
        if configuration.quantize is not None:
            model: Any = _quantized(configuration, make, config, options)
        else:
            model = make(config, **options)
    except UllageError:
        raise
    except (TypeError, ValueError, KeyError, AttributeError, ImportError, ZeroDivisionError) as error:
        raise InvalidValue(f"hf:{name} cannot be built: {error_text(error)}") from error
    if hasattr(model.config, "use_cache"):
        model.config.use_cache = False
    if (
        getattr(model.config, "is_encoder_decoder", False)
        and getattr(model.config, "decoder_start_token_id", None) is None
    ):
        model.config.decoder_start_token_id = getattr(model.config, "pad_token_id", None) or 0
    if getattr(model.config, "pad_token_id", None) is None and name.endswith("ForSequenceClassification"):
        model.config.pad_token_id = 0  # needed for batches with more than one sample
    built: nn.Module = model
    return built


def _quantized(configuration: Model, make: Any, config: Any, options: dict[str, Any]) -> Any:
    """Return the model with quantized weights on the GPU, from the code of transformers that loads checkpoints."""
    import transformers

    needed = ["bitsandbytes", "accelerate"] + ["peft"] * (configuration.lora is not None)
    missing = [package for package in needed if importlib.util.find_spec(package) is None]
    if missing:
        raise MissingPackage(missing[0], "quantized weights (--quantize)", *missing[1:])
    logging.getLogger("bitsandbytes").setLevel(logging.CRITICAL)  # it warns about missing CUDA libraries
    transformers.utils.logging.disable_progress_bar()
    config.quantization_config = None
    with torch.device("meta"):
        empty = make(config, **options)
    weights = {name: torch.empty(part.shape, dtype=part.dtype) for name, part in empty.state_dict().items()}
    kind, low = configuration.quantize, getattr(torch, configuration.types.weights)
    how: Any = transformers.BitsAndBytesConfig(load_in_8bit=True)
    if kind != "int8":
        how = transformers.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type=kind, bnb_4bit_compute_dtype=low)
    assume(f"weights of linear layers in {kind}, by bitsandbytes, arithmetic in {configuration.types.weights}")
    return type(empty).from_pretrained(
        None, config=config, state_dict=weights, quantization_config=how, device_map={"": "cuda"}, dtype=low, **options
    )


def _values_and_class_name(configuration: Model) -> tuple[dict[str, Any], str]:
    """Return the values of the config, and the class to build."""
    place, name = configuration.config, configuration.short_name
    if is_checkpoint(name):
        place, name = name, ""
    values = read_config(str(place)) if place is not None else {}
    if not name:
        if "auto_map" in values and values.get("model_type") not in _model_types():
            raise InvalidValue(
                f"{place} has its own model code, which Ullage runs only in a script; estimate a script that loads it "
                "with trust_remote_code=True"
            )
        names = values.get("architectures") or []
        if not names:
            raise InvalidValue(f"{place} names no architecture; give the class: hf:CLASS --set config={place}")
        name = names[0]
    return values, name


def _model_types() -> Any:
    from transformers import CONFIG_MAPPING

    return CONFIG_MAPPING


def _config(configuration: Model, made_by: Any, values: dict[str, Any]) -> Any:
    import transformers

    settings = dict(configuration.settings)
    measured, values_measured, _ = (settings.pop(name, None) for name in ("conf", "hf_config", "vocab"))
    if measured is not None:  # a measured run names the class and its arguments
        if not hasattr(transformers, f"{measured}Config"):
            raise UnknownName("transformers class", f"{measured}Config", dir(transformers))
        return getattr(transformers, f"{measured}Config")(**values_measured or {})
    config_class = _config_class(made_by, settings.pop("model_type", None) or values.get("model_type"))
    _check_settings(configuration, config_class, settings)
    if configuration.num_classes is not None:
        settings.setdefault("num_labels", configuration.num_classes)
    if configuration.input_shape is not None:
        settings |= {"image_size": configuration.input_shape[-1], "num_channels": configuration.input_shape[0]}
    if configuration.sequence_length is not None:
        settings |= _longer_positions(config_class, values | settings, configuration.sequence_length)
    try:
        config = config_class.from_dict(_merged(values, settings))
    except Exception as error:  # its checks raise exceptions of several packages
        raise InvalidValue(f"{configuration.name}: its config is not valid: {error_text(error)}") from error
    saved, types = config.dtype and str(config.dtype).removeprefix("torch."), configuration.types
    of_checkpoint = is_checkpoint(configuration.short_name)
    if of_checkpoint and types.weights == (saved or "float32"):
        unsaid = "" if saved else "; its config does not say so"
        assume(f"weights in {types.weights}, the type in which {configuration.short_name} was saved{unsaid}")
    elif saved and types != Precision(types.meaning, saved):
        assume(f"weights in {types.weights} as requested; the config says {saved}")
    config.dtype = types.weights if of_checkpoint else None
    return config


def _config_class(made_by: Any, model_type: str | None) -> Any:
    if model_type is not None:
        if model_type not in _model_types():
            raise UnknownName("model_type", str(model_type), _model_types().keys())
        return _model_types()[model_type]
    if getattr(made_by, "config_class", None) is None:
        raise InvalidValue(
            f"{made_by.__name__} needs a model type: --set config=FILE.json (or a folder), or --set model_type=gpt2"
        )
    return made_by.config_class


def _check_settings(configuration: Model, config_class: Any, settings: dict[str, Any]) -> None:
    """Refuse unknown keys, which transformers would ignore."""
    try:
        example = config_class()
    except Exception:
        return  # the config needs arguments: nothing to compare with
    known = {name for name in dir(example) if not name.startswith("_")} | set(example.attribute_map)
    for key in settings:
        if key.partition(".")[0] not in known:
            keys = set(example.to_dict()) | set(example.attribute_map)
            raise UnknownName(f"setting of {configuration.short_name}", key, keys)


def _merged(values: dict[str, Any], settings: dict[str, Any]) -> dict[str, Any]:
    """Return the values, overridden by the settings; `text_config.hidden_size` sets a value in a nested config."""
    merged: dict[str, Any] = json.loads(json.dumps(values))
    for key, value in settings.items():
        target, *path = merged, *key.split(".")
        for part in path[:-1]:
            target = target.setdefault(part, {})
            if not isinstance(target, dict):
                raise InvalidValue(f"{key!r} cannot be set: {part!r} is not a nested config")
        target[path[-1]] = value
    return merged


def _longer_positions(config_class: Any, values: dict[str, Any], length: int) -> dict[str, int]:
    """Return settings with more positions, if the sequence is longer than the model allows."""
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
    """Return the implementation; the training loop chooses the kernel of "sdpa", such as `flash` or `efficient`."""
    return "eager" if attention == "eager" else "sdpa"


LONGEST_DEFAULT = 1024  # tokens; many models allow far more than is usual in training
DEFAULT_LENGTH = 512  # tokens, if a model has no limit
DEFAULT_SAMPLES = 16_000 * 10  # ten seconds of speech
SPEECH_LABELS = 64  # tokens of a transcript
CHOICES = 4


def is_transformers_model(model: nn.Module) -> bool:
    """Whether a model comes from transformers, without importing it."""
    return hasattr(model, "main_input_name") and hasattr(model, "config")


def _places(model: nn.Module) -> int | None:
    """Return the number of positions of a model that reserves some for padding, as RoBERTa does."""
    for name, part in model.named_modules():
        if name.endswith("position_embeddings") and isinstance(part, nn.Embedding) and part.padding_idx is not None:
            return part.num_embeddings - part.padding_idx - 1
    return None


class TransformersTask(Task):
    def __init__(self, configuration: Model, model: Any) -> None:
        super().__init__([], 0)
        self._wanted, self._config, self._class = configuration, model.config, type(model).__name__
        self._takes = inspect.signature(model.forward).parameters
        self._main: str = model.main_input_name
        self._places = _places(model)
        self._text: Any = getattr(model.config, "text_config", None) or model.config
        self._has_loss = True

    def batch(self, size: int) -> tuple[Any, Any]:
        """Return the keyword arguments of the model: inputs and labels."""
        if self._main == "input_ids" and self._wanted.input_shape is not None and "pixel_values" not in self._takes:
            raise InvalidValue(f"hf:{self._class} takes ids, not an input shape: use --sequence-length")
        if self._main == "pixel_values" and self._wanted.sequence_length is not None and "input_ids" not in self._takes:
            raise InvalidValue(f"hf:{self._class} takes images, not sequences: use --input-shape 3,224,224")
        makers = {"pixel_values": self._images, "input_values": self._audio, "input_features": self._spectrogram}
        inputs = {self._main: makers.get(self._main, self._ids)(size)}
        if "return_loss" in self._takes and {"pixel_values", "input_ids"} <= set(self._takes):  # such as CLIP
            inputs |= {"pixel_values": self._images(size), "input_ids": self._ids(size)}
            return inputs, {"return_loss": True}
        targets = self._labels(size, inputs[self._main])
        self._has_loss = bool(targets) or "MAE" in self._class
        return inputs, targets

    def forward(self, model: nn.Module, inputs: Any, targets: Any) -> Any:
        """Return the model's own loss; drop the rest of its output."""
        out = model(**inputs, **targets)
        if self._has_loss and getattr(out, "loss", None) is not None:
            return out.loss
        assume(f"{self._class} has no loss: the mean of its first output is used")
        return out[0].float().mean()

    def loss(self, out: Any, targets: Any) -> torch.Tensor:
        loss: torch.Tensor = out
        return loss

    def predict(self, model: nn.Module, inputs: Any, targets: Any) -> Any:
        """Run the forward pass without labels; a decoder gets its tokens."""
        if "CausalLM" in self._class or "LMHead" in self._class or "ConditionalGeneration" in self._class:
            assume("inference: one forward pass; generation and its cache of keys and values are not counted")
        if getattr(self._config, "is_encoder_decoder", False) and "decoder_input_ids" in self._takes:
            return model(**inputs, decoder_input_ids=targets["labels"])
        return model(**inputs)

    # Inputs

    def _ids(self, size: int) -> torch.Tensor:
        shape = (size, CHOICES, self._length()) if self._class.endswith("ForMultipleChoice") else (size, self._length())
        return torch.randint(0, self._vocabulary(), shape)

    def _vocabulary(self) -> int:
        words = self._wanted.settings.get("vocab") or getattr(self._text, "vocab_size", None)
        if words is None:
            raise InvalidValue(f"the config of {self._class} has no vocab_size, so no ids can be made for it")
        return int(words)

    def _length(self) -> int:
        if self._wanted.sequence_length is not None:
            return self._wanted.sequence_length
        limits = [getattr(self._text, key, None) for key in ("max_position_embeddings", "n_positions", "max_seq_len")]
        limit = next((limit for limit in limits if isinstance(limit, int) and limit > 0), None)
        length = DEFAULT_LENGTH if limit is None else min(limit, LONGEST_DEFAULT)
        length = min(length, self._places or length)
        why = "the model has no limit" if limit is None else f"the model allows {limit}"
        assume(f"sequence length {length} ({why}); no padding")
        return length

    def _images(self, size: int) -> torch.Tensor:
        vision = getattr(self._config, "vision_config", None) or self._config
        channels = int(getattr(vision, "num_channels", 3))
        sides: Any = getattr(vision, "image_size", None)
        if self._wanted.input_shape is not None:
            shape = list(self._wanted.input_shape)
        else:
            height, width = sides if isinstance(sides, list | tuple) else (sides or 224, sides or 224)
            shape = [channels, int(height), int(width)]
            assume(f"input shape {','.join(map(str, shape))}: the default of {self._class}")
        return torch.randn(size, *shape)

    def _audio(self, size: int) -> torch.Tensor:
        bins = getattr(self._config, "num_mel_bins", None)
        if bins and hasattr(self._config, "max_length"):  # a spectrogram of a fixed length, such as for AST
            return torch.randn(size, int(self._wanted.sequence_length or self._config.max_length), int(bins))
        samples = self._wanted.sequence_length or DEFAULT_SAMPLES
        if self._wanted.sequence_length is None:
            assume(f"{samples} samples of sound: ten seconds at 16 kHz")
        return torch.randn(size, samples)

    def _spectrogram(self, size: int) -> torch.Tensor:
        bins: Any = getattr(self._config, "num_mel_bins", None) or getattr(self._config, "feature_size", 80)
        frames = 2 * getattr(self._config, "max_source_positions", 1500)  # two frames per position
        return torch.randn(size, int(bins), int(frames))

    # Labels

    def _labels(self, size: int, inputs: torch.Tensor) -> dict[str, Any]:
        name, text = self._class, self._main == "input_ids"
        classes = int(getattr(self._config, "num_labels", 2) or 2)
        if name.endswith("ForQuestionAnswering") and text:
            places = {key: torch.randint(0, inputs.shape[-1], (size,)) for key in ("start_positions", "end_positions")}
            return {key: value for key, value in places.items() if key in self._takes}
        if name.endswith("Detection") or "Segmentation" in name and "Semantic" not in name:
            raise InvalidValue(
                f"hf:{name}: made-up labels cannot train it; write a training function and estimate that"
            )
        if "labels" not in self._takes:
            return {}
        labels: dict[str, Any] = {}
        shape: tuple[int, ...]
        if name.endswith("ForPreTraining") and "next_sentence_label" in self._takes:
            labels["next_sentence_label"] = torch.randint(0, 2, (size,))
        if name.endswith(("ForMultipleChoice", "ForNextSentencePrediction")):
            shape, limit = (size,), CHOICES if name.endswith("Choice") else 2
        elif name.endswith("Classification") and not name.endswith("ForTokenClassification"):
            shape, limit = (size,), classes
        elif name.endswith("ForTokenClassification"):
            shape, limit = tuple(inputs.shape), classes
        elif name.endswith("ForSemanticSegmentation"):
            shape, limit = (size, *inputs.shape[-2:]), classes
        elif text:
            shape, limit = tuple(inputs.shape), self._vocabulary()
        elif self._main == "pixel_values":
            return {}
        else:
            assume(f"transcripts of {SPEECH_LABELS} tokens")
            shape, limit = (size, SPEECH_LABELS), self._vocabulary()
        return {"labels": torch.randint(0, limit, shape)} | labels
