"""`xmem`: three real training steps on the CPU, put in the order of a GPU run and replayed on the caching allocator.

After Shi, Pezaros and Elkhatib, "xMem: A CPU-Based Approach for Accurate Estimation of GPU Memory in Deep Learning
Training Workloads", Middleware 2025. The steps run here under PyTorch's profiler, in a child process that is stopped
when it takes too long or too much of this machine's memory; `replay` analyses, orders and replays them on Ullage's own
allocator. The figure is the peak of the allocator's segments, which is what `torch.cuda.max_memory_reserved()` says;
the paper adds a context measured on the GPU to it.
"""

import contextlib
import inspect
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.profiler import ProfilerActivity, profile, record_function

from ullage.errors import InvalidValue, UllageError
from ullage.estimation.estimators.answer import answer
from ullage.estimation.estimators.registry import estimator
from ullage.estimation.result import Estimate
from ullage.hardware import GPU
from ullage.jobs.job import JobRequest
from ullage.jobs.model import Model
from ullage.sandbox.child import function_named
from ullage.sandbox.environment import environment
from ullage.sandbox.limits import Limits, machine_memory
from ullage.sandbox.parent import run as run_child
from ullage.sandbox.protocol import error_text
from ullage.units import format_duration, parse_bytes, parse_duration
from ullage_lab.estimators.xmem.replay import (
    FIRST_FORWARD,
    CpuTrace,
    ReplayOutcome,
    orchestrate,
    read_trace,
    simulate,
)

ITERATIONS = 3  # as in the papers: the first step also does setup, the others show the steady state
TIMEOUT = 600.0  # seconds
_SHARE = 0.8  # share of the memory available at the start
_LEFT = 0.04  # share of the machine's memory that must stay free for others
NOTES = (
    "the figure is the peak of the allocator's segments (reserved memory), without the CUDA context",
    "requests are those of CPU kernels: cuBLAS and cuDNN workspaces and CUDA's choice of kernels are not in it",
)


class TooLarge(UllageError, RuntimeError):
    """The run on the CPU was stopped because it took too much memory or time. There is no estimate then."""


@dataclass(frozen=True, kw_only=True)
class CpuTraining:
    """The training: a configuration, or a function by module and name that takes a device."""

    configuration: Model | None = None
    function: tuple[str, str] | None = None


def default_memory() -> int:
    """Return the bytes of this machine's memory that the run may use by default."""
    return int(machine_memory()[0] * _SHARE)


def run_on_cpu(training: CpuTraining, *, timeout: float = TIMEOUT, memory: int | None = None) -> CpuTrace:
    """Return the trace of a training. Raises `TooLarge` if a limit stopped it, `InvalidValue` if it failed by itself.

    `timeout` is in seconds, `memory` in bytes; `None` is most of this machine's available memory.
    """
    allowed = default_memory() if memory is None else memory
    outcome = run_child(
        "ullage_lab.estimators.xmem.estimator:profile_here",
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
    """Stops training after three steps. Not an `Exception`, so that the training code does not catch it."""


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
    """Return the trace of a function that trains on the CPU, stopped after its third optimizer step."""
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
    """Return the requested training as a function without arguments."""
    if request["configuration"] is not None:
        from ullage.jobs.training import train

        configuration = Model(**request["configuration"])
        return lambda: train(configuration, ITERATIONS, device="cpu")
    function = function_named(":".join(request["function"]))
    return lambda: function("cpu")


def supports(request: JobRequest) -> str | None:
    """Support training that runs on a CPU as on a GPU, which autocast to CUDA does not."""
    configuration = request.model
    if configuration is not None:
        if configuration.inference:
            return "it follows training steps; this is inference"
        if configuration.types.autocast is not None:
            return "the CPU has no CUDA autocast: the papers train in one precision"
        return None
    if request.function is not None:
        return _why_not_function(request.function)
    return "it needs a model's name or a function that takes a device and trains on it"


def _why_not_function(function: Callable[..., Any]) -> str | None:
    needed = [
        parameter
        for parameter in inspect.signature(function).parameters.values()
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]
    if len(needed) != 1:
        return "the function must take one argument, the device, to be trained on the CPU"
    name = getattr(function, "__qualname__", "<unnamed>")
    if "<" in name or getattr(function, "__module__", "__main__") == "__main__":
        return f"another process must be able to import the function; {name} is not at the top of an importable module"
    return None


def limits_of(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the limits of the run on the CPU from a request's options.

    >>> limits_of({"timeout": "90s", "memory": "4GiB"})
    {'timeout': 90.0, 'memory': 4294967296}
    """
    unknown = sorted(set(options) - {"timeout", "memory"})
    if unknown:
        raise InvalidValue(f"option must be timeout or memory (of the run on the CPU), got {unknown[0]!r}")
    memory = options.get("memory")
    return {
        "timeout": parse_duration(options.get("timeout", TIMEOUT)),
        "memory": None if memory is None else parse_bytes(memory),
    }


def estimate_by_cpu_run(name: str, request: JobRequest, gpu: GPU) -> Estimate:
    """Return the estimate, under the name of the tool of one of the two papers."""
    begin = time.perf_counter()
    function = request.function
    training = CpuTraining(
        configuration=request.model,
        function=None if function is None else (function.__module__, function.__qualname__),
    )
    trace = run_on_cpu(training, **limits_of(request.options))
    outcome = simulate(orchestrate(trace), gpu.usable)
    foreign = sum(block.operator is None for block in trace.blocks)
    notes = [*NOTES, f"{ITERATIONS} steps on the CPU took {format_duration(trace.seconds)}"]
    if foreign:
        notes.append(f"{foreign} allocations belong to no operator and were left out")
    if outcome.out_of_memory is not None:
        notes.append("the replay ran out of memory; the figures assume a card without a memory limit")
    return answer(
        name,
        gpu,
        "reserved",
        _parts(outcome),
        seconds=time.perf_counter() - begin,
        notes=notes,
        known={"peak_allocated": outcome.peak_allocated},
    )


def _parts(outcome: ReplayOutcome) -> dict[str, int]:
    parts = {part: outcome.live.get(part, 0) for part in ("parameters", "gradients", "optimizer", "activations")}
    return parts | {"fragmentation": outcome.peak_reserved - sum(parts.values())}


@estimator(
    "xmem",
    title="three real training steps on the CPU, replayed on the caching allocator",
    source="Shi, Pezaros, Elkhatib: xMem, Middleware 2025 (arXiv:2510.21048), analyzer, orchestrator and simulator",
    needs="the training code, time and RAM for three steps on the CPU",
    supports=supports,
)
def run(request: JobRequest, gpu: GPU) -> Estimate:
    return estimate_by_cpu_run("xmem", request, gpu)
