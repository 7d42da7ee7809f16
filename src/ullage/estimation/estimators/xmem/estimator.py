"""`xmem`: three real training steps on the CPU, put in the order of a GPU run and replayed on the caching allocator.

After Shi, Pezaros and Elkhatib, "xMem: A CPU-Based Approach for Accurate Estimation of GPU Memory in Deep Learning
Training Workloads", Middleware 2025. Its parts are `cpu_run` (profile) and `replay` (analyse, order and replay);
the allocator is Ullage's own. Its figure is the peak of the allocator's
segments, which is what `torch.cuda.max_memory_reserved()` says; the paper adds a context measured on the GPU to it.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable
from typing import Any

from ullage.errors import InvalidValue
from ullage.estimation.estimators.answer import answer
from ullage.estimation.estimators.registry import estimator
from ullage.estimation.estimators.xmem.cpu_run import ITERATIONS, TIMEOUT, CpuTraining, run_on_cpu
from ullage.estimation.estimators.xmem.replay import ReplayOutcome, orchestrate, simulate
from ullage.estimation.result import Estimate
from ullage.hardware import GPU
from ullage.units import format_duration, parse_bytes, parse_duration
from ullage.workloads.workload import Workload

NOTES = (
    "the figure is the peak of the allocator's segments (reserved memory), without the CUDA context",
    "requests are those of CPU kernels: cuBLAS and cuDNN workspaces and CUDA's choice of kernels are not in it",
)


def supports(workload: Workload) -> str | None:
    """Training that runs on a CPU as it would on a GPU; autocast to CUDA does not.

    >>> from ullage.workloads import Configuration
    >>> supports(Workload(configuration=Configuration(model="mlp:x", widths=[8, 4], batch_size=2, inference=True)))
    'it follows training steps; this is inference'
    """
    configuration = workload.configuration
    if configuration is not None:
        if configuration.inference:
            return "it follows training steps; this is inference"
        if configuration.precision.startswith("amp"):
            return "the CPU has no CUDA autocast: the papers train in one precision"
        return None
    if workload.function is not None:
        return _why_not_function(workload.function)
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


def limits_of(options: dict[str, Any]) -> dict[str, Any]:
    """The limits of the run on the CPU that a workload's options give.

    >>> limits_of({"timeout": "90s", "memory": "4GiB"})
    {'timeout': 90.0, 'memory': 4294967296}
    """
    unknown = sorted(set(options) - {"timeout", "memory"})
    if unknown:
        raise InvalidValue(f"needed timeout or memory (of the run on the CPU); found {unknown[0]!r}")
    memory = options.get("memory")
    return {
        "timeout": parse_duration(options.get("timeout", TIMEOUT)),
        "memory": None if memory is None else parse_bytes(memory),
    }


def estimate_by_cpu_run(name: str, workload: Workload, gpu: GPU) -> Estimate:
    """The estimate, under the name of one of the two papers' tools."""
    begin = time.perf_counter()
    function = workload.function
    training = CpuTraining(
        configuration=workload.configuration,
        function=None if function is None else (function.__module__, function.__qualname__),
    )
    trace = run_on_cpu(training, **limits_of(workload.options))
    outcome = simulate(orchestrate(trace), gpu.usable)
    foreign = sum(block.operator is None for block in trace.blocks)
    notes = [*NOTES, f"{ITERATIONS} steps on the CPU took {format_duration(trace.seconds)}"]
    if foreign:
        notes.append(f"{foreign} allocations belong to no operator and were left out")
    if outcome.out_of_memory is not None:
        notes.append("the replay ran out of memory; the figures are those of a card without limit")
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
def run(workload: Workload, gpu: GPU) -> Estimate:
    """Estimate by three steps on the CPU.

    >>> from ullage.hardware import gpu
    >>> from ullage.workloads import Configuration
    >>> workload = Workload(configuration=Configuration(model="mlp:x", widths=[8, 4], batch_size=2))
    >>> run(workload, gpu("T4")).peak_reserved
    2097152
    """
    return estimate_by_cpu_run("xmem", workload, gpu)
