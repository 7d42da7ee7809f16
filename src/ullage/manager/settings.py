"""The site's choices: a TOML file, every name with a default that is meant to be right."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from ullage.errors import InvalidValue, nearest
from ullage.units import GIB, parse_bytes, parse_duration

# What pydantic found wrong, as one clear message.

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


_LARGEST_FILE = 1 << 20

Bytes = Annotated[int, BeforeValidator(lambda value: parse_bytes(value) if isinstance(value, str) else value)]
Seconds = Annotated[float, BeforeValidator(lambda value: parse_duration(value) if isinstance(value, str) else value)]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Placing(_Part):
    """Conditions of a placement (`ullage.placement.Rules`); `smact_limit = "off"` lets jobs share however busy."""

    smact_limit: Annotated[float, Field(ge=0, le=1)] | Literal["off"] = 0.80
    free_floor: Bytes = Field(default=5 * GIB, ge=0)
    margin: Bytes = Field(default=2 * GIB, ge=0)
    unknown: Literal["exclusive", "floor"] = "exclusive"
    max_jobs_per_gpu: int | None = Field(default=None, ge=1)
    unmeasured: Literal["alone", "never"] = "alone"
    fresh_busy: float = Field(default=0.3, ge=0, le=1)
    backfill: bool | None = None
    patience: Seconds = Field(default=300.0, ge=0)


class Monitoring(_Part):
    """How often the GPUs are read, and over how long the activity that placements heed is a mean."""

    interval: Seconds = Field(default=1.0, ge=0.05, le=3600)
    window: Seconds = Field(default=90.0, gt=0, le=86400)


class Estimating(_Part):
    """Who estimates on the way in, and within what limits."""

    estimator: str = "ullage"
    timeout: Seconds = Field(default=300.0, gt=0)
    memory: Bytes = Field(default=8 * GIB, gt=0)
    at_once: int = Field(default=1, ge=1, le=64)
    retry_failed_after: Seconds = Field(default=3600.0, ge=0)


class Recovering(_Part):
    """When a job is tried again: `attempts` in all after failures of memory, `others` more after the system's."""

    attempts: int = Field(default=5, ge=1)
    others: int = Field(default=5, ge=0)
    step: Bytes = Field(default=5 * GIB, gt=0)
    exclusive_after: int = Field(default=3, ge=1)


class Running(_Part):
    """How jobs run: the grace between SIGTERM and SIGKILL, and what happens to one that takes more than promised."""

    grace: Seconds = Field(default=30.0, ge=0)
    over_promise: Literal["leave", "stop"] = "leave"
    tolerance: Bytes = Field(default=256 << 20, ge=0)
    cgroup: bool = True
    keep_days: float | None = Field(default=None, gt=0)


class Fairness(_Part):
    """Shares of users (1 each by default), time slots for jobs that can resume, and the checkpoint signal's lead."""

    shares: dict[str, Annotated[float, Field(gt=0)]] = {}
    slot: Seconds | None = Field(default=None, gt=0)
    checkpoint_lead: Seconds = Field(default=600.0, ge=0)
    usage_window: Seconds = Field(default=86400.0, gt=0)


class Access(_Part):
    """Who may speak to the daemon: a group beside its own user, and operators, who may stop anybody's jobs."""

    group: str | None = None
    operators: list[str] = []
    queue_limit: int = Field(default=100_000, ge=1)


class Api(_Part):
    """The REST API: where it listens (`8600`, or `HOST:PORT`; 0 takes any free port). Without that it is off."""

    listen: str | None = Field(default=None, max_length=200)


class Settings(_Part):
    """All of the above.

    >>> Settings().policy, Settings().placing.margin == 2 * GIB
    ('ullage', True)
    """

    policy: str = "ullage"
    sharing: Literal["time-slicing", "mps"] = "time-slicing"
    virtual: str | None = None
    placing: Placing = Placing()
    monitoring: Monitoring = Monitoring()
    estimating: Estimating = Estimating()
    recovering: Recovering = Recovering()
    running: Running = Running()
    fairness: Fairness = Fairness()
    access: Access = Access()
    api: Api = Api()


def read_settings(file: Path | None, **given: Any) -> Settings:
    """The settings of a file, or the defaults; what is given besides (not `None`) is taken instead.

    >>> read_settings(None, policy="magm", virtual=None).policy
    'magm'
    """
    values: dict[str, Any] = {}
    if file is not None:
        try:
            with file.open("rb") as source:
                values = tomllib.loads(source.read(_LARGEST_FILE).decode())
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            raise InvalidValue(f"cannot read the settings in {file}: {error}") from None
    listen = given.pop("listen", None)
    if listen is not None:
        values["api"] = {**values.get("api", {}), "listen": listen}
    estimator = given.pop("estimator", None)
    if estimator is not None:
        values["estimating"] = {**values.get("estimating", {}), "estimator": estimator}
    values |= {name: value for name, value in given.items() if value is not None}
    return checked(Settings, values, f"the settings in {file}" if file else "the settings")
