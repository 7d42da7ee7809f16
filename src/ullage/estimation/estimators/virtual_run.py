"""`ullage`: the job's own code on a virtual GPU."""

import contextlib
import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ullage.errors import InvalidValue, ScriptFailed
from ullage.estimation.estimators.registry import estimator
from ullage.estimation.result import Estimate, of_ranks
from ullage.estimation.scripts.parent import SeenOfRanks, estimate_script
from ullage.hardware import GPU
from ullage.jobs.job import JobRequest
from ullage.jobs.parallel import PP
from ullage.sandbox.gc_control import importing


def _supports(request: JobRequest) -> str | None:
    if request.kind == "summary":
        return "a summary has no code to run; horus reads one"
    return None


@estimator(
    "ullage",
    title="the unmodified code on a virtual GPU",
    source="this project, docs/explanation/design.md",
    needs="the code; no GPU",
    supports=_supports,
)
def run(request: JobRequest, gpu: GPU) -> Estimate:
    """Run the job on a virtual GPU and return the memory that it needed.

    A script runs in its own process, a model in the standard training loop, a function unchanged. A function is stopped
    after at least `steps` optimizer steps, as soon as an iteration requests the same memory as the one before (at the
    latest after 30 steps). A job that runs out of memory is run again without a limit.

    Not covered: code after the step at which a function is stopped (validation, a second phase); use `steps=None`.
    """
    if request.options:
        raise InvalidValue(f"the estimator ullage has no options, got {', '.join(request.options)}")
    if request.ranks.size is None or request.model is not None and request.ranks.spread != PP:
        return _one(request, gpu, None)
    return _ranks(request, gpu)


def _ranks(request: JobRequest, gpu: GPU) -> Estimate:
    """Return the estimate of the rank that needs the most, among the named ranks or those with their own parts."""
    follow, seen = request.ranks.follow, SeenOfRanks()
    if request.model is not None:
        seen.apart = list(range(request.ranks.size or 1))
    answers = {number: _one(request.as_rank(number), gpu, seen) for number in follow or (0,)}
    if follow or not seen.apart:
        return of_ranks(answers)
    stages = seen.apart
    among = {*stages[:2], stages[-1]}
    if request.model is None:  # Ullage splits a model by name: no stage is larger than the second one
        among.add(stages[len(stages) // 2])
    while missing := sorted(among - set(answers)):
        for number in missing:
            try:
                answers[number] = _one(request.as_rank(number), gpu, seen)
            except ScriptFailed as error:
                reason = str(error).splitlines()[0]
                note = f"rank {number}, which may have another part of the model, was not followed: {reason}"
                return replace(answers[0], notes=[note, *answers[0].notes])
        inner = {answers[number].breakdown.get("parameters") for number in among & set(stages[1:-1])}
        if len(inner) > 1:  # the stages differ
            among |= set(stages[:_MOST_STAGES])
    return of_ranks(answers, like=_alike(stages, answers))


_MOST_STAGES = 16  # that are followed


def _alike(stages: list[int], followed: Mapping[int, Any]) -> dict[int, int]:
    """Map stages that were not followed to the last followed one before them: a later stage of the same layers has no
    more micro-batches in flight. The last stage represents no other.

    >>> _alike([0, 1, 2, 3, 4, 5, 6, 7], dict.fromkeys([0, 1, 4, 7]))
    {2: 1, 3: 1, 5: 4, 6: 4}
    """
    alike, before = {}, None
    for number in stages[1:-1]:
        if number in followed:
            before = number
        elif before is not None:
            alike[number] = before
    return alike


def _one(request: JobRequest, gpu: GPU, seen: SeenOfRanks | None) -> Estimate:
    if request.script is not None:
        return estimate_script(request, gpu, seen)
    with importing() if "torch" not in sys.modules else contextlib.nullcontext():
        from ullage.estimation.on_virtual_gpu import run_function, run_model  # PyTorch: a script's process has its own

    if request.model is not None:
        return run_model(request.model, gpu, request)
    assert request.function is not None
    return run_function(request.function, gpu, request)
