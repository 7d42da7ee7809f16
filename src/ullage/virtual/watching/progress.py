"""Progress of a training loop: optimizer steps, backward passes, training and validation, and the purpose of memory,
which optimizers know."""

from bisect import bisect_left
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch.nn.modules import module as torch_module
from torch.optim import optimizer as torch_optimizer

from ullage.virtual.call.replacements import Replacements
from ullage.virtual.memory.allocations import ACTIVATIONS, GRADIENTS, OPTIMIZER, PARAMETERS
from ullage.virtual.state import GPUState
from ullage.virtual.watching.own_loop import OwnLoop

_in_backward_pass = torch._C._current_graph_task_id


class Progress:
    def __init__(self, gpu: GPUState) -> None:
        self._gpu = gpu
        self.optimizer_steps = 0
        self.ends: list[int] = []  # the clock of the memory at the end of each step
        self.on_step: Callable[[], None] | None = None
        self.loop: OwnLoop | None = None

    def install(self) -> Callable[[], None]:
        end = ExitStack()
        end.callback(torch_optimizer.register_optimizer_step_pre_hook(self._before).remove)
        end.callback(torch_optimizer.register_optimizer_step_post_hook(self._after).remove)
        return end.close

    def step_at(self, clock: int) -> int | None:
        """Return the optimizer step, counted from 1, of a moment; `None` without steps."""
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
        self._gpu.memory.kind = ACTIVATIONS
        self._count_step()
        self._gpu.calls.end_step()
        if self.loop is not None:
            self.loop.end_step()
        if self.on_step is not None:
            self.on_step()

    def extrapolate(self) -> bool:
        """Extrapolate the next step if it is known; return whether it was known."""
        if self.loop is None or not self.loop.extrapolate():
            return False
        self._count_step()
        return True

    def _count_step(self) -> None:
        memory = self._gpu.memory
        self.optimizer_steps += 1
        if self.ends:
            memory.mark_copies(since=self.ends[-1])
        self.ends.append(memory.clock)


class BackwardPasses:
    """Counts outermost backward passes, the steps of a loop without an optimizer, and optimizers."""

    def __init__(self, on_backward: Callable[[], None], on_first_optimizer: Callable[[], None]) -> None:
        self.count = 0
        self.optimizers = 0
        self._on_backward, self._on_first_optimizer = on_backward, on_first_optimizer

    def install(self, replacements: Replacements) -> None:
        run: Any = torch.autograd._engine_run_backward  # type: ignore[attr-defined]
        make: Any = torch.optim.Optimizer.__init__

        def run_backward(*args: Any, **options: Any) -> Any:
            if _in_backward_pass() != -1:
                return run(*args, **options)
            result = run(*args, **options)
            self.count += 1
            self._on_backward()
            return result

        def __init__(optimizer: Any, *args: Any, **options: Any) -> None:
            self.optimizers += 1
            if self.optimizers == 1:
                self._on_first_optimizer()
            make(optimizer, *args, **options)

        replacements.put(torch.autograd, "_engine_run_backward", run_backward)
        replacements.put(torch.optim.Optimizer, "__init__", __init__)


TRAINING, VALIDATION, AFTER, INFERENCE = "training", "validation", "after training", "inference"


class Phases:
    """Training and validation phases of a run, in allocator calls.

    Validation begins when a module in evaluation mode runs without gradients, or one that was in training mode before,
    and ends with a forward pass in training mode. A frozen teacher or a loss network, which runs in evaluation mode in
    each training step, is no validation; one that is first seen after training has converged is, such as a moving
    average.
    """

    def __init__(self, gpu: GPUState) -> None:
        self._memory = gpu.memory
        self._trained: set[int] = set()  # modules that ran with gradients in training mode
        self._seen: set[int] = set()  # modules that ran in evaluation mode before training settled
        self._switches: list[tuple[int, int | None]] = []  # the clock, and the module evaluated from then on
        self._evaluating = False
        self._last_step = 0  # the clock of the memory
        self.settled = False

    def after_step(self) -> None:
        """Call after each training step: calls after the last step do not belong to training."""
        self._last_step = self._memory.clock

    def install(self) -> Callable[[], None]:
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

    def stretches(self) -> list[tuple[int, int]]:
        """Return begin and end of each validation, in allocator calls."""
        ends = [clock for clock, _ in self._switches[1:]] + [self._memory.clock]
        return [
            (begin, end)
            for (begin, module), end in zip(self._switches, ends, strict=False)
            if end > begin and module is not None and (module in self._trained or module not in self._seen)
        ]

    def peaks(self, has_trained: bool) -> dict[str, int]:
        """Return the peak of reserved bytes in each phase of the run. Training counts only what it reserved itself.
        Validation begins with its cache: if the peaks are equal, it needed no more."""
        allocator = self._memory.allocator
        if not has_trained:
            return {INFERENCE: allocator.peak_reserved} if self._memory.clock else {}
        validation = self.stretches()
        edges = [0, *(clock for stretch in validation for clock in stretch), self._memory.clock + 1]
        others = list(zip(edges[::2], edges[1::2], strict=True))
        end = self._last_step or self._memory.clock
        training = [(begin, min(clock, end)) for begin, clock in others]
        after = max((size for begin, clock in others for size in self._raised_in(max(begin, end), clock)), default=0)
        peaks = {TRAINING: max(max(self._raised_in(*stretch), default=0) for stretch in training)}
        if validation:
            peaks[VALIDATION] = max(
                max(self._raised_in(begin, end), default=([0] + self._raised_in(-1, begin))[-1])
                for begin, end in validation
            )
        if after > max(peaks.values()):
            peaks[AFTER] = after
        if allocator.peak_reserved > max(peaks.values()):
            # It was raised while the last iteration was repeated on the allocator alone.
            peaks[TRAINING] = allocator.peak_reserved
        return peaks

    def _raised_in(self, begin: int, end: int) -> list[int]:
        return [reserved for clock, reserved in self._memory.reserved_at if begin < clock <= end]
