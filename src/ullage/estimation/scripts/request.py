"""The request to the process that runs a script. Nothing here imports PyTorch, which the parent does not need."""

import base64
import json
import zlib
from dataclasses import dataclass, field
from typing import Any

from ullage.allocator import AllocatorConfig
from ullage.hardware import GPU

SLOW_PACKAGES = ("httpx", "pandas", "PIL.Image", "scipy.stats", "sklearn.metrics", "sympy")
"""Modules that many scripts import, such as those with transformers. None looks for a GPU: a worker may import it."""
GRACE = 5.0  # seconds that a script has for its own cleaning up after it was stopped


@dataclass(frozen=True, kw_only=True)
class ScriptRequest:
    """The request to the child process; with `traced` its answer has every request of the script.

    With `convolutions` the answer has the convolutions for cuDNN.
    """

    path: str
    args: list[str]
    module: bool
    gpu: GPU
    steps: int | None
    timeout: float
    limited: bool
    config: AllocatorConfig | None = None
    traced: bool = False
    convolutions: bool = False
    received: dict[str, list[str]] = field(default_factory=dict)  # what the first rank sends, as base64 of pickles
    launcher: list[str] = field(default_factory=list)  # a program of Python that starts the script
    sizes: dict[str, int] = field(default_factory=dict)  # sizes that depend on data, from an earlier run

    @classmethod
    def from_values(cls, values: dict[str, Any]) -> "ScriptRequest":
        """Read the result of `dataclasses.asdict` after JSON."""
        gpu = GPU(**_with_tuples(values["gpu"]))
        config = values["config"] and AllocatorConfig(**_with_tuples(values["config"]))
        return cls(**{**values, "gpu": gpu, "config": config})


def _with_tuples(values: dict[str, Any]) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}


def packed(values: dict[str, Any]) -> str:
    """Compress plain values with many repetitions, such as the calls of a step, to about a twentieth."""
    return base64.b64encode(zlib.compress(json.dumps(values).encode(), 1)).decode()


def unpacked(text: str) -> dict[str, Any]:
    values: dict[str, Any] = json.loads(zlib.decompress(base64.b64decode(text)))
    return values
