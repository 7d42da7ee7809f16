"""Backward passes, counted: the steps of a training loop that updates its weights without an optimizer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ullage.virtual.replacements import Replacements

_in_backward_pass = torch._C._current_graph_task_id


class BackwardPasses:
    """Counts backward passes (one inside another is not counted) and the optimizers that were made."""

    def __init__(self, on_backward: Callable[[], None], on_first_optimizer: Callable[[], None]) -> None:
        self.count = 0
        self.optimizers = 0
        self._on_backward, self._on_first_optimizer = on_backward, on_first_optimizer

    def install(self, replacements: Replacements) -> None:
        """Begin to watch."""
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
