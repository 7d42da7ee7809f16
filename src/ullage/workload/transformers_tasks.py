"""What a transformers model is trained on, made from its own config: text, images or speech, and the labels.

A model says by `main_input_name` what it takes and by its class name what it is for.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn

from ullage.errors import InvalidValue
from ullage.workload.assumptions import assume
from ullage.workload.configuration import Configuration
from ullage.workload.tasks import Task

LONGEST_DEFAULT = 1024  # tokens; many models allow far more than anybody trains with
DEFAULT_LENGTH = 512  # tokens, where a model has no limit
DEFAULT_SAMPLES = 16_000 * 10  # ten seconds of speech
SPEECH_LABELS = 64  # tokens of a transcript
CHOICES = 4


def is_transformers_model(model: nn.Module) -> bool:
    """Whether a model is one of transformers, without importing that."""
    return hasattr(model, "main_input_name") and hasattr(model, "config")


def _places(model: nn.Module) -> int | None:
    """How many positions a model has room for, where some of its places are for padding, as in RoBERTa."""
    for name, part in model.named_modules():
        if name.endswith("position_embeddings") and isinstance(part, nn.Embedding) and part.padding_idx is not None:
            return part.num_embeddings - part.padding_idx - 1
    return None


class TransformersTask(Task):
    """Inputs and labels for one model."""

    def __init__(self, configuration: Configuration, model: Any) -> None:
        super().__init__([], 0)
        self._wanted, self._config, self._class = configuration, model.config, type(model).__name__
        self._takes = inspect.signature(model.forward).parameters
        self._main: str = model.main_input_name
        self._places = _places(model)
        self._text: Any = getattr(model.config, "text_config", None) or model.config
        self._has_loss = True

    def batch(self, size: int) -> tuple[Any, Any]:
        """Keyword arguments of the model: the inputs, and the labels."""
        self._check_options()
        makers = {"pixel_values": self._images, "input_values": self._audio, "input_features": self._spectrogram}
        inputs = {self._main: makers.get(self._main, self._ids)(size)}
        if "return_loss" in self._takes and {"pixel_values", "input_ids"} <= set(self._takes):  # as CLIP
            inputs |= {"pixel_values": self._images(size), "input_ids": self._ids(size)}
            return inputs, {"return_loss": True}
        targets = self._labels(size, inputs[self._main])
        self._has_loss = bool(targets) or "MAE" in self._class
        return inputs, targets

    def forward(self, model: nn.Module, inputs: Any, targets: Any) -> Any:
        """The model's own loss; nothing else of its output is kept."""
        out = model(**inputs, **targets)
        if self._has_loss and getattr(out, "loss", None) is not None:
            return out.loss
        assume(f"{self._class} has no loss of its own: the mean of its first output was taken")
        return out[0].float().mean()

    def loss(self, out: Any, targets: Any) -> torch.Tensor:
        """It came out of the forward pass."""
        loss: torch.Tensor = out
        return loss

    def predict(self, model: nn.Module, inputs: Any, targets: Any) -> Any:
        """The forward pass without labels; a decoder gets its tokens."""
        if "CausalLM" in self._class or "LMHead" in self._class or "ConditionalGeneration" in self._class:
            assume("inference: one forward pass; generation and its cache of keys and values are not counted")
        if getattr(self._config, "is_encoder_decoder", False) and "decoder_input_ids" in self._takes:
            return model(**inputs, decoder_input_ids=targets["labels"])
        return model(**inputs)

    # Inputs

    def _check_options(self) -> None:
        if self._main == "input_ids" and self._wanted.input is not None and "pixel_values" not in self._takes:
            raise InvalidValue(f"hf:{self._class} takes ids, not an input shape: use --sequence-length")
        if self._main == "pixel_values" and self._wanted.seq is not None and "input_ids" not in self._takes:
            raise InvalidValue(f"hf:{self._class} takes images, not sequences: use --input-shape 3,224,224")

    def _ids(self, size: int) -> torch.Tensor:
        shape = (size, CHOICES, self._length()) if self._class.endswith("ForMultipleChoice") else (size, self._length())
        return torch.randint(0, self._vocabulary(), shape)

    def _vocabulary(self) -> int:
        words = self._wanted.vocab or getattr(self._text, "vocab_size", None)
        if words is None:
            raise InvalidValue(f"the config of {self._class} has no vocab_size, so no ids can be made for it")
        return int(words)

    def _length(self) -> int:
        if self._wanted.seq is not None:
            return self._wanted.seq
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
        if self._wanted.input is not None:
            shape = list(self._wanted.input)
        else:
            height, width = sides if isinstance(sides, list | tuple) else (sides or 224, sides or 224)
            shape = [channels, int(height), int(width)]
            assume(f"input shape {','.join(map(str, shape))}: what {self._class} is made for")
        return torch.randn(size, *shape)

    def _audio(self, size: int) -> torch.Tensor:
        bins = getattr(self._config, "num_mel_bins", None)
        if bins and hasattr(self._config, "max_length"):  # a spectrogram of a fixed length, as AST
            return torch.randn(size, int(self._wanted.seq or self._config.max_length), int(bins))
        samples = self._wanted.seq or DEFAULT_SAMPLES
        if self._wanted.seq is None:
            assume(f"{samples} samples of sound: ten seconds at 16 kHz")
        return torch.randn(size, samples)

    def _spectrogram(self, size: int) -> torch.Tensor:
        bins: Any = getattr(self._config, "num_mel_bins", None) or getattr(self._config, "feature_size", 80)
        frames = 2 * getattr(self._config, "max_source_positions", 1500)  # two frames a position
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
