"""`ullage.max_batch`: the largest batch that trains on a GPU, found in about ten estimates.

Memory grows nearly linearly with the batch size, so the search follows the line through two estimates while it is far
from the limit, and halves the interval when it is near.
"""

import dataclasses
import functools
import inspect
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from ullage.allocator import AllocatorConfig
from ullage.errors import InvalidValue, ScriptFailed, UnknownName
from ullage.estimation.asking import answer_request, names_unknown_options, request_for
from ullage.estimation.result import Estimate
from ullage.estimation.scripts.parent import many_runs
from ullage.hardware import GPU, default_gpu
from ullage.hardware import gpu as find_gpu
from ullage.jobs.job import Job, JobRequest, Ranks, Script
from ullage.jobs.model import Model
from ullage.units import format_bytes

FIRST_GROWTH = 4
MOST_GROWTH = 64  # times the largest number that fits so far: a line through two small numbers may be far off
LARGEST = 1 << 24
TRIALS_BY_LINE = 8  # after that only by halving
_FEW_SAMPLES = "does the data have that many samples?"
# A GPU is full before tensors take all of it, because the allocator's blocks never fill it completely. Early trials
# aim between these shares of the limit.
LEAST_SHARE, FIRST_SHARE = 0.85, 0.98


class Search:
    """Finds the largest number that fits; `trial` returns the bytes that a number needs, and whether it fits.

    The answer fits and the next number does not. Memory is not strictly monotone (kernels change with the shape), so a
    still larger number might fit again; that is not searched for. `limit` is the available memory, in bytes.
    """

    def __init__(self, trial: Callable[[int], tuple[int, bool]], limit: int, step: int = 1) -> None:
        self._trial, self._limit, self._step = trial, limit, step
        self._taken: dict[int, int] = {}
        # In steps: the largest that fits, and the smallest that does not or was not tried.
        self._low, self._high = 0, LARGEST // step + 1
        self._stretch = 1

    @property
    def trials(self) -> int:
        return len(self._taken)

    def largest(self, start: int) -> int:
        """Return the largest number that fits, a multiple of the step; 0 if none does."""
        number = max(1, start // self._step)
        while True:
            self._taken[number], fits = self._trial(number * self._step)
            if fits:
                self._low = number
                if number >= self._high:  # the upper end was a guess
                    self._high, self._stretch = number + self._stretch, 2 * self._stretch
            else:
                self._high = number
            if self._high - self._low == 1 and (self._high in self._taken or self._high * self._step > LARGEST):
                return self._low * self._step
            number = min(max(self._next(), self._low + 1), max(self._high - 1, self._low + 1))

    def _next(self) -> int:
        """Return the next number to try: by the line while far from the limit, then by halving, which always ends."""
        low, high, limit = self._low, self._high, self._limit
        if low == 0:
            return high // FIRST_GROWTH
        if high not in self._taken:
            if self.trials == 1:
                return FIRST_GROWTH * low
            if self._taken[low] < LEAST_SHARE * limit:
                return min(self._by_line(FIRST_SHARE * limit), MOST_GROWTH * low)
            if high * self._step > LARGEST:
                self._high = high = max(low + 1, self._by_line(limit) + 1)  # tensors cannot take more than the GPU has
            return (low + high) // 2
        most = min(self._taken[high], limit)
        if self._taken[low] < LEAST_SHARE * most and self.trials < TRIALS_BY_LINE:
            guess = self._by_line((LEAST_SHARE + 1) / 2 * most)
            if low < guess < high:
                return guess
        return (low + high) // 2

    def _by_line(self, wanted: float) -> int:
        """Return the number at which the line through two trials reaches `wanted`; very large if it does not rise.

        The two are the largest numbers that fit, if there are two: a run without a limit takes more memory than a run
        that has to fit.
        """
        fit = sorted(number for number in self._taken if number <= self._low)
        near = fit[-2:] if len(fit) > 1 else list(self._taken)[:2]
        first, second = min(near), max(near)
        rise = self._taken[second] - self._taken[first]
        return LARGEST if rise <= 0 else first + int((wanted - self._taken[first]) * (second - first) / rise)


# The sizes that can be searched: the option that gives the first number, its default, and the step.
WHAT = {
    "batch-size": ("batch_size", 8, 1),
    "sequence-length": ("sequence_length", 128, 1),
    "image-size": ("input_shape", 224, 32),  # most models halve an image five times
}

SURE_TRIALS = 3

Progress = Callable[[int, int, Estimate], Any]


class MaxBatch(int):
    """The largest number that fits, as an `int` that knows how it was found; 0 if even the smallest does not fit.

    `sure` is the largest number tried whose upper bound fits too. `estimate` is the estimate of the largest number
    that fits, `beyond` that of the next one, which does not. If none was too large, `same_from` is the smallest
    number tried that needs the same memory, if there is one. `trials` is the number of estimates.
    """

    what: str
    gpu: str
    sure: int
    estimate: Estimate | None
    beyond: Estimate | None
    same_from: int | None
    trials: int
    seconds: float

    def __new__(cls, value: int, **facts: Any) -> "MaxBatch":
        made = super().__new__(cls, value)
        vars(made).update(facts)
        return made

    @property
    def largest(self) -> int:
        """The number itself."""
        return int(self)

    def to_dict(self) -> dict[str, Any]:
        """Return the answer as plain values, without timelines."""
        facts = {
            name: value.to_dict(timeline=False, layers=False) if isinstance(value, Estimate) else value
            for name, value in vars(self).items()
        }
        return {"largest": int(self)} | facts

    def report(self) -> str:
        """Return the result in words, a line for each fact."""
        words = self.what.replace("-", " ")
        if not self or self.estimate is None:
            need = format_bytes(self.beyond.needed) if self.beyond else "more"
            has = format_bytes(self.beyond.gpu_memory) if self.beyond else "that"
            return f"no {words} fits on {self.gpu}: the smallest needs {need} of {has}"
        held, has = format_bytes(self.estimate.needed), format_bytes(self.estimate.gpu_memory)
        lines = [f"largest {words} on {self.gpu}: {int(self)} ({held} of {has})"]
        if self.beyond is not None:
            lines.append(f"the next one needs {format_bytes(self.beyond.needed)} and does not fit")
        elif self.same_from is not None:
            why = f": {_FEW_SAMPLES}" if self.what == "batch-size" else ""
            lines.append(f"from {self.same_from} on it needs the same{why}")
        else:
            lines.append("no larger one was tried")
        bound = "this one too" if self.sure == self else str(self.sure) if self.sure else "none"
        lines.append(f"largest by the upper bound: {bound}")
        return "\n".join(lines)


@names_unknown_options
def max_batch(
    job: str | Path | Callable[..., Any] | Model | Script,
    *,
    gpu: str | GPU | None = None,
    what: str = "batch-size",
    parameter: str | None = None,
    batch_arg: str | None = None,
    batch_size: int | None = None,
    args: Sequence[str] = (),
    ranks: Ranks | int | None = None,
    steps: int | None = 3,
    allocator: AllocatorConfig | None = None,
    progress: Progress | None = None,
) -> MaxBatch:
    """Find the largest batch that trains on `gpu`; the next larger one does not fit.

    Args:
        job: A model, a function or a script, as for `ullage.estimate`. The function has a parameter for the size.
        gpu: The GPU, as for `ullage.estimate`.
        what: What to make larger: `"batch-size"`, `"sequence-length"` or `"image-size"`.
        parameter: For a function: the parameter that gets the number. Default: its first.
        batch_arg: For a script: its argument that gets the number, such as `"--batch-size"`.
        batch_size: Where the search starts, for a model.
        args: The script's own arguments.
        ranks: As for `ullage.estimate`.
        steps: As for `ullage.estimate`.
        allocator: As for `ullage.estimate`.
        progress: Called after each estimate with the count so far, the number that was tried, and its estimate.

    >>> found = max_batch("torchvision:alexnet", gpu="RTX-3070")
    >>> found.estimate.fits, found.beyond.fits
    (True, False)

    Not covered: a still larger number that fits again, because kernels change with the shape.
    """
    request = request_for(job, batch_size=batch_size, args=args, ranks=ranks, steps=steps, allocator=allocator)
    start = getattr(job, WHAT[what][0]) if isinstance(job, Model) and what in WHAT else batch_size
    return search(request, gpu, what=what, parameter=parameter, batch_arg=batch_arg, start=start, progress=progress)


def search(
    request: JobRequest,
    gpu: str | GPU | None = None,
    *,
    what: str = "batch-size",
    parameter: str | None = None,
    batch_arg: str | None = None,
    start: int | Sequence[int] | None = None,
    progress: Progress | None = None,
) -> MaxBatch:
    """Find the largest number for a request; `start` is the first size to try, or the shape that has it last."""
    if what not in WHAT:
        raise UnknownName("size to search for", what, WHAT)
    begin = time.perf_counter()
    _, usual, step = WHAT[what]
    card = find_gpu(gpu or default_gpu())
    variant = _variants(request, what, parameter, batch_arg)
    estimates: dict[int, Estimate] = {}

    def estimate_of(number: int) -> Estimate:
        if number not in estimates:
            try:
                estimates[number] = answer_request(dataclasses.replace(request, job=variant(number)), card)
            except ScriptFailed as error:
                fit = max((tried for tried, each in estimates.items() if each.fits), default=0)
                if not fit:
                    raise
                words, why = what.replace("-", " "), f" ({_FEW_SAMPLES})" if what == "batch-size" else ""
                tried = f"with a {words} of {number}{why}"
                raise ScriptFailed(f"{words} {fit} fits; {tried} {error.text}", error.output, error.own) from None
            if progress is not None:
                progress(len(estimates), number, estimates[number])
        return estimates[number]

    def trial(number: int) -> tuple[int, bool]:
        answer = estimate_of(number)  # near the limit reserved memory stops growing: the allocator frees cached blocks
        allocated = answer.peaks[0] if answer.without_trials is None else answer.without_trials["peak_allocated"]
        return allocated, bool(answer.fits)

    limit = card.usable - (card.context or 0)
    first = argument_value(request.script.args, batch_arg) if request.script is not None else start
    with many_runs(of_ranks=request.ranks.size is not None), _one_asker(card):
        largest = Search(trial, limit, step).largest(_start(first, usual))
        sure = _sure(largest, step, estimates, estimate_of) if largest else 0
    fitting, beyond = estimates.get(largest), estimates.get(largest + step)
    return MaxBatch(
        largest,
        what=what,
        gpu=card.name,
        sure=sure,
        estimate=fitting,
        beyond=beyond,
        same_from=_same_from(largest, estimates) if beyond is None and fitting is not None else None,
        trials=len(estimates),
        seconds=time.perf_counter() - begin,
    )


def _same_from(largest: int, estimates: Mapping[int, Estimate]) -> int | None:
    """Return the smallest number tried, below the largest, that needs as much memory."""
    needed = estimates[largest].needed
    return min(
        (number for number, each in estimates.items() if each.needed == needed and number < largest), default=None
    )


def _one_asker(card: GPU) -> AbstractContextManager[Any]:
    """Let one process ask cuDNN for all estimates on a GPU of this machine."""
    if card.uuid is None:
        return nullcontext()
    from ullage.virtual.cudnn.cudnn_query import asking  # which imports PyTorch

    return asking(card)


def _sure(largest: int, step: int, estimates: dict[int, Estimate], estimate_of: Callable[[int], Estimate]) -> int:
    """Return the largest number whose upper bound fits, after a few more trials."""

    def fits(number: int) -> bool:
        return estimate_of(number).bound <= estimate_of(number).gpu_memory

    if fits(largest):
        return largest
    low = max((number for number in estimates if number < largest and fits(number)), default=0)
    high, number = largest, _between(estimates, low)
    for _ in range(SURE_TRIALS):
        number = number // step * step
        if not low < number < high:
            break
        low, high = (number, high) if fits(number) else (low, number)
        number = (low + high) // 2
    return low


def _between(estimates: dict[int, Estimate], low: int) -> int:
    """Return the number at which the upper bound reaches the GPU's memory, by the line from `low` to the next number
    tried."""
    above = min(number for number in estimates if number > low)
    if not low:
        return above // 2
    one, other = estimates[low], estimates[above]
    rise = max(1, other.bound - one.bound) / (above - low)
    return low + int((one.gpu_memory - one.bound) / rise)


def jobs_together(answer: Estimate) -> int:
    """Return the number of such jobs that share the GPU, each with its own CUDA context, by the upper bound."""
    return answer.gpu_memory // answer.bound if answer.fits else 0


def _start(given: Any, default: int) -> int:
    if isinstance(given, list | tuple) and given:
        return int(given[-1])
    return given if isinstance(given, int) else default


def _variants(request: JobRequest, what: str, parameter: str | None, batch_arg: str | None) -> Callable[[int], Job]:
    """Return a function that gives the job for each number to try."""
    model, script, function = request.model, request.script, request.function
    if function is not None:
        name = _parameter(function, parameter)
        return lambda number: functools.partial(function, **{name: number})
    if model is not None:
        return lambda number: _with(model, what, number)
    if script is None or batch_arg is None:
        raise InvalidValue("for a script, name its argument for the batch size, such as --batch-arg=--batch-size")
    return lambda number: dataclasses.replace(script, args=with_argument(list(script.args), batch_arg, number))


def _with(model: Model, what: str, number: int) -> Model:
    if what == "batch-size":
        return dataclasses.replace(model, batch_size=number)
    if what == "sequence-length":
        return dataclasses.replace(model, sequence_length=number)
    return dataclasses.replace(model, input_shape=[*(model.input_shape or [3, 0, 0])[:-2], number, number])


def _parameter(source: Callable[..., Any], wanted: str | None) -> str:
    names = list(inspect.signature(source).parameters)
    if wanted is not None and wanted not in names:
        raise UnknownName(f"parameter of {getattr(source, '__name__', 'the function')}", wanted, names)
    if not names:
        raise InvalidValue("the function must have a parameter for the batch size, such as def train(batch_size): ...")
    return wanted or names[0]


def with_argument(args: list[str], name: str, value: int) -> list[str]:
    """Return a script's arguments with one of them set; a name that ends in `=` is joined with its value.

    >>> with_argument(["--epochs", "1", "-b", "8"], "-b", 16), with_argument(["--b=8"], "--b", 16)
    (['--epochs', '1', '-b', '16'], ['--b=16'])
    >>> with_argument([], "--batch-size", 4), with_argument(["lr=1"], "batch=", 4)
    (['--batch-size', '4'], ['lr=1', 'batch=4'])
    """
    joined = name if name.endswith("=") else f"{name}="
    for place, word in enumerate(args):
        if word.startswith(joined):
            return [*args[:place], f"{joined}{value}", *args[place + 1 :]]
        if word == name and place + 1 < len(args):
            return [*args[: place + 1], str(value), *args[place + 2 :]]
    return [*args, f"{name}{value}"] if name.endswith("=") else [*args, name, str(value)]


def argument_value(args: Sequence[str], name: str | None) -> int | None:
    """Return the number that a script's arguments give for one of them, or `None`."""
    for word, next_word in zip(args, [*args[1:], ""], strict=False):
        value = next_word if word == name else word.removeprefix(f"{name}=") if word.startswith(f"{name}=") else ""
        if value.isdigit():
            return int(value)
    return None
