"""`Utilization`: the time of a training step on one GPU, and how busy it keeps it."""

import contextlib
import inspect
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from html import escape
from typing import Any, NamedTuple, Self

from ullage.errors import InvalidValue, UnknownName
from ullage.hardware import gpu
from ullage.performance.data_sheet import RESTING_W, WAITING_SHARE, WAITING_W
from ullage.units import format_duration

_BAR = 20  # characters
FILLS = 0.4  # of the SMs: a kernel that uses this share leaves no room for kernels of other jobs
NO_SAMPLES_PER_STEP = "how many samples a step takes is not known: give samples_per_step (--samples-per-step N)"


def waiting_w(name: str) -> float:
    """Return the watts that a GPU draws while its jobs wait: as measured on an H200, but at most a quarter of its
    limit. Jobs that share a GPU draw it once."""
    limit = None
    with contextlib.suppress(UnknownName):  # a custom card
        limit = gpu(name).power_w
    return WAITING_W if limit is None else min(WAITING_W, WAITING_SHARE * limit)


def resting_w(name: str) -> float:
    """Return the watts of a GPU without jobs: the same share of `waiting_w` as on the H200."""
    return waiting_w(name) * RESTING_W / WAITING_W


class KernelGroup(NamedTuple):
    """Kernels of similar length in a step: their number, their seconds, and those seconds times the SMs they fill."""

    number: float
    seconds: float
    filled: float


@dataclass(frozen=True, kw_only=True)
class Utilization:
    """The time of a step of a job that has a GPU to itself, and the activity of that GPU.

    A step takes `step_s` seconds. The GPU works for `gpu_s`; the host needs `host_s` to launch everything, and if that
    is more, the GPU waits for it. `smact`, `smocc`, `drama` and `tensor` are shares of the step, from 0 to 1, as
    DCGM and GPM define them: SMs with work, their occupancy, the memory interface, the tensor cores. The GPU draws
    `power_w` watts on average and uses `energy_j` joules for a step.

    A step is `flops` floating-point operations of matrix products and convolutions, reads and writes at least `bytes`
    of memory, and launches `kernels`; its host waits `waits` times until the GPU is done. The host spends `copy_s` of
    `host_s` in copies that it waits for, while the GPU is idle. `steady` says whether the followed step repeats.
    `measured` says whether rates were measured on this GPU; elsewhere they follow from its bandwidth, FLOP/s and SMs.

    A step takes `samples`, if known. The data loader is a part of a step only if its rate was given: the samples of a
    step then take `input_s` seconds.

    With other ranks, the GPU waits `network_s` seconds of a step for them, apart from the time in which it computes.
    That is modelled, for the networks that `interconnect` names. `collectives` lists the exchanges: each `operation`
    with its `bytes`, `ranks` and `nodes`, its `count` in a step, and the total `seconds`. A stage of a pipeline waits
    `bubble_s` seconds for the others. `data_ranks` is the number of ranks with samples of their own, according to
    their samplers.

    `kernel_groups` are the kernels of a step by length (`performance.alone`), if its calls are known. `kernels` counts
    calls, some of which launch several kernels.
    """

    gpu: str
    step_s: float
    gpu_s: float
    host_s: float
    smact: float
    smocc: float
    drama: float
    tensor: float
    power_w: float
    energy_j: float
    flops: float
    bytes: float
    kernels: int
    steady: bool
    measured: bool
    waits: int = 0
    copy_s: float = 0.0
    samples: int | None = None
    input_s: float | None = None
    network_s: float = 0.0
    bubble_s: float = 0.0
    data_ranks: int | None = None
    interconnect: str | None = None
    collectives: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    kernel_groups: list[KernelGroup] = field(default_factory=list)

    @property
    def busy(self) -> float:
        """The share of a step in which the GPU works."""
        return min(1.0, self.gpu_s / self.step_s) if self.step_s else 0.0

    @property
    def waits_for_host(self) -> bool:
        return self.host_s > self.gpu_s + self.network_s

    @property
    def waits_for_input(self) -> bool:
        return self.input_s is not None and self.input_s >= self.step_s

    def fed_at(self, rate: float) -> Self:
        """Return the same job with a data loader of this rate (samples per second), which limits its steps."""
        if self.samples is None:
            raise InvalidValue(NO_SAMPLES_PER_STEP)
        input_s = self.samples / rate
        step_s = max(self.step_s, input_s)
        share = self.step_s / step_s if step_s else 1.0
        energy = self.energy_j + (step_s - self.step_s) * min(waiting_w(self.gpu), self.power_w)
        slower = {name: share * getattr(self, name) for name in ("smact", "smocc", "drama", "tensor")}
        power_w = energy / step_s if step_s else self.power_w
        return replace(self, step_s=step_s, input_s=input_s, energy_j=energy, power_w=power_w, **slower)

    # In words.

    @property
    def step_words(self) -> str:
        """The time of a step, such as "18.4 ms: the GPU works 15.8 ms, the host needs 18.4 ms"."""
        parts = [f"the GPU works {format_duration(self.gpu_s)}", f"the host needs {format_duration(self.host_s)}"]
        parts += [f"the network adds {format_duration(self.network_s)}"] if self.interconnect else []
        parts += [f"the pipeline's bubble adds {format_duration(self.bubble_s)}"] if self.bubble_s else []
        parts += [] if self.input_s is None else [f"input {format_duration(self.input_s)}"]
        return f"{format_duration(self.step_s)}: {', '.join(parts)}"

    @property
    def limit_words(self) -> str:
        """The limit of a step, such as "the host: the GPU waits for it 70% of the step"."""
        waits = f"the GPU waits for it {percent(1 - self.busy)} of the step"
        if self.waits_for_input:
            return f"the input: {waits}"
        if self.waits_for_host:
            return f"the host: {waits}"
        if self.network_s > self.gpu_s:
            return f"the network: {waits}"
        return f"the GPU: it works {percent(self.busy)} of the step"

    @property
    def shares(self) -> list[tuple[str, float, str]]:
        """Each share of the step: name, value and meaning."""
        return [
            ("SMACT", self.smact, "SMs with work"),
            ("SMOCC", self.smocc, "their occupancy"),
            ("DRAMA", self.drama, "the memory interface"),
            ("tensor cores", self.tensor, ""),
        ]

    @property
    def power_words(self) -> str:
        """Power and energy, such as "412 W, 7.58 J a step"."""
        return f"{self.power_w:.0f} W, {self.energy_j:.3g} J a step"

    @property
    def remarks(self) -> list[str]:
        remarks = {
            f"not measured on {self.gpu}: by its bandwidth, FLOP/s and SMs": not self.measured,
            f"the network is modelled, not measured: {self.interconnect}": self.interconnect,
            "the bubble is that of equal stages": self.bubble_s,
            "no step repeated: this is the last one that was seen": not self.steady,
            "the data loader is not a part of it": self.input_s is None,
        }
        return [remark for remark, holds in remarks.items() if holds] + self.notes

    def __str__(self) -> str:
        lines = [f"A step on {self.gpu} takes {self.step_words}.", f"It is limited by {self.limit_words}.", ""]
        lines += [
            f"  {name:<13} {percent(value):>5}  {bar(value)}  {words}".rstrip() for name, value, words in self.shares
        ]
        lines += [f"  {'power':<13} {self.power_words}", ""]
        return "\n".join(lines + [f"{words[:1].upper()}{words[1:]}." for words in self.remarks])

    def _repr_html_(self) -> str:
        return f"<pre>{escape(str(self))}</pre>"

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def to_json(self, indent: int | None = None) -> str:
        """Return the attributes as JSON; the keys are the attributes' names."""
        return json.dumps(self.to_dict(), indent=indent)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """Read the result of `to_dict`; keys of later versions are ignored."""
        known = known_fields(cls, values, "utilization")
        for spec in fields(cls):
            value, optional = known.get(spec.name, 0), spec.default is None
            is_number = spec.type in (int, float, int | None, float | None)
            if is_number and not (_is_number(value) or optional and value is None):
                raise InvalidValue(f"invalid utilization: {spec.name} must be a number, got {value!r}")
        groups = known.get("kernel_groups", [])
        groups = groups if isinstance(groups, list) else [groups]
        for group in groups:
            if not (isinstance(group, list | tuple) and len(group) == 3 and all(map(_is_number, group))):
                raise InvalidValue(f"invalid utilization: a group of kernels must be three numbers, got {group!r}")
        return cls(**known | {"kernel_groups": [KernelGroup(*group) for group in groups]})


def known_fields(cls: Any, values: Mapping[str, Any], what: str) -> dict[str, Any]:
    """Return the values of the fields of a data class or a named tuple; keys of later versions are left out."""
    parameters = inspect.signature(cls).parameters
    if missing := [name for name, each in parameters.items() if each.default is each.empty and name not in values]:
        raise InvalidValue(f"the {what} must have {', '.join(missing)}")
    return {name: value for name, value in values.items() if name in parameters}


def _is_number(value: Any) -> bool:
    return type(value) in (int, float)


def percent(share: float) -> str:
    return f"{100 * share:.0f}%"


def bar(share: float) -> str:
    full = round(_BAR * min(1.0, share))
    return "█" * full + "░" * (_BAR - full)
