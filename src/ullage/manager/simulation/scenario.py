"""What jobs meet in a simulation: GPUs, the policy and its rules, and the laws of the simulated world."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from ullage.errors import UnknownName
from ullage.manager.placement import RecoveryRules, Rules


@dataclass(frozen=True, kw_only=True)
class World:
    """How the simulated GPUs behave; the defaults are what was measured on an H200 and its host. Each part can be
    switched off, to see what it does.

    - `interference`: jobs that share a GPU slow each other down, by the model of `ullage.performance.sharing`.
    - `interference_error`: how far the true slowdown of a set of jobs is from the predicted one: the standard deviation
      of the logarithm of what a job loses, drawn once for each job of a set. None: as measured (MPS 0.4, else 0.2).
    - `startup_s`: from the start of a job until it takes its memory and begins its work, unless its kind has a time of
      its own; 0: no job takes any.
    - `fragmentation`: bytes of a GPU that no job can have although they are free.
    - `monitor_delay_s`: how old the newest reading is that a placement sees.
    - `reading_s`: how often placement gets a new reading of a GPU; None: every second, and every 30 s on more than 64.
    - `retry_s`: from a failure until the job stands in the queue again.
    - `node_gpus` GPUs fail together, each node once in `node_mtbf_s` seconds on average, for `node_repair_s`; with
      `node_mtbf_s` of None none fails.
    """

    interference: bool = True
    interference_error: float | None = None
    startup_s: float = 10.0
    fragmentation: int = 0
    monitor_delay_s: float = 1.0
    reading_s: float | None = None
    retry_s: float = 0.0
    node_gpus: int = 8
    node_mtbf_s: float | None = None
    node_repair_s: float = 3600.0


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """One simulation: `gpus` such as "4xA100-40GB" or "8xH200, 4xT4", the `policy`, whose `estimator` promises are
    made, and how jobs share a GPU: "mps", "timeslice", "mig" (with the instances: "mig:2g.10gb") or "off".

    `estimator` is the name of one ("ullage", "gpumemnet", "horus", "faketensor"), "oracle" for true memory, or "none".
    `pause_s` is the least time between two passes over the queue, `half_life_s` the time in which what users have used
    counts half. `min_speed` is what all owners want their jobs to keep of their speed; None: they say nothing.
    `foresight`: placement is told what jobs do on a GPU; without it, it knows what its monitor sees.
    `at_a_time` is how many jobs a pass looks at, from the head of the queue; None: all of them. `bookkeeping`:
    placement remembers what it promised, and to whom alone; without it, what counts is what the monitor last saw.
    """

    gpus: str
    policy: str = "ullage"
    estimator: str = "ullage"
    sharing: str = "mps"
    rules: Rules = field(default_factory=Rules)
    recovery: RecoveryRules = field(default_factory=RecoveryRules)
    min_speed: float | None = None
    pause_s: float = 1.0
    half_life_s: float = 86400.0
    foresight: bool = True
    at_a_time: int | None = None
    bookkeeping: bool = True
    world: World = field(default_factory=World)
    seed: int = 0
    label: str | None = None

    @property
    def name(self) -> str:
        """What it is called in tables: its label, or what is special about it.

        >>> Scenario(gpus="4xA100-40GB", policy="magm", estimator="gpumemnet").name
        'magm, gpumemnet, mps'
        """
        return self.label or f"{self.policy}, {self.estimator}, {self.sharing}"

    def to_dict(self) -> dict[str, Any]:
        """The attributes as a dictionary of plain values; what cannot be one (`rules.predict`) is left out."""
        found = asdict(replace(self, rules=replace(self.rules, predict=None)))
        del found["rules"]["predict"]
        return found

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Scenario:
        """Read what `to_dict` gave; keys of later versions are ignored."""
        parts = {name: kind(**_of(kind, values[name])) for name, kind in _PARTS.items() if name in values}
        return cls(**_of(cls, values) | parts)

    def but(self, **settings: Any) -> Scenario:
        """The same with other settings: its own and those of its parts (rules, recovery, world), each by its name.

        >>> Scenario(gpus="H200").but(smact_limit=None, interference=False, seed=3).world.interference
        False
        """
        own = [name for name in _names(Scenario) if name not in _PARTS]
        valid = [*own, *(name for kind in _PARTS.values() for name in _names(kind))]
        for name in settings:
            if name not in valid:
                raise UnknownName("setting of a simulation", name, valid)
        parts = {name: replace(getattr(self, name), **_of(kind, settings)) for name, kind in _PARTS.items()}
        return replace(self, **{name: settings[name] for name in own if name in settings}, **parts)


# What `ullage simulate --disable` switches off: a part of the world, and the settings without it.
PARTS_OF_WORLD: dict[str, dict[str, Any]] = {
    "interference": {"interference": False},
    "errors": {"interference_error": 0.0},
    "startup": {"startup_s": 0.0},
    "fragmentation": {"fragmentation": 0},
    "delay": {"monitor_delay_s": 0.0},
    "retry": {"retry_s": 0.0},
    "failures": {"node_mtbf_s": None},
}
_PARTS: dict[str, Any] = {"rules": Rules, "recovery": RecoveryRules, "world": World}


def _names(kind: Any) -> list[str]:
    return [spec.name for spec in fields(kind)]


def _of(kind: Any, values: Mapping[str, Any]) -> dict[str, Any]:
    """The values that a class has fields for."""
    return {name: values[name] for name in _names(kind) if name in values}
