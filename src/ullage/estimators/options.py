"""An estimator's own options, from `set={"NAME.key": value}` or `--set NAME.key=value`."""

from __future__ import annotations

from typing import Any

from ullage.errors import InvalidValue, UnknownName


def read_options(name: str, given: dict[str, Any], defaults: dict[str, Any]) -> dict[str, Any]:
    """The options with their defaults; a wrong name lists all, a value of another type is refused.

    >>> read_options("deepspeed", {"stage": 3}, {"stage": 2, "offload": False})
    {'stage': 3, 'offload': False}
    """
    for key, value in given.items():
        if key not in defaults:
            valid = [f"{name}.{option}" for option in defaults]
            raise UnknownName("option", f"{name}.{key}", valid, hint="all: " + ", ".join(valid))
        wanted = type(defaults[key])
        if defaults[key] is not None and type(value) is not wanted:
            raise InvalidValue(f"{name}.{key} needs a value like {defaults[key]!r}; found {value!r}")
        if wanted is int and value < 0:
            raise InvalidValue(f"{name}.{key} needs a number of at least 0; found {value!r}")
    return defaults | given
