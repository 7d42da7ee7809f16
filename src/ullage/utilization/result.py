"""`Utilization`: how long a training step takes on one GPU, and how busy it keeps it."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from typing import Any

from ullage.errors import InvalidValue


@dataclass(frozen=True, kw_only=True)
class Utilization:
    """How long a step of a job takes when it has a GPU to itself, and how busy it keeps that GPU.

    A step takes `step_s` seconds. Of it the GPU works `gpu_s`; the host needs `host_s` to launch everything, and where
    that is more, the GPU waits for it. `smact`, `smocc`, `drama` and `tensor` are shares of the step, from 0 to 1, as
    DCGM and GPM define them: SMs with work, their occupancy, the memory interface, the tensor cores. The GPU draws
    `power_w` watts on average and takes `energy_j` joules for a step.

    A step is `flops` floating-point operations of matrix products and convolutions, reads and writes at least `bytes`
    of memory, and launches `kernels`; `waits` times its host waits until the GPU is done. `steady` says whether the
    step that was followed repeats. `measured` says whether rates were measured on this GPU; elsewhere they follow from
    its bandwidth, FLOP/s and SMs. The data loader is not a part of a step.
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
    notes: list[str] = field(default_factory=list)

    @property
    def busy(self) -> float:
        """The share of a step in which the GPU works at all."""
        return min(1.0, self.gpu_s / self.step_s) if self.step_s else 0.0

    @property
    def waits_for_host(self) -> bool:
        """Whether the host is what a step waits for."""
        return self.host_s > self.gpu_s

    def to_dict(self) -> dict[str, Any]:
        """The attributes as a dictionary of plain values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Utilization:
        """Read what `to_dict` gave; keys of later versions are ignored."""
        known = {spec.name: values[spec.name] for spec in fields(cls) if spec.name in values}
        missing = [spec.name for spec in fields(cls) if spec.name not in known and spec.name not in ("waits", "notes")]
        if missing:
            raise InvalidValue(f"this is no utilization: {', '.join(missing)} missing")
        return cls(**known)
