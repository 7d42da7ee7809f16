"""Measures runs on a real GPU: each in a fresh process, several at once as memory allows.

How much a run may take is not known before it is measured, so it is estimated first, in a process that sees no GPU;
a run starts when the sum of the bounds of those that run leaves room for its own. The estimate is kept beside the
measurement, so that a file of measured runs is also a comparison.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import redirect_stdout
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ullage.errors import InvalidValue, UllageError
from ullage.units import GIB

UNKNOWN_NEED = 30 * GIB  # kept free for a run that could not be estimated
SPARE = 2 * GIB  # of the card, left for the driver and whatever else is there
ESTIMATED = ("peak_allocated", "peak_reserved", "process_memory", "upper", "seconds", "notes", "context")


@dataclass(frozen=True, kw_only=True)
class Order:
    """What to measure: a row of a file of configurations, or a script with its arguments.

    `cap` is the most that PyTorch's allocator may reserve in that run, in bytes.
    """

    row: dict[str, Any] = field(default_factory=dict)
    script: str | None = None
    args: list[str] = field(default_factory=list)
    module: bool = False
    iterations: int = 5
    history: str | None = None
    cap: int | None = None


def in_fresh_process(module: str, order: dict[str, Any], timeout: float, environment: dict[str, str]) -> dict[str, Any]:
    """Give an order to a module of ours in a new process and read its one line of JSON."""
    command = [sys.executable, "-m", module]
    try:
        done = subprocess.run(
            command, input=json.dumps(order), text=True, capture_output=True, timeout=timeout,
            env={**os.environ, **environment}, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return {"failed": f"took longer than {timeout:.0f} s"}
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if not lines:
        last = done.stderr.strip().splitlines()[-1:] or ["no output"]
        return {"failed": f"the process ended with {done.returncode}: {last[0][:400]}"}
    answer: dict[str, Any] = json.loads(lines[-1])
    return answer


def answer_order(do: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """The other side of `in_fresh_process`: read the order, do it, print the answer; other output is an error's."""
    order = json.load(sys.stdin)
    try:
        with redirect_stdout(sys.stderr):
            answer = do(order)
    except Exception as error:
        answer = {"failed": f"{type(error).__name__}: {error}".splitlines()[0][:500]}
    print("\n" + json.dumps(answer), flush=True)


def estimate_apart(order: Order, gpu: str, timeout: float = 300.0) -> dict[str, Any]:
    """The estimate of a run, by a process that sees no GPU."""
    return in_fresh_process(
        "ullage.research.measure.single_estimate",
        {**vars(order), "gpu": gpu},
        timeout,
        {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
    )


def measure_apart(order: Order, timeout: float = 300.0) -> dict[str, Any]:
    """One run on the real GPU in a fresh process."""
    return in_fresh_process("ullage.research.measure.single_run", vars(order), timeout, {"OMP_NUM_THREADS": "2"})


class Room:
    """The memory of the card, promised to runs while they run."""

    def __init__(self, total: int) -> None:
        self._total = self._free = total
        self._changed = threading.Condition()

    def take(self, need: int) -> int:
        """Wait until that much is free; one that needs more than the card has gets it to itself."""
        need = min(need, self._total)
        with self._changed:
            self._changed.wait_for(lambda: self._free >= need)
            self._free -= need
        return need

    def give_back(self, taken: int) -> None:
        """The run has ended."""
        with self._changed:
            self._free += taken
            self._changed.notify_all()


def measure(
    orders: Sequence[Order],
    gpu: str,
    *,
    total: int,
    at_once: int = 8,
    cap: bool = False,
    timeout: float = 300.0,
) -> Iterator[dict[str, Any]]:
    """Measure every order; yields a row for each as it is done: the configuration, the figures and the estimate.

    A row that brings its estimate is not estimated again. With `cap` runs are limited to the bound of their estimate
    (`upper` less the context): `"capped"` says whether they survived, and one that met its limit is run without it too.
    """
    room = Room(max(GIB, total - SPARE))
    begin = time.monotonic()

    def one(order: Order) -> dict[str, Any]:
        guess = order.row.get("estimate") or estimate_apart(order, gpu, timeout)
        need = guess.get("upper", UNKNOWN_NEED)
        taken = room.take(need)
        try:
            limit = guess["upper"] - guess["context"] if cap and "upper" in guess else None
            found, survived = _under(limit, order, timeout)
            row = {**order.row, **found, "estimate": guess}
            if order.history and "event_count" in found:
                row["events"] = f"{Path(order.history).parent.name}/{Path(order.history).name}"
            if limit is not None and "failed" not in found:
                row["capped"] = {"cap": limit, "survived": survived}
        finally:
            room.give_back(taken)
        row["finished_s"] = round(time.monotonic() - begin, 1)
        return row

    with ThreadPoolExecutor(at_once) as pool:
        waiting = [pool.submit(one, order) for order in orders]
        try:
            for done in as_completed(waiting):
                yield done.result()
        finally:
            for task in waiting:
                task.cancel()


def _under(limit: int | None, order: Order, timeout: float) -> tuple[dict[str, Any], bool]:
    """A run with the allocator limited, and whether it survived; where it met the limit, the run without it.

    A run that never met its limit (no retry) is the run that it would have been without.
    """
    found = measure_apart(replace(order, cap=limit), timeout)
    survived = not {"oom", "failed"} & found.keys()
    if limit is not None and (not survived or found["retries"]):
        return measure_apart(order, timeout), survived
    return found, survived


def local_gpu() -> tuple[str, int]:
    """The name of this machine's first GPU in the catalogue and its memory; says what to do where there is none."""
    from ullage.hardware import local_gpus

    found = local_gpus()
    if not found:
        raise UllageError(
            "needed an NVIDIA GPU to measure on; NVML finds none on this machine. "
            "'ullage estimate' and 'ullage evaluate' need no GPU."
        )
    return found[0].name, found[0].usable


def read_orders(rows: Sequence[dict[str, Any]], iterations: int, histories: Path | None) -> list[Order]:
    """Orders of a file's rows; every row needs an id of its own, which also names its history."""
    orders, seen = [], set()
    for number, row in enumerate(rows):
        name = str(row.get("id") or f"r{number:04d}")
        if name in seen or "/" in name:
            raise InvalidValue(f"needed an id of its own for every run, without '/'; found {name!r} twice or bad")
        seen.add(name)
        history = str(histories / f"{name}.npz") if histories else None
        orders.append(Order(row={**row, "id": name}, iterations=iterations, history=history))
    return orders
