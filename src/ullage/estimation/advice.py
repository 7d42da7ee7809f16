"""Suggestions: changes that would make a job fit, each with an estimate."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from ullage.errors import UllageError
from ullage.estimation.result import Estimate
from ullage.hardware import GPU, gpus
from ullage.hardware import gpu as find_gpu
from ullage.jobs.job import JobRequest
from ullage.jobs.model import Model
from ullage.units import format_bytes, format_duration

Run = Callable[[Model, GPU], Estimate]
Report = Callable[[str], Any]

LIGHTER = {  # optimizers that keep less state for each weight, the most similar first
    "adam": ("adafactor", "sgdm"),
    "adamw": ("adafactor", "sgdm"),
    "adamw_fused": ("adafactor", "sgdm"),
    "rmsprop": ("sgd",),
    "adagrad": ("sgd",),
    "sgdm": ("sgd",),
}
BF16_CAPABILITY = (8, 0)
MOST_TRIED_DIVISORS = 3
MOST_TRIED_GPUS = 4
WORTH_NAMING = 0.95


class OutOfTime(UllageError):
    """No time is left for another estimate."""


class Budget:
    """Time for estimates: it allows another one if the longest so far would still fit."""

    def __init__(self, seconds: float, longest: float) -> None:
        self._until, self._longest = time.monotonic() + seconds, longest

    def check(self) -> None:
        """Raise `OutOfTime` if no time is left for another estimate."""
        if time.monotonic() + self._longest > self._until:
            lasts = format_duration(max(1.0, round(self._longest)))
            raise OutOfTime(f"not tried: an estimate takes {lasts}, and there was no time left for another")

    def record_duration(self, seconds: float) -> None:
        self._longest = max(self._longest, seconds)

    def timed(self, run: Callable[..., Estimate]) -> Callable[..., Estimate]:
        """Wrap a function that estimates, so that it respects this budget."""

        def within(*args: Any) -> Estimate:
            self.check()
            began = time.monotonic()
            try:
                return run(*args)
            finally:
                self.record_duration(time.monotonic() - began)

        return within


@dataclass(frozen=True, slots=True)
class Suggestion:
    """A change with the estimate of the changed job; `failed` is the reason if there is none."""

    change: str
    estimate: Estimate | None
    failed: str | None = None

    @property
    def fits(self) -> bool:
        return self.estimate is not None and bool(self.estimate.fits)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values: the memory (`takes`), and a `note` with the free memory or the reason."""
        estimate = self.estimate
        if estimate is None:
            return {"change": self.change, "fits": False, "takes": None, "note": self.failed or ""}
        tight = " (tight: the upper bound does not fit)" if estimate.tight else ""
        note = f"{format_bytes(estimate.headroom)} free{tight}" if estimate.fits else "does not fit"
        return {"change": self.change, "fits": estimate.fits, "takes": estimate.figure, "note": note}


def suggestions(
    request: JobRequest,
    gpu: GPU,
    run: Callable[[JobRequest, GPU], Estimate],
    answer: Estimate,
    progress: Report | None = None,
) -> list[Suggestion]:
    """Return changes that would make a job fit, as `options` does for a model; for any other job, a larger GPU."""
    if request.model is not None:
        return options(request.model, gpu, lambda job, card: run(replace(request, job=job), card), progress, answer)
    larger = larger_gpu(lambda card: run(request, card), answer, progress)
    return [] if larger is None else [larger]


def options(
    configuration: Model,
    gpu: str | GPU,
    run: Run,
    progress: Report | None = None,
    answer: Estimate | None = None,
) -> list[Suggestion]:
    """Return changes that would make a model fit on a GPU, each with its estimate, the smallest change first.

    `run` estimates one model on one GPU; it may raise `OutOfTime`. `progress` gets the change that is being estimated.
    `answer` is the estimate of the unchanged job, if known.
    """
    adviser = _Adviser(configuration, find_gpu(gpu), progress or (lambda text: None), run)
    return adviser.options(answer)


def larger_gpu(run: Callable[[GPU], Estimate], answer: Estimate, progress: Report | None = None) -> Suggestion | None:
    """Return the smallest GPU of the catalogue (no MIG slice) on which the job fits; `None` if there is none."""
    larger = [card for card in gpus() if not card.is_mig and card.usable > answer.gpu_memory]
    roomy = [card for card in larger if card.usable >= answer.peaks[0] + (card.context or 0)]
    for card in sorted(roomy, key=lambda card: (card.usable, card.name))[:MOST_TRIED_GPUS]:
        if progress is not None:
            progress(f"on {card.name}")
        try:
            estimate = run(card)
        except OutOfTime as error:
            return Suggestion("a larger GPU", None, str(error))
        if estimate.fits:
            return Suggestion(f"a larger GPU: {card.name}", estimate)
    return None


class _Adviser:
    """Tries changes of a job that does not fit."""

    def __init__(self, job: Model, gpu: GPU, progress: Report, run: Run) -> None:
        self._job, self._gpu, self._progress, self._run = job, gpu, progress, run

    def options(self, answer: Estimate | None) -> list[Suggestion]:
        answer = answer or self._estimate("as it is")
        changes = list(self._changes())
        suggestions = [self._option(words, **change) for words, change in changes]
        alone = {words: change for words, change in changes if "optimizer" not in change}
        if len(alone) > 1 and not any(option.fits for option in suggestions):
            together = {name: value for change in alone.values() for name, value in change.items()}
            suggestions.append(self._option(" and ".join(alone), **together))
        batch = self._largest_batch()
        if batch is not None:
            suggestions += self._accumulated(batch) if batch.fits else []
            suggestions.append(batch)
        larger = larger_gpu(lambda card: self._run(self._job, card), answer, self._progress)
        suggestions += [larger] if larger is not None else []
        return [option for option in suggestions if option.fits or option.failed or _helps(option, answer)]

    def _changes(self) -> Iterator[tuple[str, dict[str, Any]]]:
        job = self._job
        if job.precision in ("fp32", "tf32"):
            wide = self._gpu.told_capability >= BF16_CAPABILITY
            precision = "amp_bf16" if wide else "amp_fp16"
            yield f"mixed precision ({precision})", {"precision": precision}
        if not job.checkpointing:
            yield "activation checkpointing", {"checkpointing": True}
        for optimizer in LIGHTER.get(job.optimizer, ()):
            yield f"optimizer {optimizer} for {job.optimizer}", {"optimizer": optimizer}

    def _estimate(self, words: str, **change: Any) -> Estimate:
        self._progress(words)
        return self._run(replace(self._job, **change), self._gpu)

    def _option(self, words: str, **change: Any) -> Suggestion:
        try:
            return Suggestion(words, self._estimate(words, **change))
        except Exception as error:  # a model may refuse a change with any exception; the other changes still count
            text = str(error).strip().splitlines() or [type(error).__name__]
            return Suggestion(words, None, text[0])

    def _largest_batch(self) -> Suggestion | None:
        """Find the largest smaller batch that fits, by halving."""
        low, high = 0, self._job.batch_size
        best: Estimate | None = None
        try:
            while high - low > 1:
                middle = (low + high) // 2
                answer = self._estimate(f"batch {middle}", batch_size=middle)
                if answer.fits:
                    low, best = middle, answer
                else:
                    high = middle
        except OutOfTime as error:
            if best is None:
                return Suggestion("a smaller batch", None, str(error))
        return Suggestion(f"batch {low} for {self._job.batch_size}", best) if best is not None else None

    def _accumulated(self, batch: Suggestion) -> list[Suggestion]:
        """Split the batch into equal parts with accumulated gradients, the largest part that fits."""
        whole, largest = self._job.batch_size, int(batch.change.split()[1])
        divisors = [part for part in range(largest, 0, -1) if whole % part == 0]
        for part in divisors[:MOST_TRIED_DIVISORS]:
            times = whole // part
            words = f"gradient accumulation: {times} micro-batches of {part}"
            option = self._option(words, batch_size=part, gradient_accumulation=times * self._job.gradient_accumulation)
            if option.fits:
                return [option]
        return []


def _helps(option: Suggestion, answer: Estimate) -> bool:
    """Return whether a change that is not enough by itself saves enough to be listed."""
    return option.estimate is not None and option.estimate.figure < WORTH_NAMING * answer.figure
