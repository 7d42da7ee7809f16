"""Trained GPUMemNet networks as safetensors files: one for each family, estimator and width of a class."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from ullage.errors import UnknownName
from ullage.estimation.estimators.gpumemnet.features import names_of
from ullage.estimation.estimators.gpumemnet.networks import GPUMemNet, GPUMemNetEnsemble, Transformers, token_size
from ullage.estimation.estimators.weights import SHIPPED, ModelCard, load_network, save_network
from ullage.units import GIB

# Family and estimator: the widths in GiB of the classes that there are networks for, the one that estimates use first.
# The paper has 1 and 2 for MLPs and 8 for the others.
WIDTHS = {
    ("mlp", "mlp"): (1, 2),
    ("mlp", "transformer"): (1,),
    ("cnn", "mlp"): (8, 1),
    ("cnn", "transformer"): (8,),
    ("transformer", "mlp"): (8, 1),
    ("transformer", "transformer"): (8,),
}


def build(card: ModelCard) -> GPUMemNet:
    """A new network of the card's kind, untrained.

    >>> type(build(ModelCard(family="cnn", estimator="mlp", bin=8 << 30, bins=8))).__name__
    'GPUMemNetEnsemble'
    """
    if card.estimator not in ("mlp", "transformer"):
        raise UnknownName("GPUMemNet estimator", card.estimator, ["mlp", "transformer"], hint="mlp or transformer")
    return (GPUMemNetEnsemble if card.estimator == "mlp" else Transformers)(card.family, card.bins)


def shipped(family: str, estimator: str, width: int | None = None) -> Path:
    """The file of weights that comes with Ullage, for classes of so many bytes or those of the paper.

    >>> shipped("cnn", "mlp").name
    'gpumemnet_cnn_mlp_8gib.safetensors'
    """
    gib = WIDTHS[family, estimator][0] if width is None else width // GIB
    return SHIPPED / f"gpumemnet_{family}_{estimator}_{gib}gib.safetensors"


def save(network: GPUMemNet, card: ModelCard, path: Path) -> None:
    """Write weights and card; `load` gives both back."""
    save_network(network, card, _facts(card), path)


def load(path: Path) -> tuple[GPUMemNet, ModelCard]:
    """The network of a file, ready to answer, and its card."""
    return load_network("gpumemnet", path, build, _facts)


def _facts(card: ModelCard) -> dict[str, Any]:
    return {"method": "gpumemnet", "totals": names_of(card.family), "token": token_size(card.family)}


@functools.cache
def trained(path: Path) -> tuple[GPUMemNet, ModelCard]:
    """As `load`, once a process."""
    return load(path)
