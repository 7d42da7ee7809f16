"""Measures runs on a real GPU: each in a fresh process, several at once as memory allows.

The memory that a run needs is unknown before the measurement, so it is estimated first, in a process that sees no GPU.
A run starts when the upper bounds of the active runs leave room for its own. Each row has the estimate and the
measurement, so a file of measured runs is also a comparison.
"""

import os
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ullage.errors import InvalidValue, UllageError
from ullage.hardware import GPU, local_gpus
from ullage.sandbox.environment import environment
from ullage.sandbox.limits import Limits
from ullage.sandbox.parent import run
from ullage.units import GIB

UNKNOWN_NEED = 30 * GIB  # kept free for a run that could not be estimated
SPARE = 2 * GIB  # of the card, left for the driver and whatever else is there
ESTIMATED = ("peak_allocated", "peak_reserved", "process_memory", "upper", "seconds", "notes", "context")


@dataclass(frozen=True, kw_only=True)
class RunRequest:
    """A run to measure: a row of a file of configurations, or a script with its arguments.

    A script runs in the folder `cwd` with the variables `env` added to those already set. `cap` is the most that
    PyTorch's allocator may reserve in that run, in bytes; `history` is a file for its requests. A script that still
    runs after `stop_after` seconds is ended; its figures until then are its answer.
    """

    row: dict[str, Any] = field(default_factory=dict)
    script: str | None = None
    args: list[str] = field(default_factory=list)
    module: bool = False
    cwd: str | None = None
    env: dict[str, str] = field(default_factory=dict)
    stop_after: float | None = None
    iterations: int = 5
    history: str | None = None
    cap: int | None = None


def estimate_apart(
    request: RunRequest, gpu: str, timeout: float = 300.0, stop: threading.Event | None = None
) -> dict[str, Any]:
    """Estimate a run in a process that sees no GPU; `stop` ends it early."""
    variables = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    question = {**vars(request), "gpu": gpu}
    return apart("ullage.measuring.runs:estimate_here", question, request, variables, timeout, stop)


def measure_apart(request: RunRequest, timeout: float = 300.0, stop: threading.Event | None = None) -> dict[str, Any]:
    """Measure one run on the real GPU in a fresh process; `stop` ends it early."""
    variables = {"OMP_NUM_THREADS": "2"}
    return apart("ullage.measuring.single_run:measure_here", vars(request), request, variables, timeout, stop)


def apart(
    entry: str,
    question: dict[str, Any],
    request: RunRequest,
    variables: dict[str, str],
    timeout: float,
    stop: threading.Event | None,
) -> dict[str, Any]:
    """Return the answer of a function (`"module:function"`) in a fresh process; `"failed"` says why there is none."""
    env = environment(dict(os.environ) | request.env, import_from=sys.path) | variables
    outcome = run(entry, question, limits=Limits(seconds=timeout), env=env, cwd=request.cwd, stop=stop)
    if outcome.answer is not None:
        return outcome.answer
    failed = {"failed": outcome.failure if outcome.reason == "error" else f"the process {outcome.failure}"}
    return failed | ({"output": outcome.last_lines(12)} if request.script else {})


def estimate_here(request: dict[str, Any]) -> dict[str, Any]:
    """In the child process: return the figures of the estimate that a file of measured runs has."""
    from ullage.estimation.asking import answer_request
    from ullage.jobs.job import JobRequest, Script
    from ullage.jobs.model import Model

    script = request["script"] and Script(request["script"], request["args"], module=request["module"])
    answer = answer_request(JobRequest(script or Model.from_row(request["row"])), request["gpu"])
    values = {**answer.to_dict(timeline=False, layers=False), "context": answer.breakdown["context"]}
    return {name: values[name] for name in ESTIMATED}


class GpuMemory:
    """The card's memory, and its promises to active runs."""

    def __init__(self, total: int) -> None:
        self._total = self._free = total
        self._changed = threading.Condition()

    def take(self, need: int) -> int:
        """Wait until that much memory is free; a run that needs more than the card has runs alone."""
        need = min(need, self._total)
        with self._changed:
            self._changed.wait_for(lambda: self._free >= need)
            self._free -= need
        return need

    def give_back(self, taken: int) -> None:
        with self._changed:
            self._free += taken
            self._changed.notify_all()


def measure(
    requests: Sequence[RunRequest],
    gpu: str,
    *,
    total: int,
    at_once: int = 8,
    cap: bool = False,
    estimated: bool = True,
    timeout: float = 300.0,
) -> Iterator[dict[str, Any]]:
    """Measure every run; yield a row for each as it is done: the configuration, the figures and the estimate.

    A row that already has an estimate is not estimated again. If `estimated` is false, no row is, and each run is
    promised `UNKNOWN_NEED`. With `cap`, runs are limited to the bound of their estimate (`upper` less the context):
    `"capped"` says whether they survived, and a run that met its limit is repeated without it.
    """
    memory = GpuMemory(max(GIB, total - SPARE))
    begin, stop = time.monotonic(), threading.Event()

    def one(request: RunRequest) -> dict[str, Any]:
        guess = request.row.get("estimate") or (estimate_apart(request, gpu, timeout, stop) if estimated else {})
        need = guess.get("upper", UNKNOWN_NEED)
        taken = memory.take(need)
        try:
            limit = guess["upper"] - guess["context"] if cap and "upper" in guess else None
            figures, survived = _under(limit, request, timeout, stop)
            row = {**request.row, **figures, **({"estimate": guess} if guess else {})}
            if request.history and "event_count" in figures:
                row["events"] = f"{Path(request.history).parent.name}/{Path(request.history).name}"
            if limit is not None and "failed" not in figures:
                row["capped"] = {"cap": limit, "survived": survived}
        finally:
            memory.give_back(taken)
        row["finished_s"] = round(time.monotonic() - begin, 1)
        return row

    with ThreadPoolExecutor(at_once) as pool:
        waiting = [pool.submit(one, request) for request in requests]
        try:
            for done in as_completed(waiting):
                yield done.result()
        finally:
            stop.set()  # if the caller stops early: end what runs, and do not begin the rest
            for task in waiting:
                task.cancel()


def _under(
    limit: int | None, request: RunRequest, timeout: float, stop: threading.Event
) -> tuple[dict[str, Any], bool]:
    """Return a run with a limited allocator, and whether it survived; if it met the limit, the run without it.

    A run that never met its limit (no retry) is the same as one without it.
    """
    figures = measure_apart(replace(request, cap=limit), timeout, stop)
    survived = not {"oom", "failed"} & figures.keys()
    if limit is not None and (not survived or figures["retries"]):
        return measure_apart(request, timeout, stop), survived
    return figures, survived


def local_gpu(nvml: Any = None) -> GPU:
    """Return this machine's first GPU; without one, the error says what to do."""
    cards = local_gpus(nvml)
    if not cards:
        raise UllageError(
            "cannot measure: NVML finds no NVIDIA GPU on this machine. "
            "'ullage estimate' and 'ullage evaluate' need no GPU."
        )
    return cards[0]


def read_runs(rows: Sequence[dict[str, Any]], iterations: int, histories: Path | None) -> list[RunRequest]:
    """Return the runs in a file's rows; every row needs a unique id, which also names its history.

    A row with `script` is a script, optionally with `args`, `module`, `cwd`, `env` and `stop_after`; paths are relative
    to `cwd`.
    """
    requests, seen = [], set()
    for number, row in enumerate(rows):
        name = str(row.get("id") or f"r{number:04d}")
        if name in seen or "/" in name:
            raise InvalidValue(f"each run must have a unique id without '/', got {name!r}")
        seen.add(name)
        history = str(histories / f"{name}.npz") if histories else None
        how = {key: row[key] for key in ("script", "args", "module", "cwd", "env", "stop_after") if row.get(key)}
        requests.append(RunRequest(row={**row, "id": name}, iterations=iterations, history=history, **how))
    return requests
