"""Checks values from files and requests with pydantic models, and reports problems in one message."""

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, BeforeValidator, ValidationError

from ullage.errors import InvalidValue, nearest
from ullage.units import parse_bytes, parse_duration

Model = TypeVar("Model", bound=BaseModel)


def _number(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError(f"value must be a number, got {str(value).lower()}")
    return value


Int = Annotated[int, BeforeValidator(_number)]
Bytes = Annotated[Int, BeforeValidator(lambda value: parse_bytes(value) if isinstance(value, str) else value)]
"""A size: a number of bytes, or text such as `12GiB`."""
Seconds = Annotated[float, BeforeValidator(lambda value: parse_duration(value) if isinstance(value, str) else value)]
"""A time: a number of seconds, or text such as `90m`."""


def checked(kind: type[Model], values: Any, what: str) -> Model:
    """Return the values as a model, or raise one message that names the first problem."""
    if not isinstance(values, Mapping):
        raise InvalidValue(f"{what} must be a table of names and values, got {type(values).__name__}")
    try:
        return kind.model_validate(dict(values))
    except ValidationError as error:
        raise InvalidValue(f"{what}: {first_problem(error.errors(include_url=False), kind)}") from None


def first_problem(problems: Iterable[Any], kind: type[BaseModel], skip: int = 0) -> str:
    """Return pydantic's first problem in words, misspelt names before all others.

    `skip` is the number of parts of the location to leave out, such as "body" in a request.
    """
    errors = list(problems)
    first = next((error for error in errors if error["type"] == "extra_forbidden"), errors[0])
    place = ".".join(str(part)[:80] for part in first["loc"][skip:]) or "".join(map(str, first["loc"][:1]))
    text = str(first["msg"]).removeprefix("Value error, ")
    if first["type"] == "extra_forbidden":
        near = nearest(str(first["loc"][-1])[:80], _names(kind, first["loc"][skip:-1]))
        return f"there is no {place!r}" + (f"; did you mean {near[0]!r}?" if near else "")
    if first["type"] == "missing":
        return f"{place} is missing"
    if first["type"] == "value_error":
        return f"{place}: {text}" if place else text
    given = repr(first.get("input"))
    given = given if len(given) <= 80 else given[:77] + "..."
    return f"{place}: {text[:1].lower()}{text[1:]}, got {given}"


def _names(kind: type[BaseModel], path: Iterable[int | str]) -> list[str]:
    """Return the valid names at a place inside a model."""
    for part in path:
        field = kind.model_fields.get(str(part))
        inner = field.annotation if field else None
        if not (isinstance(inner, type) and issubclass(inner, BaseModel)):
            return []
        kind = inner
    return list(kind.model_fields)
