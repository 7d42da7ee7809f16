"""The process that trains three steps on the CPU under PyTorch's profiler: `python -m
ullage.estimation.estimators.xmem.child`.

It reads a pickled request from its standard input and writes a pickled answer to the file named there: a trace, or the
message of what went wrong. It is a process of its own so that it can be stopped, and so that the profiler and the hooks
touch nobody else's training.
"""

from __future__ import annotations

import contextlib
import importlib
import pickle
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.profiler import ProfilerActivity, profile, record_function

from ullage.errors import UllageError
from ullage.estimation.estimators.xmem.replay import FIRST_FORWARD, CpuTrace, read_trace
from ullage.workloads.configuration import Configuration

ITERATIONS = 3  # as in the papers: the first is special, the second and third show what lasts


@dataclass
class Request:
    """What to train: a configuration, or a function by module and name that takes a device."""

    answer: str
    configuration: Configuration | None = None
    function: tuple[str, str] | None = None


class Enough(BaseException):
    """Three steps are done. Not an `Exception`, so that the training code does not catch it by accident."""


class _Watch:
    """Notes the parameters at the first forward pass and stops the training after the last step."""

    def __init__(self) -> None:
        self.parameters: list[tuple[int, int]] = []
        self.seen_forward = False
        self.steps = 0

    def before_forward(self, module: nn.Module, inputs: Any) -> None:
        if self.seen_forward:
            return
        self.seen_forward = True
        storages = [tensor.untyped_storage() for tensor in [*module.parameters(), *module.buffers()]]
        self.parameters = list({storage.data_ptr(): storage.nbytes() for storage in storages}.items())
        with record_function(FIRST_FORWARD):
            pass

    def after_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self.steps += 1
        if self.steps == ITERATIONS:
            raise Enough


def profiled(train: Callable[[], Any]) -> CpuTrace:
    """The trace of a function that trains on the CPU. It is stopped after its third optimizer step.

    >>> import torch
    >>> def train():
    ...     model = nn.Linear(4, 4)
    ...     optimizer = torch.optim.SGD(model.parameters())
    ...     for _ in range(3):
    ...         optimizer.zero_grad()
    ...         model(torch.ones(2, 4)).sum().backward()
    ...         optimizer.step()
    >>> len(profiled(train).steps)
    3
    """
    watch = _Watch()
    handles = [
        nn.modules.module.register_module_forward_pre_hook(watch.before_forward),
        register_optimizer_step_post_hook(watch.after_step),
    ]
    begin = time.perf_counter()
    try:
        profiler = profile(activities=[ProfilerActivity.CPU], profile_memory=True, record_shapes=True)
        with profiler, contextlib.suppress(Enough):
            train()
    finally:
        for handle in handles:
            handle.remove()
    assert profiler.profiler is not None
    results: Any = profiler.profiler.kineto_results
    trace = read_trace(results.experimental_event_tree(), watch.parameters)
    trace.seconds = time.perf_counter() - begin
    return trace


def training(request: Request) -> Callable[[], Any]:
    """What the request asks to train, as a function without arguments."""
    if request.configuration is not None:
        from ullage.workloads.training import train

        configuration = request.configuration
        return lambda: train(configuration, ITERATIONS, device="cpu")
    assert request.function is not None
    module, name = request.function
    function: Any = importlib.import_module(module)
    for part in name.split("."):
        function = getattr(function, part)
    return lambda: function("cpu")


def main() -> int:
    """Answer one request."""
    request: Request = pickle.load(sys.stdin.buffer)
    answer: CpuTrace | str
    try:
        answer = profiled(training(request))
    except UllageError as error:
        answer = str(error)
    except Exception as error:
        lines = [line for line in str(error).splitlines() if line.strip()] or [""]
        answer = f"training on the CPU failed: {type(error).__name__}: {lines[0]}"
    Path(request.answer).write_bytes(pickle.dumps(answer))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())  # the module by its name, so that what is pickled is found by it
