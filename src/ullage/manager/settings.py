"""The site's choices: a TOML file, every name with a default that is meant to be right."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from ullage.errors import InvalidValue
from ullage.units import GIB
from ullage.workloads.validation import Bytes, Seconds, checked

_LARGEST_FILE = 1 << 20


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
