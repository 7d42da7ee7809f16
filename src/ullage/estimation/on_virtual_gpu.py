"""Run a model's training loop or a function on a virtual GPU, in this process."""

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
from ullage.jobs.job import JobRequest
from ullage.jobs.model import Model
from ullage.jobs.training import train
from ullage.performance.step import StepCalls
from ullage.sandbox.protocol import error_text
from ullage.virtual import VirtualGPU
from ullage.virtual.cudnn.cudnn_query import asking
from ullage.virtual.watching.convergence import ConvergenceWatch, MemoryConverged

T = TypeVar("T")
_ITERATIONS = 5  # of the standard loop; three are watched, two more are there if the requests have not settled


def run_model(model: Model, gpu: GPU, request: JobRequest) -> Estimate:
    """Estimate the standard training loop; anything that the model refuses becomes one clear message."""
    samples = model.batch_size * model.gradient_accumulation
    return _of_model(model, request, lambda loop: run_function(loop, gpu, request, samples))


def follow_model(model: Model, gpu: GPU, request: JobRequest) -> VirtualGPU:
    """Run the standard training loop and return its virtual GPU."""
    return _of_model(model, request, lambda loop: follow_function(loop, gpu, request)[0])


def _of_model(model: Model, request: JobRequest, run: Callable[[Callable[[], Any]], T]) -> T:
    iterations = max(_ITERATIONS, request.steps or 0)

    def loop() -> None:
        try:
            train(model, iterations, parallel=request.ranks.spread)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # else its traceback keeps the model, and kept weights get values on leaving
            traceback.clear_frames(error.__traceback__)
            raise

    try:
        return run(loop)
    except (UllageError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise InvalidValue(f"{model.name} does not run with {model.in_words()}: {error_text(error)}") from error


def run_function(function: Callable[[], Any], gpu: GPU, request: JobRequest, samples: int = 0) -> Estimate:
    """Estimate a function until its memory has settled; a step has `samples`, if known."""
    begin = time.perf_counter()
    virtual, out_of_memory = follow_function(function, gpu, request)
    if request.trace is not None:
        request.trace.fill(virtual)
    answer = estimate_from(virtual, time.perf_counter() - begin, out_of_memory)
    return answer.with_utilization(
        StepCalls(**virtual.calls.step() | {"samples": samples, "interconnect": request.ranks.interconnect}), gpu
    )


def follow_function(function: Callable[[], Any], gpu: GPU, request: JobRequest) -> tuple[VirtualGPU, str | None]:
    """Run a function and return its virtual GPU; if it ran out of memory, one without a limit, and the message."""
    with asking(gpu) as answers:
        virtual = VirtualGPU(gpu, request.allocator)
        out_of_memory = _watch(function, virtual, request)
        if out_of_memory is not None:
            virtual = VirtualGPU(gpu, request.allocator, limited=False)
            virtual.note("memory", "ran out of memory; the figures assume a card without a memory limit")
            _watch(function, virtual, request)
        if answers is not None and answers.words:
            virtual.note("asked", answers.words)
    return virtual, out_of_memory


def _watch(function: Callable[[], Any], virtual: VirtualGPU, request: JobRequest) -> str | None:
    """Run a function until its memory has settled; return the message if it ran out of memory."""
    if request.trace is not None:
        request.trace.watch(virtual)
    rank = request.ranks.first
    with contextlib.nullcontext() if rank is None else rank.entered(), virtual, _leaving_no_trace():
        if request.steps is not None:
            extrapolate = virtual.progress.extrapolate if request.trace is None else None  # a trace has every event
            virtual.progress.on_step = ConvergenceWatch(virtual, request.steps, extrapolate=extrapolate).after_step
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
    """Restore the random numbers and allocator settings of this process afterwards."""
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
    """Return the message of an out-of-memory error, also one that caused another: a stage of a pipeline raises its own.

    This is a function because a name for the error in the caller would keep everything that the job held.
    """
    while error is not None and not isinstance(error, torch.OutOfMemoryError):
        error = error.__cause__
    return None if error is None else str(error)
