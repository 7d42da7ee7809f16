"""Runs each estimate in its own process, so that crashes, hangs and excessive memory are only recorded failures.

The processes are forked from a server that has PyTorch and the packages of models loaded, so each starts clean and at
once. The time of an estimate is taken inside: everything from the question to the answer (building the model, real
training steps on the CPU, the replay), but not the start of Python and the imports that all share.
"""

import os
import resource
import threading
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from ullage.estimation.result import Estimate
from ullage.sandbox.child import function_named
from ullage.sandbox.limits import Limits, limit_address_space, machine_memory
from ullage.sandbox.protocol import error_text
from ullage_lab.forking import start_from_server

Ask = Callable[[str, dict[str, Any], str], "Estimate | str"]  # estimator, row, GPU; a text says why it is not supported

PRELOAD = (
    "ullage_lab.judge.worker",
    "ullage.jobs.sources.build",
    "ullage.jobs.training",
    "ullage_lab.judge.packages",
)
MEMORY_SHARE = 0.8  # share of the machine's memory that one estimate may use
LONGEST_REASON = 300


@dataclass(frozen=True, kw_only=True)
class Record:
    """An estimator's answer for a run, as a line of a results file; sizes are bytes.

    Exactly one of `figure`, `unsupported` and `failed` is set.
    """

    estimator: str
    run: str
    gpu: str
    seconds: float | None = None
    cpu_seconds: float | None = None
    figure: int | None = None
    kind: str | None = None
    allocated: int | None = None
    reserved: int | None = None
    process: int | None = None
    upper: int | None = None
    context: int | None = None
    unsupported: str | None = None
    failed: str | None = None
    notes: tuple[str, ...] = ()
    code: str | None = None  # the version of this package that answered

    @property
    def given(self) -> bool:
        return self.figure is not None

    def to_dict(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if value not in (None, ())}


def ask_apart(
    ask: Ask,
    estimator: str,
    run: str,
    row: dict[str, Any],
    gpu: str,
    limit: float,
    stop: threading.Event | None = None,
) -> Record:
    """Return the answer of an estimator, from a process that is killed after `limit` seconds, or when `stop` is set.

    `ask` is a function of a module, so that the process can import it.
    """
    request = {"ask": f"{ask.__module__}:{ask.__qualname__}", "estimator": estimator, "row": row, "gpu": gpu}
    begin = time.perf_counter()
    outcome = start_from_server("ullage_lab.judge.worker:ask_here", request, preload=PRELOAD).wait(
        Limits(seconds=limit), stop=stop
    )
    values = outcome.answer
    if values is None:
        failed = outcome.failure if outcome.reason in ("error", "time") else f"the process {outcome.failure}"
        values = {"failed": str(failed)[:LONGEST_REASON], "seconds": time.perf_counter() - begin}
    values["notes"] = tuple(values.get("notes", ()))
    return Record(estimator=estimator, run=run, gpu=gpu, **values)


def ask_here(request: dict[str, Any]) -> dict[str, Any]:
    """Run the estimator in this process, and return its answer as plain values."""
    warnings.simplefilter("ignore")
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"
    limit_address_space(int(MEMORY_SHARE * machine_memory()[1]))  # a model too large for this machine fails by itself
    ask: Ask = function_named(request["ask"])
    begin, worked = time.perf_counter(), _cpu_time()
    try:
        answer = ask(request["estimator"], request["row"], request["gpu"])
        values: dict[str, Any] = {"unsupported": answer} if isinstance(answer, str) else figures(answer)
    except MemoryError:
        values = {"failed": "took more memory of this machine than it may"}
    except Exception as error:
        values = {"failed": error_text(error)[:LONGEST_REASON]}
    return values | {"seconds": time.perf_counter() - begin, "cpu_seconds": _cpu_time() - worked}


def figures(answer: Estimate) -> dict[str, Any]:
    return {
        "figure": answer.figure,
        "kind": answer.figure_kind,
        "allocated": answer.peak_allocated,
        "reserved": answer.peak_reserved,
        "process": answer.process_memory,
        "upper": answer.upper,
        "context": answer.breakdown.get("context"),
        "notes": list(answer.notes),
    }


def _cpu_time() -> float:
    """Return the processor time of this process and of its ended children."""
    parts = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(part.ru_utime + part.ru_stime for part in parts)
