"""The operator calls of a training step. Nothing here imports PyTorch."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass
class StepCalls:
    """The calls of a step: `calls` are the distinct ones (as in `virtual/watching/step_calls.py`), `order` has the
    index of each.

    `steady` says whether the step repeats. Its counts are `optimizer_steps`, calls of `modules`, autograd `nodes`, and
    operators on the CPU (`on_host`), which wrote `cpu_bytes` in modules, the backward pass and the optimizer.
    `samples` came from data loaders; 0 if none was watched. `largest` says that batches vary in size, and that the
    step's batch is among the largest. `data_ranks` is the number of ranks with samples of their own, 0 if no sampler
    shows it. In a pipeline, a rank waits `bubble` times its own time for the others. `interconnect` connects the ranks;
    `None` means as usual for the GPU.
    """

    calls: list[dict[str, Any]] = field(default_factory=list)
    order: list[int] = field(default_factory=list)
    steady: bool = False
    optimizer_steps: int = 0
    modules: int = 0
    nodes: int = 0
    on_host: int = 0
    cpu_bytes: int = 0
    samples: int = 0
    largest: bool = False
    data_ranks: int = 0
    bubble: float | None = None
    interconnect: str | None = None

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (self.calls[number] for number in self.order)

    @property
    def is_whole(self) -> bool:
        """Whether a step was seen to its end; otherwise these are all calls so far."""
        return self.steady or self.optimizer_steps > 0

    @property
    def waits(self) -> int:
        """The number of times the host waits until the GPU is done: for a number, a copy, or an explicit call."""
        return sum(waits_for_gpu(call) for call in self)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


# Allocations, and shapes that are changed in place.
_IN_PLACE = ("set_.", "resize_.", "as_strided_.", "t_.", "transpose_.", "squeeze_.", "unsqueeze_.")
_NO_KERNEL = ("empty", "new_empty", "_reshape_alias", *_IN_PLACE)


def runs_kernels(call: dict[str, Any]) -> bool:
    space, _, name = call["operator"].partition(".")
    if call.get("view") or space in ("cuda", "collective"):
        return False
    return not name.startswith(_NO_KERNEL)


_RESULT_ON_HOST = ("_local_scalar_dense", "equal.", "nonzero.", "masked_select", "unique_", "_unique")


def waits_for_gpu(call: dict[str, Any]) -> bool:
    """Return whether the host continues only when the GPU has finished all launched work."""
    space, _, name = str(call["operator"]).partition(".")
    if space == "cuda":
        return name == "synchronize"
    if name.startswith("_to_copy"):
        to_host = call["kwargs"].get("device") == {"device": "cpu"}
        return (to_host or "cpu" in call["args"][0]) and not call["kwargs"].get("non_blocking")
    if name.startswith("copy_"):
        target, source, *at_once = call["args"]
        return ("cpu" in target) != ("cpu" in source) and not any(at_once)
    return name.startswith(_RESULT_ON_HOST)
