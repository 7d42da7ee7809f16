"""Files of weights: written whole or not at all, and a card beside the weights that says what they were trained on."""

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
    """Write a file in place of the one that is there, which stays as it is if that fails.

    safetensors' own `save_file` gives files that nobody else may read.
    """
    new = path.with_name(path.name + ".new")
    try:
        new.write_bytes(content)
        new.rename(path)
    except OSError as error:
        new.unlink(missing_ok=True)
        raise InvalidValue(f"cannot write the weights to {path}: {error.strerror or error}") from None


@dataclass
class ModelCard:
    """What a file of weights tells about itself.

    `bins` classes of `bin` bytes, the last one open; `test` names the rows that were held out, by the key of their
    configuration, so that an evaluation on the same data uses those and no other.
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
    """Write weights and card; `facts` tell what inputs the network takes."""
    from safetensors.torch import save as packed

    tensors = {name: value.contiguous() for name, value in network.state_dict().items()}
    told = {"card": json.dumps(asdict(card)), "facts": json.dumps({"format": FORMAT, **facts})}
    write_weights(path, packed(tensors, told))


def load_network(
    name: str, path: Path, build: Callable[[ModelCard], Network], facts: Callable[[ModelCard], Mapping[str, Any]]
) -> tuple[Network, ModelCard]:
    """The network of a file, ready to answer, and its card; `name` is that of the estimator."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            card = ModelCard(**json.loads(metadata["card"]))
            _check(json.loads(metadata["facts"]), {"format": FORMAT, **facts(card)}, path)
            network = build(card)
            network.load_state_dict({name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118
    except (OSError, SafetensorError, KeyError, TypeError, json.JSONDecodeError, RuntimeError) as error:
        told = str(error).splitlines() or [type(error).__name__]
        raise InvalidValue(
            f"needed weights of {name} in {path}: {told[0]}; 'ullage lab train {name} --out {path.name}' makes them"
        ) from None
    return network.eval(), card


def _check(found: Mapping[str, Any], needed: Mapping[str, Any], path: Path) -> None:
    """Weights that were trained on other inputs would load where sizes agree, and answer nonsense."""
    if found != needed:
        raise InvalidValue(f"{path} was trained by another version of Ullage (its inputs {found}, needed {needed})")


@contextlib.contextmanager
def plain_products() -> Iterator[None]:
    """Matrix products without oneDNN, whose preparation costs five times the product of so small matrices."""
    before = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(before)


def probabilities(network: nn.Module, jobs: Any) -> torch.Tensor:
    """The probability of every bin, from the mean of the members' scores [jobs, bins]."""
    with torch.inference_mode(), plain_products():
        return torch.softmax(network(jobs), dim=1)
