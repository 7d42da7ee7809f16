"""`ullage`: the code of the workload itself, on a virtual GPU."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from ullage.errors import InvalidValue, UllageError
from ullage.estimation.estimators.registry import estimator
from ullage.estimation.from_virtual_gpu import estimate_from
from ullage.estimation.result import Estimate
from ullage.hardware import GPU
from ullage.virtual import VirtualGPU
from ullage.virtual.tracking.convergence import ConvergenceWatch, MemoryConverged
from ullage.workloads.configuration import Configuration
from ullage.workloads.training import train
from ullage.workloads.workload import RunOptions, Workload

_ITERATIONS = 5  # of the standard loop; three are watched, two more are there if the requests have not settled


def _supports(workload: Workload) -> str | None:
    if workload.kind == "summary":
        return "a summary has no code to run; horus reads one"
    return None


@estimator(
    "ullage",
    title="the unmodified code on a virtual GPU",
    source="this project, docs/explanation/design.md",
    needs="the code; no GPU",
    supports=_supports,
)
def run(workload: Workload, gpu: GPU) -> Estimate:
    """Run the workload on a virtual GPU and say how much memory it took.

    A script runs in a process of its own, a model in the standard training loop, a function as it is. A function is
    stopped after at least `steps` optimizer steps, as soon as an iteration asks for the same memory as the one before
    (after 30 steps at the latest). A workload that runs out of memory is run once more without a limit, to say how
    much it would need.

    >>> from ullage.hardware import gpu
    >>> run(Workload(configuration=Configuration(model="mlp:x", widths=[8, 4], batch_size=2)), gpu("T4")).figure_kind
    'process'

    Not covered: code after the step at which a function is stopped (validation, a second phase); use `steps=None`.
    """
    if workload.options:
        raise InvalidValue(f"the estimator ullage has no options of its own; found {', '.join(workload.options)}")
    if workload.configuration is not None:
        return _run_model(workload.configuration, gpu, workload.run)
    if workload.function is not None:
        return _run_function(workload.function, gpu, workload.run)
    from ullage.estimation.scripts.parent import DEFAULT_TIMEOUT, estimate_script

    how = workload.run
    return estimate_script(
        str(workload.script), workload.args, module=how.module, gpu=gpu, steps=how.steps,
        timeout=DEFAULT_TIMEOUT if how.timeout is None else how.timeout, config=how.allocator_config,
        trace_file=how.trace_file, show_output=how.show_output, network=how.network, python=how.python,
    )  # fmt: skip


def _run_model(configuration: Configuration, gpu: GPU, how: RunOptions) -> Estimate:
    """The standard training loop; whatever the model does not accept becomes one clear message."""
    iterations = max(_ITERATIONS, how.steps or 0)
    try:
        return _run_function(lambda: train(configuration, iterations), gpu, how)
    except (UllageError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        lines = [line for line in str(error).splitlines() if line.strip()] or [""]
        raise InvalidValue(
            f"{configuration.model} does not run with {configuration.in_words()}: {type(error).__name__}: {lines[0]}"
        ) from error


def _run_function(function: Callable[[], Any], gpu: GPU, how: RunOptions) -> Estimate:
    begin = time.perf_counter()
    virtual = VirtualGPU(gpu, how.allocator_config)
    out_of_memory = _watch(function, virtual, how)
    if out_of_memory is not None:
        virtual = VirtualGPU(gpu, how.allocator_config, limited=False)
        virtual.note("memory", "ran out of memory; the figures are those of a card without limit")
        _watch(function, virtual, how)
    if how.trace is not None:
        how.trace.fill(virtual)
    return estimate_from(virtual, time.perf_counter() - begin, out_of_memory)


def _watch(function: Callable[[], Any], virtual: VirtualGPU, how: RunOptions) -> str | None:
    """Run a function until its memory has settled; returns the message if it ran out of memory."""
    if how.trace is not None:
        how.trace.watch(virtual)
    with virtual:
        if how.steps is not None:
            virtual.progress.on_step = ConvergenceWatch(virtual, how.steps).after_step
        try:
            function()
        except MemoryConverged:
            pass
        except torch.OutOfMemoryError as error:
            return str(error)
    return None
