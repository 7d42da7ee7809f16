"""Which measured run a configuration is, if any."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from ullage.errors import InvalidValue
from ullage.measure.truth import Run
from ullage.workload.configuration import Configuration

_DEFAULTS = {"classes": 1000, "attn": "sdpa", "opt": "adamw", "precision": "fp32"}
_OF_THE_MODEL = ("conf", "hf_config", "settings", "vocab", "config_file")


def identity(configuration: Configuration) -> dict[str, Any]:
    """What makes two configurations the same run, however they were written down.

    >>> one = identity(Configuration(model="tv:resnet18", batch=8, classes=1000))
    >>> one == identity(Configuration(model="torchvision:resnet18", batch=8))
    True

    A size that is left to the model ("what it is made for") is only the same as one that is left to it too.
    """
    values = {name: value for name, value in asdict(configuration).items() if name not in _OF_THE_MODEL}
    values |= {name: default for name, default in _DEFAULTS.items() if values.get(name) is None}
    config = {**configuration.hf_config, **configuration.settings}
    if configuration.vocab is not None:
        config.setdefault("vocab_size", configuration.vocab)
    values["freeze"] = list(configuration.freeze)
    return values | {"model": f"{configuration.source}:{configuration.name}", "config": config}


def matching(configuration: Configuration, runs: Iterable[Run]) -> list[Run]:
    """The runs that measured this configuration."""
    wanted, found = identity(configuration), []
    for run in runs:
        try:
            same = identity(Configuration.from_row(run.row)) == wanted
        except InvalidValue:
            continue
        if same:
            found.append(run)
    return found


def row_of(configuration: Configuration) -> dict[str, Any]:
    """A configuration as plain values, as a measured file has it.

    >>> Configuration.from_row(row_of(Configuration(model="mlp:x", widths=[8, 4], batch=2))).widths
    [8, 4]
    """
    values = asdict(configuration)
    return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}
