"""Three training steps on the CPU under PyTorch's profiler, in a child process.

It is a process of its own so that it can be stopped when it takes too long or too much of this machine's memory, and so
that the profiler and the hooks touch nobody else's training.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.profiler import ProfilerActivity, profile, record_function

from ullage.errors import InvalidValue, UllageError
from ullage.estimation.estimators.xmem.replay import FIRST_FORWARD, CpuTrace, read_trace
from ullage.isolation.child import function_named
from ullage.isolation.environment import environment
from ullage.isolation.limits import Limits, machine_memory
from ullage.isolation.parent import run
from ullage.isolation.protocol import error_text
from ullage.workloads.configuration import Configuration

ITERATIONS = 3  # as in the papers: the first is special, the second and third show what lasts
TIMEOUT = 600.0  # seconds
_SHARE = 0.8  # of the memory that is available at the start
_LEFT = 0.04  # of the machine's memory that must stay free for everybody else


class TooLarge(UllageError, RuntimeError):
    """The run on the CPU was stopped: it took too much memory or too much time. There is no estimate then.

    >>> raise TooLarge("more memory than this machine has")
    Traceback (most recent call last):
    ...
    ullage.estimation.estimators.xmem.cpu_run.TooLarge: more memory than this machine has
    """


@dataclass(frozen=True, kw_only=True)
class CpuTraining:
    """What to train: a configuration, or a function by module and name that takes a device."""

    configuration: Configuration | None = None
    function: tuple[str, str] | None = None


def default_memory() -> int:
    """Bytes of this machine's memory that the run may take if nobody says how many."""
    return int(machine_memory()[0] * _SHARE)


def run_on_cpu(training: CpuTraining, *, timeout: float = TIMEOUT, memory: int | None = None) -> CpuTrace:
    """The trace of a training; `TooLarge` if a limit stopped it, `InvalidValue` if it failed by itself.

    `timeout` is in seconds, `memory` in bytes; `None` is most of what this machine has available.
    """
    allowed = default_memory() if memory is None else memory
    outcome = run(
        "ullage.estimation.estimators.xmem.cpu_run:profile_here",
        asdict(training),
        limits=Limits(seconds=timeout, memory=allowed, left_free=_LEFT),
        # A function is imported by its name, so from the same places; threads that wait must not hold the cores.
        env=environment(import_from=sys.path) | {"OMP_WAIT_POLICY": "passive", "KMP_BLOCKTIME": "0"},
    )
    if outcome.answer is not None:
        return CpuTrace.from_dict(outcome.answer)
    if outcome.reason in ("time", "memory"):
        raise TooLarge(f"three training steps on the CPU {outcome.failure}")
    raise InvalidValue(str(outcome.failure) if outcome.reason == "error" else f"training on the CPU {outcome.failure}")


def profile_here(request: dict[str, Any]) -> dict[str, Any]:
    """In the child process: train and answer with the trace."""
    try:
        return profiled(_training(request)).to_dict()
    except UllageError:
        raise
    except Exception as error:
        raise InvalidValue(f"training on the CPU failed: {error_text(error)}") from error


class ProfiledEnough(BaseException):
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
            raise ProfiledEnough


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
        with profiler, contextlib.suppress(ProfiledEnough):
            train()
    finally:
        for handle in handles:
            handle.remove()
    assert profiler.profiler is not None
    results: Any = profiler.profiler.kineto_results
    trace = read_trace(results.experimental_event_tree(), watch.parameters)
    trace.seconds = time.perf_counter() - begin
    return trace


def _training(request: dict[str, Any]) -> Callable[[], Any]:
    """What the request asks to train, as a function without arguments."""
    if request["configuration"] is not None:
        from ullage.workloads.training import train

        configuration = Configuration(**request["configuration"])
        return lambda: train(configuration, ITERATIONS, device="cpu")
    function = function_named(":".join(request["function"]))
    return lambda: function("cpu")
