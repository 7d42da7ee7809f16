"""Why a measured line does not come into a data set, and the account of all that were dropped."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ullage.units import format_bytes

OUT_OF_MEMORY = "out of memory"
FAILED = "failed"
NO_STEP = "too few optimizer steps"
GAVE_BACK = "memory was short"
DUPLICATE = "duplicate"
IMPOSSIBLE = "impossible values"
NO_RUN = "no training run"
REASONS = {
    OUT_OF_MEMORY: "the GPU was too small for the run",
    FAILED: "the process ended without an answer, or the model did not run",
    NO_STEP: "a GradScaler skipped them: no pass ran with the optimizer's states in memory",
    GAVE_BACK: "cached memory had to be given back, so that the peak is not the run's own",
    DUPLICATE: "the same run on the same GPU and version of PyTorch is there already",
    IMPOSSIBLE: "figures that contradict each other, or less memory than weights and gradients take",
    NO_RUN: "the line is no configuration that Ullage can build",
}
NO_STATES = ("sgd",)  # optimizers that keep nothing from step to step
SHARES = ("gract", "smact", "smocc", "drama")
ROUNDING = 1.01  # counters of a GPU may be read a little over 1


@dataclass(frozen=True)
class Dropped:
    """A line that was dropped."""

    id: str
    reason: str
    detail: str
    source: str


@dataclass
class Report:
    """What became of every measured line: `read` = `kept` + `joined` (to a run that was kept) + dropped ones."""

    files: list[str] = field(default_factory=list)
    read: int = 0
    kept: int = 0
    joined: int = 0
    renamed: int = 0
    lent: int = 0  # runs that shared a process, with the context of others
    dropped: list[Dropped] = field(default_factory=list)
    blanked: Counter[str] = field(default_factory=Counter)

    def drop(self, id: str, reason: str, detail: str, source: str) -> None:
        """Note a line that is not used."""
        self.dropped.append(Dropped(id, reason, detail, source))

    @property
    def counts(self) -> dict[str, int]:
        """How many were dropped for each reason, the most frequent first."""
        return dict(Counter(one.reason for one in self.dropped).most_common())

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it.

        >>> Report(read=2, kept=1, dropped=[Dropped("a", FAILED, "killed", "m.jsonl")]).to_dict()["dropped"]
        {'failed': 1}
        """
        lines = [vars(one) for one in self.dropped]
        return {
            "files": self.files, "read": self.read, "kept": self.kept, "joined": self.joined, "renamed": self.renamed,
            "lent": self.lent,            "dropped": self.counts, "blanked": dict(self.blanked), "dropped_lines": lines,
        }  # fmt: skip


def trouble(line: Mapping[str, Any], card: int | None) -> tuple[str, str] | None:
    """Why a measured line cannot be used, and the details; `card` is the GPU's memory in bytes where it is known.

    >>> trouble({"oom": "CUDA out of memory", "tried": 3 << 30}, None)
    ('out of memory', 'at 3.00 GiB')
    """
    if "failed" in line:
        return FAILED, str(line["failed"]).splitlines()[0] if line["failed"] else ""
    if "oom" in line:
        tried = line.get("tried")
        return OUT_OF_MEMORY, f"at {format_bytes(tried)}" if tried else str(line["oom"])
    if line.get("retries"):
        return GAVE_BACK, f"{line['retries']} times"
    steps = line.get("optimizer_steps")
    needed = 1 if line.get("opt") in NO_STATES else 2
    if steps is not None and steps < needed and not line.get("inference"):
        return NO_STEP, f"{steps} steps; needed {needed} with {line.get('opt')}"
    wrong = _contradiction(line, card)
    return None if wrong is None else (IMPOSSIBLE, wrong)


def _contradiction(line: Mapping[str, Any], card: int | None) -> str | None:
    allocated, reserved = line.get("peak_alloc"), line.get("peak_reserved")
    if not allocated or not reserved:
        return "no peak"
    if reserved < allocated:
        return f"{reserved} bytes reserved, {allocated} allocated"
    end, end_reserved = line.get("nvml_end"), line.get("end_reserved")
    if end_reserved is not None and end_reserved > reserved:
        return f"{end_reserved} bytes reserved at the end, {reserved} at the peak"
    if end is not None and end_reserved is not None and end <= end_reserved:
        return f"the process has {end} bytes, PyTorch {end_reserved}"
    process = process_memory(line)
    if card is not None and process is not None and process > card:
        return f"{format_bytes(process)} on a GPU of {format_bytes(card)}"
    return None


def too_little(allocated: int, parameters: int, precision: str, inference: bool = False) -> bool:
    """Whether tensors took less than the weights, and the gradients in training, must take.

    >>> too_little(100, 10, "fp32"), too_little(70, 10, "fp32"), too_little(70, 10, "bf16")
    (False, True, False)
    """
    width = 2 if precision in ("bf16", "fp16") else 4
    return allocated < parameters * width * (1 if inference else 2)


def process_memory(line: Mapping[str, Any]) -> int | None:
    """What nvidia-smi would have shown at the peak.

    NVML is read once, after the last step; by then the allocator may hold less than it did at its peak, so that what
    lies beside its memory is taken from the end and what it reserved from the peak.

    >>> process_memory({"nvml_end": 900, "end_reserved": 300, "peak_reserved": 400})
    1000
    """
    beside, reserved = context(line), line.get("peak_reserved")
    return None if beside is None or reserved is None else int(beside + reserved)


def context(line: Mapping[str, Any]) -> int | None:
    """What the process had beside PyTorch's memory after the last step: the CUDA context with all kernels loaded."""
    end, reserved = line.get("nvml_end"), line.get("end_reserved")
    if end is None or reserved is None:
        lent: int | None = line.get("lent_context")
        return lent
    return int(end - reserved)


def share(value: float | None) -> float | None:
    """A share from 0 to 1; what cannot be one is unknown.

    >>> share(0.4), share(1.004), share(-1.0)
    (0.4, 1.0, None)
    """
    return None if value is None or not 0 <= value <= ROUNDING else min(1.0, value)
