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
        elif not self._evaluating and self._is_evaluated(module):
            self._switch(id(module))

    def _is_evaluated(self, module: torch.nn.Module) -> bool:
        if _in_backward_pass() != -1:
            return False
        trains = id(module) in self._trained
        if torch.is_grad_enabled() and not trains:
            return False
        if not self.settled:
            self._seen.add(id(module))
            return True
        return trains or id(module) not in self._seen

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

        Those of validation count the training's cached blocks too, as a GPU does: equal to the training's peak, it
        means that validation needed no more than what training had left behind.
        """
        if not has_trained:
            return {INFERENCE: self._memory.allocator.peak_reserved} if self._memory.clock else {}
        validation = self.stretches()
        training, reserved, begin = [], 0, 0
        for start, end in validation:
            training.append((begin, start))
            begin = end
        training.append((begin, self._memory.clock + 1))
        peaks = {TRAINING: max(self._most_reserved(*stretch) for stretch in training)}
        if validation:
            peaks[VALIDATION] = max(self._most_reserved(*stretch) for stretch in validation)
        reserved = self._memory.allocator.peak_reserved
        if reserved > max(peaks.values()):
            peaks[TRAINING] = reserved  # reached while the settled iterations were repeated on the allocator alone
        return peaks

    def _most_reserved(self, begin: int, end: int) -> int:
        at_begin, most = 0, 0
        for clock, reserved in self._memory.reserved_at:
            if clock <= begin:
                at_begin = reserved
            elif clock < end:
                most = max(most, reserved)
        return max(at_begin, most)
