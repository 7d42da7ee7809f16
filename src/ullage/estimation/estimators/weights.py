"""Files of weights: written completely or not at all, with a card that describes their training."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from ullage.errors import InvalidValue

SHIPPED = Path(__file__).parent / "data"
FORMAT = 1
Network = TypeVar("Network", bound=nn.Module)


def write_weights(path: Path, content: bytes) -> None:
    """Replace a file; if that fails, the old one stays. safetensors' own `save_file` lets no other user read it."""
    new = path.with_name(path.name + ".new")
    try:
        new.write_bytes(content)
        new.rename(path)
    except OSError as error:
        new.unlink(missing_ok=True)
        raise InvalidValue(f"cannot write the weights to {path}: {error.strerror or error}") from None


@dataclass
class ModelCard:
    """The description of a file of weights.

    There are `bins` classes of `bin` bytes, the last one open. `test` names the rows that were held out, by the key of
    their configuration, so that an evaluation on the same data uses only those.
    """

    family: str
    estimator: str
    bin: int
    bins: int
    gpu: str = "H200"
    rows: int = 0
    seed: int = 0
    figures: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    range: list[int] = field(default_factory=list)
    test: list[str] = field(default_factory=list)


def save_network(network: nn.Module, card: ModelCard, facts: Mapping[str, Any], path: Path) -> None:
    """Write weights and card; `facts` describe the inputs of the network."""
    from safetensors.torch import save as packed

    tensors = {name: value.contiguous() for name, value in network.state_dict().items()}
    metadata = {"card": json.dumps(asdict(card)), "facts": json.dumps({"format": FORMAT, **facts})}
    write_weights(path, packed(tensors, metadata))


def load_network(
    name: str, path: Path, build: Callable[[ModelCard], Network], facts: Callable[[ModelCard], Mapping[str, Any]]
) -> tuple[Network, ModelCard]:
    """Return the network of a file, in evaluation mode, and its card; `name` is that of the estimator."""
    with read_weights(name, path) as (tensors, metadata):
        card = ModelCard(**json.loads(metadata["card"]))
        _check(json.loads(metadata["facts"]), {"format": FORMAT, **facts(card)}, path)
        network = build(card)
        network.load_state_dict(tensors)
    return network.eval(), card


@contextlib.contextmanager
def read_weights(name: str, path: Path) -> Iterator[tuple[dict[str, torch.Tensor], dict[str, str]]]:
    """Read the tensors and the metadata of a file; what does not suit the estimator `name` is refused."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "pt") as file:
            yield {key: file.get_tensor(key) for key in file.keys()}, file.metadata() or {}  # noqa: SIM118
    except (OSError, SafetensorError, KeyError, TypeError, json.JSONDecodeError, RuntimeError) as error:
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise InvalidValue(
            f"{path} must have weights of {name}: {reason}; 'ullage lab train {name} --out {path.name}' makes them"
        ) from None


def _check(found: Mapping[str, Any], needed: Mapping[str, Any], path: Path) -> None:
    """Refuse weights that were trained on other inputs: they would load if sizes agree, and give wrong answers."""
    if found != needed:
        raise InvalidValue(f"{path} was trained by another version of Ullage (its inputs are {found}, not {needed})")


@contextlib.contextmanager
def plain_products() -> Iterator[None]:
    """Multiply without oneDNN, whose preparation takes five times as long as the product of such small matrices."""
    before = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(before)


def probabilities(network: nn.Module, jobs: Any) -> torch.Tensor:
    """Return the probability of every bin [jobs, bins], from the mean of the members' scores."""
    with torch.inference_mode(), plain_products():
        return torch.softmax(network(jobs), dim=1)
