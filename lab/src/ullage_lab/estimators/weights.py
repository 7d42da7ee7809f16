"""Writes files of weights completely or not at all."""

import json
from dataclasses import asdict
from pathlib import Path

from torch import nn

from ullage.errors import InvalidValue
from ullage.estimation.estimators.gpumemnet.networks import inputs_of
from ullage.estimation.estimators.weights import ModelCard


def write_weights(path: Path, content: bytes) -> None:
    """Replace a file; if that fails, the old one stays. safetensors' own `save_file` lets no other user read it."""
    new = path.with_name(path.name + ".new")
    try:
        new.write_bytes(content)
        new.rename(path)
    except OSError as error:
        new.unlink(missing_ok=True)
        raise InvalidValue(f"cannot write the weights to {path}: {error.strerror or error}") from None


def save_network(network: nn.Module, card: ModelCard, path: Path) -> None:
    from safetensors.torch import save as packed

    tensors = {name: value.contiguous() for name, value in network.state_dict().items()}
    write_weights(path, packed(tensors, {"card": json.dumps(asdict(card)), "facts": json.dumps(inputs_of(card))}))
