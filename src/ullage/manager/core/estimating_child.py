"""One estimate in a process of its own: the order on standard input, a line of JSON on standard output."""

from __future__ import annotations

import ctypes
import os
import signal
from typing import Any

from ullage.errors import UllageError
from ullage.research.measure.runs import answer_order

_SET_PDEATHSIG = 1


def estimate(order: dict[str, Any]) -> dict[str, Any]:
    """The bound over all kinds of GPU that the order names, from the first question that can be answered."""
    _end_with(order["parent"])
    refused = []
    for question in order["questions"]:
        try:
            return _answer(question, order)
        except UllageError as error:
            refused.append(str(error).splitlines()[0])
    return {"failed": "; ".join(refused) or "there is nothing to estimate"}


def _answer(question: dict[str, Any], order: dict[str, Any]) -> dict[str, Any]:
    from ullage.estimation.asking import estimate as ask

    options: dict[str, Any] = dict(question["options"])
    if question["args"]:
        options["args"] = list(question["args"])
    if question["module"]:
        options["module"] = True
    if question["module"] or question["source"].endswith(".py"):
        options["timeout"] = order["timeout"]
    answers = [ask(question["source"], gpu=gpu, estimator=order["estimator"], **options) for gpu in order["gpus"]]
    worst = max(answers, key=lambda answer: answer.bound)
    upper = min(worst.bound, worst.gpu_memory) if worst.fits else worst.bound
    return {"upper": upper, "figure": worst.figure, "fits": worst.fits, "gpu": worst.gpu}


def _end_with(parent: int) -> None:
    """An estimate does not outlive who asked for it."""
    ctypes.CDLL(None).prctl(_SET_PDEATHSIG, int(signal.SIGKILL))
    if os.getppid() != parent:
        os._exit(1)


if __name__ == "__main__":
    answer_order(estimate)
