"""A trained walknet as one safetensors file: the weights, and beside them what they were trained on."""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from ullage.errors import InvalidValue, UnknownName
from ullage.estimators.walknet_inputs import PARTS, TOKEN_FEATURES, TOTALS
from ullage.estimators.walknet_networks import Ensemble, LayerTransformer, WalkNet
from ullage.estimators.weights_file import write_weights

SHIPPED = Path(__file__).parent / "data"
FORMAT = 1


@dataclass
class Card:
    """What a file of weights tells about itself.

    `bins` classes of `bin` bytes, the last one open; `test` names the rows that were held out, by the key of their
    configuration, so that an evaluation on the same data uses those and no other.

    >>> Card(family="mlp", estimator="mlp", bin=1 << 30, bins=8).gpu
    'H200'
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


def build(card: Card) -> WalkNet:
    """A new network of the card's kind, untrained.

    >>> type(build(Card(family="mlp", estimator="mlp", bin=1 << 30, bins=8))).__name__
    'Ensemble'
    """
    if card.estimator not in ("mlp", "transformer"):
        raise UnknownName("walknet estimator", card.estimator, ["mlp", "transformer"], hint="mlp or transformer")
    return Ensemble(card.bins, card.bin) if card.estimator == "mlp" else LayerTransformer(card.bins, card.bin)


def shipped(family: str, estimator: str) -> Path:
    """The file of weights that comes with Ullage.

    >>> shipped("cnn", "mlp").name
    'walknet_cnn_mlp.safetensors'
    """
    return SHIPPED / f"walknet_{family}_{estimator}.safetensors"


def save(network: WalkNet, card: Card, path: Path) -> None:
    """Write weights and card; `load` gives both back."""
    from safetensors.torch import save as packed

    facts = {"format": FORMAT, "totals": len(TOTALS), "parts": len(PARTS), "token": TOKEN_FEATURES}
    tensors = {name: value.contiguous() for name, value in network.state_dict().items()}
    write_weights(path, packed(tensors, {"card": json.dumps(asdict(card)), "facts": json.dumps(facts)}))


def load(path: Path) -> tuple[WalkNet, Card]:
    """The network of a file, ready to answer, and its card."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            card = Card(**json.loads(metadata["card"]))
            _check(json.loads(metadata["facts"]), path)
            network = build(card)
            network.load_state_dict({name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118
    except (OSError, SafetensorError, KeyError, TypeError, json.JSONDecodeError, RuntimeError) as error:
        told = str(error).splitlines() or [type(error).__name__]
        raise InvalidValue(
            f"needed weights of walknet in {path}: {told[0]}; 'ullage train walknet --out {path.name}' makes them"
        ) from None
    return network.eval(), card


def _check(facts: dict[str, int], path: Path) -> None:
    """Weights that were trained on other inputs would load where sizes agree, and answer nonsense."""
    here = {"format": FORMAT, "totals": len(TOTALS), "parts": len(PARTS), "token": TOKEN_FEATURES}
    if facts != here:
        raise InvalidValue(f"{path} was trained by another version of Ullage (its inputs {facts}, needed {here})")


@functools.cache
def trained(path: Path) -> tuple[WalkNet, Card]:
    """As `load`, once a process."""
    return load(path)


@contextlib.contextmanager
def plain_products() -> Iterator[None]:
    """Matrix products without oneDNN, whose preparation costs five times the product of so small matrices."""
    before = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(before)


def probabilities(network: WalkNet, jobs: Any) -> torch.Tensor:
    """The probability of every bin, from the mean of the members' scores [jobs, bins]."""
    with torch.inference_mode(), plain_products():
        return torch.softmax(network(jobs), dim=1)
