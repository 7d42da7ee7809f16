"""One estimate for the daemon, inside the child process that `estimates` starts, with the rights of the job's user."""

import os
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ullage.errors import InvalidValue, ScriptFailed, UllageError
from ullage.estimation.advice import Budget, OutOfTime, suggestions
from ullage.estimation.asking import answer_over_gpus, answer_request
from ullage.estimation.estimators.registry import find
from ullage.estimation.jobs.command import ScriptCommand, python_of
from ullage.estimation.result import Estimate
from ullage.hardware import GPU
from ullage.hardware import gpu as find_gpu
from ullage.jobs.job import JobRequest, Summary, request_of
from ullage.jobs.kinds import SUMMARY, kind_of
from ullage.sandbox.conda import in_conda
from ullage.sandbox.environment import is_guest

OWN = "ullage"  # the estimator that can suggest changes
_FOR_ALL = 0.85  # share of the time limit for the estimate and all advice, so that the answer is not lost


def estimate_here(request: dict[str, Any]) -> dict[str, Any]:
    """Return the bound over all GPU models of the request, from the first question with an estimate.

    `utilization` describes a step, by GPU, and `activity` its classes, without it. `estimates` has the complete
    estimate for each GPU, in the order of the request. There is `advice` on request. If there is no estimate, the
    answer has the reason (`failed`) and whether the script or the summary is at fault (`own`). `python` is the job's
    Python if it is not Ullage's own.
    """
    ran_in: dict[str, Any] = {}
    return _first_answer(request, ran_in) | ran_in


def _first_answer(request: dict[str, Any], ran_in: dict[str, Any]) -> dict[str, Any]:
    missing, refused, own = None, [], False
    try:
        if request["conda"] is not None:
            os.environ.update(in_conda(request["conda"], os.environ))
    except LookupError as error:
        missing = str(error)
    for question in request["questions"]:
        is_summary = kind_of(question["source"], question["module"]) == SUMMARY
        if missing is not None and not is_summary:
            continue
        try:
            return _answer(question, request, ran_in)
        except UllageError as error:
            name = question["source"]
            refused.append(str(error).splitlines()[0].replace(question.get("path", name), name))
            own = own or isinstance(error, ScriptFailed) and error.own and question["program"] is not None
            if is_summary and find(request["estimator"]).supports(JobRequest(Summary("", ""))) is None:
                return {"failed": refused[-1], "own": True}  # no other question is for this estimator
        except LookupError as error:  # no such conda environment
            refused.append(str(error))
    refused += [] if missing is None else [missing]
    return {"failed": "; ".join(refused) or "there is nothing to estimate", "own": own}


def _answer(question: dict[str, Any], request: dict[str, Any], ran_in: dict[str, Any]) -> dict[str, Any]:
    options: dict[str, Any] = dict(question["options"])
    batch_arg = options.pop("batch_arg", None)
    if question["args"]:
        options["args"] = list(question["args"])
    if question["module"]:
        options["module"] = True
    source: str = question["source"]
    if question["text"] is not None:
        source = question["path"] = _written(question, request["cwd"])
    if question["module"] or source.endswith(".py"):
        limits = {"timeout": request["timeout"], "network": request["network"]}
        options = {**limits, **options, **_python(question, ran_in)}
    elif os.path.exists(source):  # a model's file, not its name
        source = os.path.abspath(source)
    began, cards = time.monotonic(), [find_gpu(name) for name in request["gpus"]]
    job_request = request_of(source, options, request["estimator"])
    estimates = answer_over_gpus(job_request, cards)
    answers = dict(zip(request["gpus"], estimates, strict=True))
    gpu, worst = max(answers.items(), key=lambda each: each[1].bound)
    upper = min(worst.bound, worst.gpu_memory) if worst.fits else worst.bound
    known = {name: answer.utilization.to_dict() for name, answer in answers.items() if answer.utilization is not None}
    ranks, by, activity = options.get("world_size"), request["activity"], {}
    if by and not known and find(by).supports(job_request) is None:
        activity = answer_request(replace(job_request, estimator=by, options={}), cards[0]).activity
    advice = None
    if request["advice"] and request["estimator"] == OWN:
        left = _FOR_ALL * request["timeout"] - (time.monotonic() - began)
        advice = advise(job_request, cards[0], estimates[0], options, batch_arg, left)
    return {
        "upper": upper,
        "figure": worst.figure,
        "fits": worst.fits,
        "gpu": gpu,
        "utilization": known,
        "activity": activity,
        "breakdown": worst.breakdown,
        "world_size": ranks,
        "rank": worst.rank,
        "by_rank": _by_rank(estimates, upper, ranks or 1),
        "estimates": [replace(each, source=question["source"]).to_dict() for each in estimates],
        "advice": advice,
    }


def _by_rank(answers: list[Estimate], upper: int, ranks: int) -> list[int] | None:
    """Return the bound of each rank if several were followed: a copy of a pipeline needs the same at each stage, and an
    unknown rank may need as much as the largest."""
    if not any(answer.ranks for answer in answers):
        return None
    bounds = [{each["rank"]: each["upper"] for each in answer.ranks} for answer in answers]
    return [
        min(upper, max(bound.get(_same_stage(rank, sorted(bound), ranks), upper) for bound in bounds))
        for rank in range(ranks)
    ]


def _same_stage(rank: int, stages: list[int], ranks: int) -> int:
    """Return the rank at the same stage of the pipeline with these ranks, or the rank itself: neighbours in a device
    mesh are either copies or stages.

    >>> [_same_stage(rank, [0, 2], 8) for rank in range(8)]
    [0, 0, 2, 2, 0, 0, 2, 2]
    >>> [_same_stage(rank, [0, 1, 5], 8) for rank in range(8)] == list(range(8))
    True
    """
    step = stages[1] if len(stages) > 1 else 0
    if not step or stages != list(range(0, step * len(stages), step)) or ranks % (step * len(stages)):
        return rank
    return stages[rank // step % len(stages)]


def advise(
    request: JobRequest,
    card: GPU,
    answer: Estimate,
    options: Mapping[str, Any],
    batch_arg: str | None,
    seconds: float,
) -> dict[str, Any]:
    """Return changes that would make a job fit as `options`, and the `largest` batch: of a model that fits, and of a
    script whose argument for it is known."""
    budget = Budget(seconds, longest=answer.seconds)
    helpful = [] if answer.fits else suggestions(request, card, budget.timed(answer_request), answer)
    wanted = batch_arg if request.model is None else answer.fits
    largest = _largest(request, card, options.get("batch_size"), batch_arg, budget) if wanted else None
    return {"options": [each.to_dict() for each in helpful], "largest": largest}


def _largest(request: JobRequest, card: GPU, start: int | None, batch_arg: str | None, budget: Budget) -> str:
    """Return the largest batch in words, or the largest found in the time."""
    from ullage.estimation.largest_batch import search

    fitting = [0]

    def note(count: int, number: int, answer: Estimate) -> None:
        if answer.fits:
            fitting.append(number)
        budget.record_duration(answer.seconds)
        budget.check()

    try:
        budget.check()
        return search(request, card, batch_arg=batch_arg, start=start, progress=note).report()
    except OutOfTime as error:
        known = f"batch size {max(fitting)} fits on {card.name}; a larger one" if max(fitting) else "the largest batch"
        return f"{known} was {error}"


def _written(question: dict[str, Any], cwd: str) -> str:
    """Write a script that came as text next to the modules that it may import, inside the sandbox."""
    try:
        folder = tempfile.mkdtemp(prefix="ullage-") if cwd == "/" else cwd
        descriptor, path = tempfile.mkstemp(suffix=f"_{question['source']}", prefix="ullage_", dir=folder)
        with open(descriptor, "w") as file:
            file.write(question["text"])
    except OSError as error:
        raise InvalidValue(f"the script cannot be written into {cwd}: {error.strerror}") from None
    return path


def _python(question: dict[str, Any], ran_in: dict[str, Any]) -> dict[str, Any]:
    """Return the option for the job's Python, if it is not this one."""
    if question["program"] is None:
        return {}
    command = ScriptCommand(
        question["source"], question["args"], question["module"], question["program"], tuple(question["launcher"])
    )
    python = python_of(command, os.environ)
    os.environ.update(python.env)
    ran_in["python"] = sys.executable if python.is_ours and is_guest() else None if python.is_ours else python.path
    return {} if python.is_ours else {"python": python.path}
