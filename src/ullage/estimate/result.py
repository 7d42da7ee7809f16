"""The answer: one object whose `str` is the report and whose attributes are the JSON keys."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from ullage.units import format_bytes, format_duration

_BREAKDOWN_WORDS = {
    "parameters": "weights and buffers moved with them",
    "gradients": "gradients of the weights",
    "optimizer": "the optimizer's state and its temporaries",
    "activations": "inputs, activations and temporaries",
    "workspace": "kept by cuBLAS",
    "fragmentation": "reserved by the allocator beyond what is in use",
    "context": "CUDA context, libraries and kernels",
}


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """What a job will take on one GPU; all sizes are bytes.

    `peak_allocated` and `peak_reserved` are what `torch.cuda.max_memory_allocated()` and `..._reserved()` would say,
    `process_memory` is what nvidia-smi shows for the process, `upper` the bound for `process_memory` that placement
    uses. `breakdown` sums up to `process_memory`. `out_of_memory` is PyTorch's message if the job does not fit.

    >>> import ullage
    >>> ullage.estimate(train, gpu="H200").peak_reserved      # doctest: +SKIP
    92274688
    """

    gpu: str
    gpu_memory: int
    peak_allocated: int
    peak_reserved: int
    process_memory: int
    upper: int
    breakdown: dict[str, int]
    fits: bool
    headroom: int
    steps: int
    seconds: float
    out_of_memory: str | None = None
    notes: list[str] = field(default_factory=list)
    timeline: list[tuple[int, int, int]] = field(default_factory=list, repr=False)
    phases: dict[str, int] = field(default_factory=dict)
    source: str | None = None

    def to_dict(self, timeline: bool = True) -> dict[str, Any]:
        """The attributes as plain values."""
        names = [name for name in self.__dataclass_fields__ if timeline or name != "timeline"]
        return {name: getattr(self, name) for name in names}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Estimate:
        """The estimate that `to_dict` was asked of; names that are not known are left out."""
        known = {name: value for name, value in values.items() if name in cls.__dataclass_fields__}
        known["timeline"] = [tuple(point) for point in known.get("timeline", ())]
        return cls(**known)

    def to_json(self, timeline: bool = True, indent: int | None = None) -> str:
        """The attributes as JSON; the keys are the attributes' names."""
        return json.dumps(self.to_dict(timeline), indent=indent)

    def __str__(self) -> str:
        verdict = "fits" if self.fits else "DOES NOT FIT"
        lines = [
            f"{verdict} on {self.gpu}: {format_bytes(self.process_memory)} of {format_bytes(self.gpu_memory)}"
            + (f", {format_bytes(self.headroom)} left" if self.fits else ""),
            "",
            f"  {format_bytes(self.process_memory):>10}  as nvidia-smi shows it, at the peak"
            f" (at most {format_bytes(self.upper)})",
            f"  {format_bytes(self.peak_reserved):>10}  torch.cuda.max_memory_reserved()",
            f"  {format_bytes(self.peak_allocated):>10}  torch.cuda.max_memory_allocated()",
            "",
            "Of that, at the peak:",
        ]
        total = max(1, self.process_memory)
        for name, size in self.breakdown.items():
            bar = "█" * round(30 * size / total)
            lines.append(f"  {format_bytes(size):>10}  {name:<13} {bar:<30} {_BREAKDOWN_WORDS[name]}")
        lines += ["", f"{self.steps} optimizer steps followed in {format_duration(self.seconds)}, without a GPU."]
        if self.out_of_memory and not self.fits:
            lines += ["", "PyTorch would stop with:", f"  {self.out_of_memory.split(' If reserved')[0]}"]
        if self.notes:
            lines += ["", "Assumed on the way:"] + [f"  - {note}" for note in self.notes]
        return "\n".join(lines)
