"""Run a model's training loop or a function on a virtual GPU, in this process."""

from __future__ import annotations

import contextlib
import os
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch

from ullage.allocator.config import ENVIRONMENT_NAMES
from ullage.errors import InvalidValue, UllageError
from ullage.estimation.from_virtual_gpu import estimate_from
from ullage.estimation.result import Estimate
from ullage.hardware import GPU
from ullage.jobs.configuration import Configuration
from ullage.jobs.training import train
from ullage.jobs.workload import RunOptions
from ullage.performance.step import StepCalls
from ullage.virtual import VirtualGPU
from ullage.virtual.kernels.cudnn.asked import asking
from ullage.virtual.tracking.convergence import ConvergenceWatch, MemoryConverged

T = TypeVar("T")
_ITERATIONS = 5  # of the standard loop; three are watched, two more are there if the requests have not settled


def run_model(configuration: Configuration, gpu: GPU, how: RunOptions) -> Estimate:
    """The standard training loop; whatever the model does not accept becomes one clear message."""
    samples = configuration.batch_size * configuration.gradient_accumulation
    return _of_model(configuration, how, lambda loop: run_function(loop, gpu, how, samples))


def follow_model(configuration: Configuration, gpu: GPU, how: RunOptions) -> VirtualGPU:
    """The virtual GPU on which the standard training loop ran."""
    return _of_model(configuration, how, lambda loop: follow_function(loop, gpu, how)[0])


def _of_model(configuration: Configuration, how: RunOptions, run: Callable[[Callable[[], Any]], T]) -> T:
    iterations = max(_ITERATIONS, how.steps or 0)

    def loop() -> None:
        try:
            train(configuration, iterations, parallel=how.spread)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # which holds the model otherwise, and weights that are held get their values
            traceback.clear_frames(error.__traceback__)
            raise

    try:
        return run(loop)
    except (UllageError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        lines = [line for line in str(error).splitlines() if line.strip()] or [""]
        raise InvalidValue(
            f"{configuration.model} does not run with {configuration.in_words()}: {type(error).__name__}: {lines[0]}"
        ) from error


def run_function(function: Callable[[], Any], gpu: GPU, how: RunOptions, samples: int = 0) -> Estimate:
    """A function as it is, until its memory has settled; a step takes so many `samples`, if that is known."""
    begin = time.perf_counter()
    virtual, out_of_memory = follow_function(function, gpu, how)
    if how.trace is not None:
        how.trace.fill(virtual)
    found = estimate_from(virtual, time.perf_counter() - begin, out_of_memory)
    return found.with_utilization(
        StepCalls(**virtual.calls.step() | {"samples": samples, "interconnect": how.interconnect}), gpu
    )


def follow_function(function: Callable[[], Any], gpu: GPU, how: RunOptions) -> tuple[VirtualGPU, str | None]:
    """The virtual GPU on which a function ran, without a limit if it ran out of memory; and the message then."""
    with asking(gpu) as answers:
        virtual = VirtualGPU(gpu, how.allocator_config)
        out_of_memory = _watch(function, virtual, how)
        if out_of_memory is not None:
            virtual = VirtualGPU(gpu, how.allocator_config, limited=False)
            virtual.note("memory", "ran out of memory; the figures are those of a card without limit")
            _watch(function, virtual, how)
        if answers is not None and answers.words:
            virtual.note("asked", answers.words)
    return virtual, out_of_memory


def _watch(function: Callable[[], Any], virtual: VirtualGPU, how: RunOptions) -> str | None:
    """Run a function until its memory has settled; returns the message if it ran out of memory."""
    if how.trace is not None:
        how.trace.watch(virtual)
    rank = how.as_rank
    with contextlib.nullcontext() if rank is None else rank.entered(), virtual, _leaving_no_trace():
        if how.steps is not None:
            foresee = virtual.progress.foresee if how.trace is None else None  # a trace has every event
            virtual.progress.on_step = ConvergenceWatch(virtual, how.steps, foresee=foresee).after_step
        try:
            function()
        except MemoryConverged:
            pass
        except Exception as error:
            message = _out_of_memory(error)
            if message is None:
                raise
            return message
    return None


@contextlib.contextmanager
def _leaving_no_trace() -> Iterator[None]:
    """The next function in this process draws the same random numbers, and has the same allocator settings."""
    generator = torch.default_generator
    numbers, settings = generator.get_state(), {name: os.environ.get(name) for name in ENVIRONMENT_NAMES}
    try:
        yield
    finally:
        generator.set_state(numbers)
        for name, value in settings.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def _out_of_memory(error: BaseException | None) -> str | None:
    """The message of an error of memory, or of one that comes from it: a stage of a pipeline raises one of its own.

    Here and not where it is caught: a name for it there would keep all that the function held, and its batches would
    be filled when the virtual GPU ends.
    """
    while error is not None and not isinstance(error, torch.OutOfMemoryError):
        error = error.__cause__
    return None if error is None else str(error)
