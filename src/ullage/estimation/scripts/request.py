"""What the process in which a script runs is asked to do. Nothing here imports PyTorch: who asks does not need it."""

from __future__ import annotations

import base64
import json
import zlib
from dataclasses import dataclass, field
from typing import Any

from ullage.allocator import AllocatorConfig
from ullage.hardware import GPU

GRACE = 5.0  # seconds that a script has for its own cleaning up after it was stopped


@dataclass(frozen=True, kw_only=True)
class ScriptRequest:
    """What the child process is asked to do; with `traced` every request is part of its answer.

    With `convolutions` it is what was given to cuDNN.
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
    sizes: dict[str, int] = field(default_factory=dict)  # which data would tell, as an earlier run learned them

    @classmethod
    def from_values(cls, values: dict[str, Any]) -> ScriptRequest:
        """The request as `dataclasses.asdict` gave it and JSON carried it."""
        gpu = GPU(**_with_tuples(values["gpu"]))
        config = values["config"] and AllocatorConfig(**_with_tuples(values["config"]))
        return cls(**{**values, "gpu": gpu, "config": config})


def _with_tuples(values: dict[str, Any]) -> dict[str, Any]:
    """JSON has lists only."""
    return {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}


def packed(values: dict[str, Any]) -> str:
    """Plain values that repeat themselves much, such as the calls of a step, as a text of about a twentieth."""
    return base64.b64encode(zlib.compress(json.dumps(values).encode(), 1)).decode()


def unpacked(text: str) -> dict[str, Any]:
    """What `packed` was given."""
    values: dict[str, Any] = json.loads(zlib.decompress(base64.b64decode(text)))
    return values
