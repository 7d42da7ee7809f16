"""Where the training loop is: PyTorch's own optimizer hooks tell when a step begins and ends.

They also tell what memory is for: an optimizer's parameters, their gradients and its state are known at each step.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import optimizer as torch_optimizer

from ullage.virtual.memory import ACTIVATIONS, GRADIENTS, OPTIMIZER, PARAMETERS

if TYPE_CHECKING:
    from ullage.virtual.gpu import VirtualGPU


class Progress:
    """Counts optimizer steps and marks memory by its purpose."""

    def __init__(self, gpu: VirtualGPU) -> None:
        self._gpu = gpu
        self.optimizer_steps = 0
        self.peaks: list[tuple[int, int]] = []  # allocated and reserved peak after each step
        self.ends: list[int] = []  # the clock of the memory at the end of each step
        self.phases: dict[str, int] = {}  # peak reserved bytes by phase, where somebody watched (phases.py)
        self.on_step: Callable[[], None] | None = None

    def install(self) -> Callable[[], None]:
        """Begin to watch; returns what ends it."""
        before = torch_optimizer.register_optimizer_step_pre_hook(self._before)
        after = torch_optimizer.register_optimizer_step_post_hook(self._after)

        def remove() -> None:
            before.remove()
            after.remove()

        return remove

    def step_at(self, clock: int) -> int | None:
        """In which optimizer step, counted from 1, a moment lies; `None` where there was no step."""
        return bisect_left(self.ends, clock) + 1 if self.ends else None

    def _before(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        memory = self._gpu.memory
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                memory.mark(parameter, PARAMETERS)
                if parameter.grad is not None and parameter.grad.layout is torch.strided:
                    memory.mark(parameter.grad, GRADIENTS)
        memory.kind = OPTIMIZER

    def _after(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        memory = self._gpu.memory
        memory.kind = ACTIVATIONS
        self.optimizer_steps += 1
        self.ends.append(memory.clock)
        self.peaks.append((memory.allocator.peak_allocated, memory.allocator.peak_reserved))
        if self.on_step is not None:
            self.on_step()
