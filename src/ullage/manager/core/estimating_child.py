"""One estimate for the daemon, inside the child process that `estimates` starts."""

from __future__ import annotations

from typing import Any

from ullage.errors import UllageError


def estimate_here(request: dict[str, Any]) -> dict[str, Any]:
    """The bound over all kinds of GPU that the request names, from the first question that can be answered."""
    refused = []
    for question in request["questions"]:
        try:
            return _answer(question, request)
        except UllageError as error:
            refused.append(str(error).splitlines()[0])
    return {"failed": "; ".join(refused) or "there is nothing to estimate"}


def _answer(question: dict[str, Any], request: dict[str, Any]) -> dict[str, Any]:
    from ullage.estimation.asking import estimate as ask

    options: dict[str, Any] = dict(question["options"])
    if question["args"]:
        options["args"] = list(question["args"])
    if question["module"]:
        options["module"] = True
    if question["module"] or question["source"].endswith(".py"):
        options["timeout"] = request["timeout"]
    answers = [ask(question["source"], gpu=gpu, estimator=request["estimator"], **options) for gpu in request["gpus"]]
    worst = max(answers, key=lambda answer: answer.bound)
    upper = min(worst.bound, worst.gpu_memory) if worst.fits else worst.bound
    return {"upper": upper, "figure": worst.figure, "fits": worst.fits, "gpu": worst.gpu}
