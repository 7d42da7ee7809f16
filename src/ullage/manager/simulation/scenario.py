"""The scenario of a simulation: GPUs, the policy and its rules, and the behaviour of the simulated world."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from ullage.errors import UnknownName
from ullage.fields import described
from ullage.manager.placement import RecoveryRules, Rules
from ullage.manager.policy_files import load_policy
from ullage.units import format_bytes


@dataclass(frozen=True, kw_only=True)
class World:
    """The behaviour of the simulated GPUs; the defaults were measured on an H200 and its host. You can switch off each
    part to see its effect.

    - `interference`: jobs that share a GPU slow each other down, by the model of `ullage.performance.sharing`.
    - `interference_error`: the error of predictions, drawn once for each job of a set that shares a GPU.
    - `startup_s`: the start-up time of jobs, unless their kind has its own; 0: no job has any.
    - `reading_s`: seconds between readings of a GPU for placement; None: 1 s, and 30 s with more than 64 GPUs.
    - `retry_s`: seconds from a failure until the job is queued again.
    - `node_gpus` GPUs fail together, each node once in `node_mtbf_s` seconds on average, for `node_repair_s`.
    """

    interference: bool = True
    interference_error: float | None = described(
        None,
        "Difference between true and predicted slowdowns: the standard deviation of the logarithm of what jobs lose.",
        metavar="X",
        default="0.4 under MPS, 0.2 time-sliced",
        least=0.0,
    )
    startup_s: float = described(
        10.0,
        "Time from the start of a job until it allocates memory.",
        option="startup",
        metavar="TIME",
        default="10s",
    )
    fragmentation: int = described(0, "Free GPU memory lost to fragmentation.", metavar="SIZE", default="0B")
    monitor_delay_s: float = described(
        1.0, "Age of the readings used for placement.", option="monitor-delay", metavar="TIME", default="1s"
    )
    reading_s: float | None = None
    retry_s: float = 0.0
    node_gpus: int = 8
    node_mtbf_s: float | None = described(
        None,
        "Mean time between failures of a node, such as 30d.",
        option="node-mtbf",
        metavar="TIME",
        default="no node fails",
    )
    node_repair_s: float = 3600.0


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """The settings of one simulation, on `gpus` such as "4xA100-40GB" or "8xH200, 4xT4".

    `min_speed` is the minimum speed of all jobs; None: they have none. `pause_s` is the least time between two passes
    over the queue, `half_life_s` the half-life of users' usage. A pass considers `at_a_time` jobs from the head of the
    queue (None: all). Without `foresight`, placement knows no predicted activity; without `bookkeeping`, no promises.
    Both then leave it the monitor's readings.
    """

    gpus: str
    policy: str = described(
        "ullage",
        "How GPUs are chosen for jobs: ullage, exclusive, round-robin, magm, lug, mug, or with true memory first-fit, "
        "best-fit, worst-fit, least-utilized. Or a function in a Python file.",
        metavar="NAME|FILE.py:FUNCTION",
        several=True,
    )
    estimator: str = described(
        "ullage",
        "Estimator that sets promises: ullage, another one from 'ullage lab compare', oracle for true memory, or none.",
        letter="e",
        metavar="NAME",
        several=True,
    )
    sharing: str = described(
        "mps",
        "How jobs share a GPU: mps, time-slicing, mig (with the instances: mig:2g.10gb) or off.",
        metavar="WAY",
        several=True,
    )
    rules: Rules = field(default_factory=Rules)
    recovery: RecoveryRules = field(default_factory=RecoveryRules)
    min_speed: float | None = described(
        None,
        "Minimum speed of each job on a shared GPU, as a fraction of its speed alone.",
        metavar="SHARE",
        default="any speed",
        several=True,
    )
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
        """Return the name of the scenario in tables: its label, or its distinguishing settings.

        >>> Scenario(gpus="4xA100-40GB", policy="magm", estimator="gpumemnet").name
        'magm, gpumemnet, mps'
        """
        return self.label or f"{self.policy}, {self.estimator}, {self.sharing}"

    def to_dict(self) -> dict[str, Any]:
        """Return the attributes as a dictionary of plain values, without `rules.predict`, which is a function."""
        fields = asdict(replace(self, rules=replace(self.rules, predict=None)))
        del fields["rules"]["predict"]
        return fields

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Scenario":
        """Read what `to_dict` gave; keys of later versions are ignored."""
        parts = {name: kind(**_of(kind, values[name])) for name, kind in _PARTS.items() if name in values}
        return cls(**_of(cls, values) | parts)

    def but(self, **settings: Any) -> "Scenario":
        """Return the scenario with other settings, its own or those of its parts (rules, recovery, world), by name.

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


# The parts of the world that `ullage simulate --disable` switches off, and the settings without each.
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
    return {name: values[name] for name in _names(kind) if name in values}


# Settings without effect on a policy that gives each job its own GPU.
_OF_SHARING = ("estimator", "sharing", "smact_limit", "free_floor", "margin", "min_speed")
_SHORT = {"smact_limit": "SMACT {}", "free_floor": "{} free", "margin": "margin {}", "min_speed": "speed {}"}
_BYTES = ("free_floor", "margin", "fragmentation")


def variants(base: Scenario, choices: Mapping[str, Sequence[Any]]) -> list[Scenario]:
    """Return every combination of choices, each a list of values of a setting. Settings without effect are not varied:
    the estimator of policies that know true memory, and the way of sharing of those that never share.

    >>> found = variants(Scenario(gpus="H200"), {"policy": ["exclusive", "magm"], "estimator": ["ullage", "none"]})
    >>> [scenario.name for scenario in found]
    ['exclusive', 'magm, ullage', 'magm, none']
    """
    scenarios: dict[tuple[Any, ...], Scenario] = {}
    for values in itertools.product(*choices.values()):
        settings = dict(zip(choices, values, strict=True))
        policy = load_policy(settings.get("policy", base.policy))
        if policy.oracle:
            settings["estimator"] = "oracle"
        given = [name for name in choices if not (policy.alone and name in _OF_SHARING)]
        settings |= {name: choices[name][0] for name in choices if name not in given}
        words = [_words(name, settings[name]) for name in given if len(choices[name]) > 1]
        label = ", ".join(words) if words and base.label is None else base.label
        scenarios.setdefault(tuple(settings.values()), base.but(**settings, label=label))
    return list(scenarios.values())


def _words(name: str, value: Any) -> str:
    text = "off" if value is None else format_bytes(value) if name in _BYTES else str(value)
    return _SHORT.get(name, "{}").format(text)
