"""Training and validation told apart: a model that trains, run in evaluation mode, is being validated.

PyTorch's hooks for every module's call tell when a forward pass begins. A stretch of validation begins with a module
in evaluation mode that runs without gradients (or that was in training mode before), and ends with a forward pass in
training mode. A frozen teacher or a loss network runs in evaluation mode in each training step: it never trains, so
it makes no validation; unless it is first seen after training has settled, as a moving average of the weights is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.modules import module as torch_module

if TYPE_CHECKING:
    from ullage.virtual.gpu import VirtualGPU

_in_backward_pass = torch._C._current_graph_task_id
TRAINING, VALIDATION, INFERENCE = "training", "validation", "inference"


class Phases:
    """When the run was training and when validating, in the clock of its allocator calls."""

    def __init__(self, gpu: VirtualGPU) -> None:
        self._memory = gpu.memory
        self._trained: set[int] = set()  # modules that ran with gradients in training mode
        self._seen: set[int] = set()  # modules that ran in evaluation mode before training settled
        self._switches: list[tuple[int, int | None]] = []  # clock, and the module that is evaluated from then on
        self._evaluating = False
        self.settled = False

    def install(self) -> Callable[[], None]:
        """Begin to watch; returns what ends it."""
        return torch_module.register_module_forward_pre_hook(self._before_forward).remove

    def _before_forward(self, module: torch.nn.Module, inputs: Any) -> None:
        if module.training:
            if torch.is_grad_enabled():
                self._trained.add(id(module))
                if self._evaluating:
                    self._switch(None)
        else:
            if not self.settled:
                self._seen.add(id(module))
            if not self._evaluating and self._is_evaluated(module):
                self._switch(id(module))

    def _is_evaluated(self, module: torch.nn.Module) -> bool:
        if _in_backward_pass() != -1:
            return False
        trains = id(module) in self._trained
        if torch.is_grad_enabled() and not trains:
            return False
        return not self.settled or trains or id(module) not in self._seen

    def _switch(self, module: int | None) -> None:
        self._evaluating = module is not None
        self._switches.append((self._memory.clock, module))

    @property
    def evaluating(self) -> bool:
        """Whether a model is being evaluated now."""
        return self._evaluating

    def stretches(self) -> list[tuple[int, int]]:
        """Begin and end of each validation, in allocator calls."""
        found: list[tuple[int, int]] = []
        begin: int | None = None
        for clock, module in self._switches:
            if begin is not None:
                found.append((begin, clock))
            is_validation = module is not None and (module in self._trained or module not in self._seen)
            begin = clock if is_validation else None
        if begin is not None:
            found.append((begin, self._memory.clock))
        return [(begin, end) for begin, end in found if end > begin]

    def peaks(self, has_trained: bool) -> dict[str, int]:
        """The most reserved bytes in each phase that the run went through.

        What training reserves is what it asked for itself, not what validation has left in the cache. Validation
        begins with the training's cache: equal to the training's peak, its own means that it needed no more than that.
        """
        allocator = self._memory.allocator
        if not has_trained:
            return {INFERENCE: allocator.peak_reserved} if self._memory.clock else {}
        validation = self.stretches()
        edges = [0, *(clock for stretch in validation for clock in stretch), self._memory.clock + 1]
        training = list(zip(edges[::2], edges[1::2], strict=True))
        peaks = {TRAINING: max(max(self._raised_in(*stretch), default=0) for stretch in training)}
        if validation:
            peaks[VALIDATION] = max(
                max(self._raised_in(begin, end), default=self._reserved_at(begin)) for begin, end in validation
            )
        if allocator.peak_reserved > max(peaks.values()):
            peaks[TRAINING] = (
                allocator.peak_reserved
            )  # while the settled iterations were repeated on the allocator alone
        return peaks

    def _raised_in(self, begin: int, end: int) -> list[int]:
        return [reserved for clock, reserved in self._memory.reserved_at if begin < clock <= end]

    def _reserved_at(self, moment: int) -> int:
        before = [reserved for clock, reserved in self._memory.reserved_at if clock <= moment]
        return before[-1] if before else 0
