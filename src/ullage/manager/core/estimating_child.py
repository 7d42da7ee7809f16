"""One estimate for the daemon, inside the child process that `estimates` starts, with the rights of the job's user."""

from __future__ import annotations

import os
import shutil
import sys
from typing import Any

from ullage.errors import ScriptFailed, UllageError
from ullage.isolation.conda import in_conda


def estimate_here(request: dict[str, Any]) -> dict[str, Any]:
    """The bound over all kinds of GPU that the request names, from the first question that can be answered.

    Where none can be: why not, and whether it is the script's own failure (`own`).
    """
    try:
        if request["conda"] is not None:
            os.environ.update(in_conda(request["conda"], os.environ))
    except LookupError as error:
        return {"failed": str(error)}
    refused, own = [], False
    for question in request["questions"]:
        try:
            return _answer(question, request)
        except UllageError as error:
            refused.append(str(error).splitlines()[0])
            own = own or isinstance(error, ScriptFailed) and error.own and _is_our_python(request["program"])
    return {"failed": "; ".join(refused) or "there is nothing to estimate", "own": own}


def _answer(question: dict[str, Any], request: dict[str, Any]) -> dict[str, Any]:
    from ullage.estimation.asking import estimate as ask

    options: dict[str, Any] = dict(question["options"])
    if question["args"]:
        options["args"] = list(question["args"])
    if question["module"]:
        options["module"] = True
    source: str = question["source"]
    if question["module"] or source.endswith(".py"):
        options |= {"timeout": request["timeout"], "network": request["network"]}
    elif os.path.exists(source):  # a model's file, which must not be taken for a name
        source = os.path.abspath(source)
    answers = [ask(source, gpu=gpu, estimator=request["estimator"], **options) for gpu in request["gpus"]]
    worst = max(answers, key=lambda answer: answer.bound)
    upper = min(worst.bound, worst.gpu_memory) if worst.fits else worst.bound
    return {"upper": upper, "figure": worst.figure, "fits": worst.fits, "gpu": worst.gpu}


def _is_our_python(program: str) -> bool:
    """Whether the job runs in the Python that estimates it; in another one a script may fare better."""
    found = shutil.which(program)
    return found is not None and _folder(found) == _folder(sys.executable)


def _folder(program: str) -> str:
    """Programs of one environment lie in one folder, whatever they are links to."""
    return os.path.realpath(os.path.dirname(program))
