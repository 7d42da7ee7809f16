"""`ullage.estimate`, and the functions that answer a `JobRequest`."""

import dataclasses
import functools
import inspect
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from ullage.errors import InvalidValue, UnknownName
from ullage.estimation.estimators.registry import check_name, find
from ullage.hardware import GPU, default_gpu
from ullage.hardware import gpu as find_gpu
from ullage.jobs.job import Function, JobRequest, Ranks, Script, job_of, with_saved_types
from ullage.jobs.kinds import MODEL, SCRIPT
from ullage.jobs.model import Model
from ullage.performance.cost import Training
from ullage.virtual import releases

if TYPE_CHECKING:
    from ullage.allocator import AllocatorConfig
    from ullage.estimation.result import Estimate
    from ullage.estimation.timeline.trace import Trace

_P = ParamSpec("_P")
_R = TypeVar("_R")
_WRITTEN = {
    Model: "{call}(Model(name, {option}=...))",
    Script: "{call}(Script(path, {option}=...))",
    Ranks: "{call}(job, ranks=Ranks(size, {option}=...))",
    Training: "{call}(job, training=Training({option}=...))",
}


def names_unknown_options(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Make a function raise `UnknownName` with the nearest names for an unknown option, not `TypeError`.

    The message for a field of `Model`, `Script`, `Ranks` or `Training` shows the call that takes it.
    """
    known = inspect.signature(function).parameters

    @functools.wraps(function)
    def call(*args: _P.args, **given: _P.kwargs) -> _R:
        for name in given:
            if name not in known:
                raise _unknown(function.__name__, name, list(known))
        return function(*args, **given)

    return call


def _unknown(call: str, name: str, known: list[str]) -> Exception:
    for made, written in _WRITTEN.items():
        if name in (spec.name for spec in fields(made)):
            return InvalidValue(f"{name} is a field of {made.__name__}: {written.format(call=call, option=name)}")
    of_others = [spec.name for made in _WRITTEN for spec in fields(made)]
    return UnknownName("option", name, sorted({*known, *of_others}))


@names_unknown_options
def estimate(
    job: str | Path | Function | Model | Script,
    *,
    gpu: str | GPU | None = None,
    batch_size: int | None = None,
    sequence_length: int | None = None,
    args: Sequence[str] = (),
    ranks: Ranks | int | None = None,
    training: Training | None = None,
    steps: int | None = 3,
    estimator: str = "ullage",
    pytorch: str | None = None,
    allocator: "AllocatorConfig | None" = None,
    trace: "Trace | None" = None,
    progress: Callable[[str], None] | None = None,
) -> "Estimate":
    """Estimate how much memory a training job needs on `gpu`, and how long a step takes. No GPU is needed.

    Args:
        job: A model's name (`"torchvision:resnet50"`, `"timm:NAME"`, `"hf:ORG/NAME"` of the Hugging Face hub,
            `"hf:CLASS"`, `"package.module:factory"`) or a `Model`; the path of a script or a `Script`; a function
            without arguments that trains on "cuda"; or a text file with a model summary for the estimators that read
            one.
        gpu: A name from `ullage.gpus()`, the path of a TOML file, `"local"`, or a `GPU`. Default: the first GPU of this
            machine, else an H200.
        batch_size: Short for `Model(..., batch_size=)`. Default: 32.
        sequence_length: Short for `Model(..., sequence_length=)`, and for a summary without output shapes.
        args: Short for `Script(..., args=)`.
        ranks: The ranks of a job of many GPUs, or their number.
        training: How long the training is, for `Estimate.training`: its time, energy and cost.
        steps: Follow the job for at least this many optimizer steps; `None` lets it run to its end.
        estimator: The estimator to use; `ullage.estimation.estimators.estimators()` has their names.
        pytorch: The release of PyTorch on the GPU, such as `"2.11"`: which attention runs and which workspaces stay
            differ. Default: the one that is installed; 2.11 for newer CPU builds.
        allocator: Settings of PyTorch's allocator. By default those of `PYTORCH_ALLOC_CONF`.
        trace: An empty `Trace`, which is filled with every request.
        progress: Called with each long operation of a script, such as `"compiling Net.forward"`.

    Returns:
        An `Estimate`; `print` shows it as a report.

    Raises:
        UllageError: With one message: "X must be Y, got Z".

    >>> from ullage import Model
    >>> estimate(Model("torchvision:resnet18", batch_size=8, input_shape=[3, 64, 64]), gpu="A100-40GB").fits
    True
    >>> estimate("torchvision:resnet18", batch_size=8, estimator="accelerate").figure_kind
    'allocated'

    Not covered: a process that uses several GPUs itself; ranks that differ from those that were followed.
    """
    check_name(estimator)
    request = request_for(
        job,
        batch_size=batch_size,
        sequence_length=sequence_length,
        args=args,
        ranks=ranks,
        steps=steps,
        estimator=estimator,
        allocator=allocator,
        trace=trace,
        progress=progress,
    )
    plan = training or Training()
    check_plan(plan, request)
    with pytorch_release(pytorch):
        return answer_request(request, gpu).for_training(plan)


def request_for(
    job: str | Path | Function | Model | Script,
    *,
    batch_size: int | None = None,
    sequence_length: int | None = None,
    args: Sequence[str] = (),
    ranks: Ranks | int | None = None,
    estimator: str = "ullage",
    **how: Any,
) -> JobRequest:
    """Return the request that the arguments of `estimate` describe."""
    made = with_saved_types(job_of(job, args=args, batch_size=batch_size, sequence_length=sequence_length))
    own: dict[str, Any] = {}
    if isinstance(made, Model):
        prefix = estimator.partition("+")[0] + "."
        own = {name.removeprefix(prefix): value for name, value in made.settings.items() if name.startswith(prefix)}
        rest = {name: value for name, value in made.settings.items() if not name.startswith(prefix)}
        made = dataclasses.replace(made, settings=rest) if own else made
    size = Ranks(ranks) if isinstance(ranks, int) else ranks or Ranks()
    return JobRequest(made, ranks=size, estimator=estimator, options=own, **how)


@contextmanager
def pytorch_release(name: str | None) -> Iterator[None]:
    """Use the rules of this release of PyTorch inside, also in child processes, which read the variable."""
    if name is None:
        yield
        return
    before = os.environ.get(releases.VARIABLE)
    os.environ[releases.VARIABLE] = releases.named(name).name
    try:
        yield
    finally:
        if before is None:
            del os.environ[releases.VARIABLE]
        else:
            os.environ[releases.VARIABLE] = before


def check_plan(plan: Training, request: JobRequest) -> None:
    """Refuse a training whose cost could not be computed from the run, before anything runs."""
    plan.check(tells_epoch=request.kind == SCRIPT, tells_step=request.kind in (SCRIPT, MODEL))


def answer_request(request: JobRequest, gpu: str | GPU | None = None) -> "Estimate":
    """Return the estimate for a request on one GPU, by default this machine's own, else an H200."""
    answer = find(request.estimator).estimate(request, find_gpu(gpu or default_gpu()))
    return answer if gpu is not None else answer.on_assumed_gpu()


def answer_over_gpus(
    request: JobRequest, cards: Sequence[GPU], progress: Callable[[str], None] | None = None
) -> "list[Estimate]":
    """Return the estimate for each of `cards`; only Ullage's own on one GPU tells those on others."""
    from ullage.estimation.over_gpus import estimate_over_gpus

    if not request.is_ullage:
        return [answer_request(request, card) for card in cards]
    return estimate_over_gpus(lambda card: answer_request(request, card), cards, progress)


def ask(name: str, row: dict[str, Any], gpu: str) -> "Estimate | str":
    """Return an estimator's estimate for a line of measurements, or the reason why it does not support it.

    Arguments are plain values, for other processes. `JobRequest.from_row` reads the line.
    """
    estimator = find(name)
    request = JobRequest.from_row(row)
    reason = estimator.supports(request)
    return reason if reason is not None else estimator.run(request, find_gpu(gpu))
