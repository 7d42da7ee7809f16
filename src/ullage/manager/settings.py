"""The settings of a daemon, from a TOML file; each has a default."""

import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from ullage.errors import InvalidValue
from ullage.jobs.validation import Bytes, Seconds, checked
from ullage.manager.placement.recovery import RecoveryRules
from ullage.manager.policy_files import located
from ullage.units import GIB

_LARGEST_FILE = 1 << 20


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class PlacementSettings(_Part):
    """When a job may be placed on a GPU (`ullage.manager.placement.Rules`). `smact_limit = "off"` ignores activity.

    `busy_window` is the time over which the policy `ullage` measures how busy a GPU is.

    `min_speed` is the share of its speed alone that a job without its own minimum keeps next to others; without it,
    placement does the most work in total."""

    smact_limit: Annotated[float, Field(ge=0, le=1)] | Literal["off"] = 0.80
    free_floor: Bytes = Field(default=5 * GIB, ge=0)
    margin: Bytes = Field(default=2 * GIB, ge=0)
    unknown: Literal["exclusive", "floor"] = "exclusive"
    max_jobs_per_gpu: int | None = Field(default=None, ge=1)
    unmeasured: Literal["alone", "never"] = "alone"
    fresh_busy: float = Field(default=0.3, ge=0, le=1)
    min_speed: float | None = Field(default=None, ge=0, le=1)
    backfill: bool | None = None
    busy_window: Seconds = Field(default=5.0, gt=0, le=86400)
    patience: Seconds = Field(default=300.0, ge=0)


class HostSettings(_Part):
    """The cores and memory of the machine for all jobs together, and the promise of a job that requests none.

    By default, `cores` and `memory` are those that the daemon itself may use, less the reserve.
    """

    cores: int | None = Field(default=None, ge=0)
    memory: Bytes | None = Field(default=None, ge=0)
    reserve_cores: int = Field(default=1, ge=0)
    reserve_memory: Bytes = Field(default=2 * GIB, ge=0)
    default_cores: int = Field(default=0, ge=0)
    default_memory: Bytes = Field(default=0, ge=0)


class MonitorSettings(_Part):
    """How often the GPUs are read, and the length of the window over which their activity is averaged."""

    interval: Seconds = Field(default=1.0, ge=0.05, le=3600)
    window: Seconds = Field(default=90.0, gt=0, le=86400)


class EstimateSettings(_Part):
    """The estimator of submitted jobs, the number of estimates at once, and the limits of each.

    One estimate always runs, more only while cores are idle. The default of `at_once` depends on cores and memory; that
    of `per_user` is half of it. `array_samples` jobs of an array are estimated first, and stand for the others if they
    agree; with 0 all are estimated. With `wait`, no job is placed before its estimate is finished. The estimator
    `activity` predicts the SM activity of jobs whose estimate does not.
    """

    estimator: str = "ullage"
    activity: str | None = None
    wait: bool = False
    timeout: Seconds = Field(default=300.0, gt=0)
    memory: Bytes = Field(default=8 * GIB, gt=0)
    processes: int = Field(default=512, ge=1)
    written: Bytes = Field(default=4 * GIB, gt=0)
    network: bool = False
    at_once: int | None = Field(default=None, ge=1, le=64)
    per_user: int | None = Field(default=None, ge=1, le=64)
    array_samples: int = Field(default=3, ge=0, le=1000)
    failed: Literal["hold", "run"] = "hold"
    retry_failed_after: Seconds = Field(default=3600.0, ge=0)


class RecoverySettings(_Part):
    """How often a job is tried: `attempts` times if memory runs out, `others` more times if the system fails."""

    attempts: int = Field(default=RecoveryRules.attempts, ge=1)
    others: int = Field(default=RecoveryRules.others, ge=0)
    step: Bytes = Field(default=RecoveryRules.step, gt=0)
    exclusive_after: int = Field(default=RecoveryRules.exclusive_after, ge=1)

    @property
    def rules(self) -> RecoveryRules:
        """Return the same settings for `ullage.manager.placement`."""
        return RecoveryRules(**self.model_dump())


class RunSettings(_Part):
    """How jobs run: the grace between SIGTERM and SIGKILL, the reaction to a job that exceeds its promise, and the
    output that is kept: `log_files` files of `log_size` for each stream, the first and the newest."""

    grace: Seconds = Field(default=30.0, ge=0)
    over_promise: Literal["leave", "stop"] = "leave"
    tolerance: Bytes = Field(default=256 << 20, ge=0)
    cgroup: bool = True
    log_size: Bytes = Field(default=64 << 20, ge=4096)
    log_files: int = Field(default=4, ge=2, le=1000)
    keep_days: float | None = Field(default=None, gt=0)


class FairnessSettings(_Part):
    """Shares of users (1 by default), the half-life of their usage, and time slots for resumable jobs: how early they
    are asked for a checkpoint, and the longest extension while they write it."""

    shares: dict[str, Annotated[float, Field(gt=0)]] = {}
    slot: Seconds | None = Field(default=None, gt=0)
    checkpoint_lead: Seconds = Field(default=600.0, ge=0)
    checkpoint_extension: Seconds = Field(default=600.0, ge=0)
    half_life: Seconds = Field(default=86400.0, gt=0)


class AccessSettings(_Part):
    """The users of the daemon: its own user, a group, and operators, who may change all jobs.

    `report` decides what users see of others in reports: nothing ("own"), one sum of all others ("totals"), or "all".
    """

    group: str | None = None
    operators: list[str] = []
    queue_limit: int = Field(default=100_000, ge=1)
    report: Literal["own", "totals", "all"] = "own"


class LimitSettings(_Part):
    """The limits of each user, except operators: waiting and running jobs, GPUs, connections.

    `max_priority` is the highest priority that a user may request. `stored` limits the bytes of stored commands and
    variables of waiting and running jobs.
    """

    jobs: int = Field(default=20_000, ge=1)
    gpus: int | None = Field(default=None, ge=1)
    max_priority: int = Field(default=0, ge=-1000, le=1000)
    connections: int = Field(default=64, ge=1)
    stored: Bytes = Field(default=256 << 20, ge=1)


class NotifySettings(_Part):
    """Notifications of the ends of jobs: a command of the site, and whether jobs may have their own."""

    hook: list[str] | None = Field(default=None, min_length=1)
    hook_timeout: Seconds = Field(default=30.0, gt=0, le=3600)
    commands: bool = True
    command_timeout: Seconds = Field(default=60.0, gt=0, le=3600)


class ApiSettings(_Part):
    """The address of the REST API: a port, or `HOST:PORT`; port 0 takes any free one. Without it, the API is off."""

    listen: str | None = Field(default=None, max_length=200)


class PageSettings(_Part):
    """The web page of the daemon: its address, as in `ApiSettings` ("off": no page, also in a terminal); the
    permissions and the duration of a session from its link; and the user of its process if the daemon runs as root."""

    listen: str | None = Field(default=None, max_length=200)
    scope: Literal["read", "submit", "operate"] = "submit"
    session: Seconds = Field(default=43200.0, gt=0, le=366 * 86400)
    user: str | None = Field(default=None, max_length=200)


class ManagerSettings(_Part):
    """All settings of a daemon."""

    policy: str = "ullage"
    sharing: Literal["time-slicing", "mps"] = "time-slicing"
    virtual: str | None = None
    placing: PlacementSettings = PlacementSettings()
    host: HostSettings = HostSettings()
    monitoring: MonitorSettings = MonitorSettings()
    estimating: EstimateSettings = EstimateSettings()
    recovering: RecoverySettings = RecoverySettings()
    running: RunSettings = RunSettings()
    fairness: FairnessSettings = FairnessSettings()
    access: AccessSettings = AccessSettings()
    limits: LimitSettings = LimitSettings()
    api: ApiSettings = ApiSettings()
    page: PageSettings = PageSettings()
    notify: NotifySettings = NotifySettings()


def read_settings(file: Path | None, **given: Any) -> ManagerSettings:
    """Return the settings of a file, or the defaults. `given` values that are not `None` override those of the file."""
    values: dict[str, Any] = {}
    if file is not None:
        try:
            with file.open("rb") as source:
                values = tomllib.loads(source.read(_LARGEST_FILE).decode())
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            raise InvalidValue(f"cannot read the settings in {file}: {error}") from None
        if isinstance(values.get("policy"), str):
            values["policy"] = located(values["policy"], file.parent)
    for option, table, name in (
        ("listen", "api", "listen"),
        ("page", "page", "listen"),
        ("estimator", "estimating", "estimator"),
    ):
        value = given.pop(option, None)
        if value is not None:
            values[table] = {**values.get(table, {}), name: value}
    values |= {name: value for name, value in given.items() if value is not None}
    return checked(ManagerSettings, values, f"the settings in {file}" if file else "the settings")
