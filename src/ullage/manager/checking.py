"""What pydantic found wrong, as one clear message."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from ullage.errors import InvalidValue, nearest

Model = TypeVar("Model", bound=BaseModel)


def checked(kind: type[Model], values: Any, what: str) -> Model:
    """The values as a model, or one message that names the first thing that is wrong.

    >>> from ullage.manager.settings import Settings
    >>> checked(Settings, {"polcy": "magm"}, "the settings")
    Traceback (most recent call last):
    ...
    ullage.errors.InvalidValue: the settings: there is no 'polcy'; did you mean 'policy'?
    """
    if not isinstance(values, Mapping):
        raise InvalidValue(f"{what}: needed a table of names and values; found {type(values).__name__}")
    try:
        return kind.model_validate(dict(values))
    except ValidationError as error:
        raise InvalidValue(f"{what}: {_said(kind, error)}") from None


def _said(kind: type[BaseModel], error: ValidationError) -> str:
    first = error.errors(include_url=False, include_context=False)[0]
    place = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        near = nearest(str(first["loc"][-1]), _names(kind, first["loc"][:-1]))
        return f"there is no {place!r}" + (f"; did you mean {near[0]!r}?" if near else "")
    text = first["msg"].removeprefix("Value error, ")
    if first["type"] == "value_error":
        return f"{place}: {text}" if place else text
    found = "" if first["type"] == "missing" else f"; found {_short(first['input'])}"
    return f"{place}: {text[:1].lower()}{text[1:]}{found}"


def _names(kind: type[BaseModel], path: tuple[int | str, ...]) -> list[str]:
    for part in path:
        field = kind.model_fields.get(str(part))
        inner = field.annotation if field else None
        if not (isinstance(inner, type) and issubclass(inner, BaseModel)):
            return []
        kind = inner
    return list(kind.model_fields)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
