"""Files of weights, each with a card that describes its training."""

import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ullage.errors import InvalidValue

SHIPPED = Path(__file__).parent / "data"


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
