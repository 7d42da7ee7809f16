"""Cost of a whole training: hours, energy and money, from the time of one step. Nothing here imports PyTorch."""

import math
import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from ullage.errors import InvalidValue
from ullage.fields import described
from ullage.hardware import gpu as find_gpu
from ullage.home import home
from ullage.performance.result import NO_SAMPLES_PER_STEP, Utilization, known_fields
from ullage.units import format_duration

_LARGEST_FILE = 1 << 20  # bytes
_NO_SAMPLES = (
    "how many samples an epoch has is not known: give samples (--samples N), or total_steps (--total-steps N) instead"
)


@dataclass(frozen=True, kw_only=True)
class Prices:
    """Prices of an hour of each GPU and of a kilowatt hour; unknown prices are missing. None are built in.

    >>> prices = Prices.from_dict({"currency": "EUR", "hour": {"A100-40GB": 1.5}})
    >>> prices.of("A100-40GB", hours=10, kwh=3), prices.of("T4", hours=10, kwh=3)
    (15.0, None)
    """

    hour: Mapping[str, float]
    kwh: float | None = None
    currency: str = ""
    source: str = "the prices"

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], source: str = "the prices") -> "Prices":
        """Read prices from `currency`, `kwh`, and the table `hour` by the names of GPUs."""
        for name in values:
            if name not in ("currency", "kwh", "hour"):
                raise InvalidValue(f"{source}: keys must be currency, kwh and [hour], got {name!r}")
        by_name = values.get("hour", {})
        if not isinstance(by_name, Mapping) or not by_name and values.get("kwh") is None:
            raise InvalidValue(
                f'{source} must have a table [hour] with lines such as "A100-40GB" = 1.50, or kwh = 0.30'
            )
        hour = {find_gpu(name).name: _price(price, f"{source}: {name}") for name, price in by_name.items()}
        kwh = None if values.get("kwh") is None else _price(values["kwh"], f"{source}: kwh")
        return cls(hour=hour, kwh=kwh, currency=str(values.get("currency", "")), source=source)

    @classmethod
    def read(cls, file: str | Path) -> "Prices":
        try:
            with Path(file).open("rb") as opened:
                text = opened.read(_LARGEST_FILE).decode()
            return cls.from_dict(tomllib.loads(text), str(file))
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise InvalidValue(f"cannot read the prices in {file}: {reason}") from None

    def of(self, gpu: str, hours: float, kwh: float) -> float | None:
        """Return the cost of hours on a GPU; `None` without a price for it, unless energy alone has one."""
        if gpu not in self.hour and (self.hour or self.kwh is None):
            return None
        return hours * self.hour.get(gpu, 0.0) + kwh * (self.kwh or 0.0)


def _price(value: Any, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise InvalidValue(f"{name}: price must be at least 0, got {value!r}")
    return float(value)


@dataclass(frozen=True, kw_only=True)
class Training:
    """The length of a training: `Training(epochs=90, samples=1281167)`, or `Training(total_steps=10_000)`.

    A step takes `samples_per_step`, if the run itself does not show it. The data loader delivers at most `input_rate`
    samples a second. `prices` are a TOML file or its content: `{"currency": "EUR", "kwh": 0.3, "hour": {"H200": 3.5}}`.

    >>> Training(samples=1000).has_length, Training(input_rate=100).has_length
    (True, False)
    """

    epochs: float | None = described(None, "Number of epochs.", metavar="N", default="1 with --samples")
    samples: int | None = described(
        None, "Samples in an epoch.", metavar="N", default="the length of a script's DataLoader"
    )
    samples_per_step: int | None = described(
        None, "Samples in a step.", metavar="N", default="the batch of a model, or of a script's DataLoader"
    )
    total_steps: int | None = described(None, "Number of steps, instead of --epochs and --samples.", metavar="N")
    input_rate: float | None = described(
        None, "Measured data-loader throughput, in samples per second. It limits the speed of steps.", metavar="N"
    )
    prices: Prices | str | Path | Mapping[str, Any] | None = described(
        None,
        "TOML file with prices: GPUs per hour, and energy per kWh.",
        metavar="FILE.toml",
        default="prices.toml in Ullage's folder, if it is there",
    )

    def __post_init__(self) -> None:
        for spec in fields(self):
            value = getattr(self, spec.name)
            if spec.name != "prices" and value is not None and not 0 < value < math.inf:
                raise InvalidValue(f"{spec.name} must be a number above zero, got {value}")
        if self.total_steps is not None and (self.epochs is not None or self.samples is not None):
            raise InvalidValue("length of the training must be either total_steps, or epochs and samples, got both")
        if self.prices is not None and not self.has_length:
            raise InvalidValue("prices need the length of the training: epochs, samples or total_steps")
        object.__setattr__(self, "prices", self._known_prices())

    def _known_prices(self) -> Prices | None:
        own, given = home() / "prices.toml", self.prices
        if given is None and self.has_length and own.is_file():
            given = own
        if given is None or isinstance(given, Prices):
            return given
        return Prices.from_dict(given) if isinstance(given, Mapping) else Prices.read(given)

    def check(self, tells_epoch: bool, tells_step: bool) -> None:
        """Reject a training early if its length or input rate could not be computed after the run. A script may show
        the samples of an epoch; scripts and a model's options show those of a step."""
        if self.has_length and self.total_steps is None and self.samples is None and not tells_epoch:
            raise InvalidValue(_NO_SAMPLES)
        needs_step = self.input_rate is not None or self.has_length and self.total_steps is None
        if needs_step and self.samples_per_step is None and not tells_step:
            raise InvalidValue(NO_SAMPLES_PER_STEP)

    @property
    def is_empty(self) -> bool:
        return self == Training()

    @property
    def has_length(self) -> bool:
        return any(value is not None for value in (self.epochs, self.samples, self.total_steps))

    def cost(self, step: Utilization, epoch_samples: int | None = None) -> "TrainingCost | None":
        """Return the cost of the training; `None` without a length. `epoch_samples` are those that the run itself
        showed."""
        if not self.has_length:
            return None
        samples, steps = self.samples or epoch_samples, self.total_steps
        epochs = None if steps is not None else self.epochs or 1
        if epochs is not None:
            if samples is None:
                raise InvalidValue(_NO_SAMPLES)
            if step.samples is None:
                raise InvalidValue(NO_SAMPLES_PER_STEP)
            steps = math.ceil(epochs * math.ceil(samples / step.samples))
        assert steps is not None
        hours, kwh = steps * step.step_s / 3600, steps * step.energy_j / 3.6e6
        prices = self._known_prices()
        cost = None if prices is None else prices.of(step.gpu, hours, kwh)
        notes = [f"{prices.source} has no price for {step.gpu}"] if prices is not None and cost is None else []
        return TrainingCost(
            epochs=epochs,
            samples=None if epochs is None else samples,
            steps=steps,
            hours=hours,
            kwh=kwh,
            cost=cost,
            currency=None if prices is None or cost is None else prices.currency,
            notes=notes,
        )


@dataclass(frozen=True, kw_only=True)
class TrainingCost:
    """Length and cost of a training on one GPU: `steps`, `hours`, `kwh` of the GPU, and `cost` in `currency`.

    `cost` is `None` without a known price. `epochs` and `samples` are `None` if a number of steps was given.
    Validation, checkpoints and waiting for a GPU are not included.
    """

    epochs: float | None
    samples: int | None
    steps: int
    hours: float
    kwh: float
    cost: float | None = None
    currency: str | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def length_words(self) -> str:
        """The length, such as "90 epochs of 1,281,167 samples: 1,801,710 steps"."""
        steps = f"{self.steps:,} step{'s' if self.steps != 1 else ''}"
        if self.epochs is None or self.samples is None:
            return steps
        return f"{self.epochs:g} epoch{'s' if self.epochs != 1 else ''} of {self.samples:,} samples: {steps}"

    @property
    def cost_words(self) -> str:
        """The cost, such as "12.30 EUR"; empty if unknown."""
        return "" if self.cost is None else f"{self.cost:,.2f} {self.currency}".strip()

    @property
    def words(self) -> str:
        kwh = f"{self.kwh:,.0f} kWh" if self.kwh >= 100 else f"{self.kwh:.3g} kWh"
        taken = [self.length_words, format_duration(self.hours * 3600), kwh, self.cost_words]
        return ", ".join([*filter(None, taken), *self.notes])

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "TrainingCost":
        """Read what `to_dict` gave; keys of later versions are ignored."""
        return cls(**known_fields(cls, values, "cost of a training"))
