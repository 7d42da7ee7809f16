"""Times many operator calls: several processes prepare calls at once, then each times its own in turn.

Preparing a call takes longer than timing it: creating tensors, planning by cuDNN, capturing a graph. In each round
every process prepares calls for some seconds; then the GPU is idle, and each times its calls while the others wait. The
processes share the GPU by MPS if available; with time slicing they would wait for each other. Rows are those of
`timing` without the host's time, which many processes at once would distort.
"""

import contextlib
import gc
import multiprocessing
import os
import statistics
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from ullage.hardware.mps import MpsService, MpsUnavailable
from ullage.performance.rates import measured_gpu
from ullage.performance.step import runs_kernels
from ullage.performance.work import work_of
from ullage.sandbox.protocol import error_text
from ullage_lab.calls import bytes_of, identity, packed, prepared
from ullage_lab.measure.timing import argument_sets, captured, loop, rounding, still_works, waits

CALLS = 96  # of a process in a round, at most
_PREPARING = 3.0  # seconds after which a process makes no further call ready in a round
_BYTES = 4_000_000_000  # of the tensors of a round, or of its one call
_GRAPH, _USUAL, _SHORTEST = 0.5e-3, 4.0, 2e-6  # seconds of a graph; a call takes so many times its least; seconds
_MOST_CAPTURED, _REPEATS = 200, 3
_PATIENCE = 180.0  # seconds without an answer, after which a process is given up; a first answer takes longest
Row = dict[str, Any]
Answer = Callable[[Connection], None]


@dataclass(frozen=True)
class _Ready:
    """A prepared call; `run` runs it `calls` times."""

    row: Row
    run: Callable[[], Any] | None = None
    calls: int = 1


def measured(
    calls: Sequence[dict[str, Any]], workers: int, seconds: float | None = None, answer: Answer | None = None
) -> Iterator[Row]:
    """Yield a row for each call that runs kernels, in no particular order; begin no round after the given seconds."""
    end = None if seconds is None else time.monotonic() + seconds
    left = deque(call for call in calls if runs_kernels(call))
    with _shared_gpu():
        team = [_Worker(answer or answering) for _ in range(workers)]
        try:
            while left and (end is None or time.monotonic() < end):
                yield from _round(team, left)
        finally:
            for worker in team:
                worker.stop()


def _round(team: list["_Worker"], left: deque[dict[str, Any]]) -> Iterator[Row]:
    """Let each process take calls of those `left`, return those without time, and time the others."""
    given = [(worker, _chunk(left)) for worker in team]
    for worker, chunk in given:
        worker.send([packed(call) for call in chunk])
    ready = [worker.receive() for worker, _ in given]
    for place, (worker, chunk) in enumerate(given):
        rows, count = None, ready[place]
        if count is not None:
            left.extendleft(reversed(chunk[count:]))
            del chunk[count:]
            worker.send("time")
            rows = worker.receive()
        if rows is None:
            team[team.index(worker)] = worker.renewed()
            rows = [_row(call) | {"failed": "the process ended in one of these calls"} for call in chunk]
        yield from (row | {"call": packed(call)} for row, call in zip(rows, chunk, strict=True))


@contextlib.contextmanager
def _shared_gpu() -> Iterator[None]:
    """Provide MPS, if this machine has it, for processes that start meanwhile."""
    with tempfile.TemporaryDirectory() as folder:
        before = dict(os.environ)
        try:
            service = MpsService(Path(folder))
            service.start()
        except MpsUnavailable:
            yield
            return
        os.environ.update(service.environment)
        try:
            yield
        finally:
            os.environ.clear()
            os.environ.update(before)
            service.stop()


def _chunk(left: deque[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return as many of the first calls as fit into memory together."""
    chunk: list[dict[str, Any]] = []
    taken = 0
    while left and len(chunk) < CALLS:
        taken += argument_sets(left[0]) * bytes_of([left[0]["args"], left[0]["kwargs"], left[0]["outputs"]])
        if chunk and taken > _BYTES:
            break
        chunk.append(left.popleft())
    return chunk


def _row(call: dict[str, Any]) -> Row:
    return {"id": identity(call), "operator": call["operator"]}


class _Worker:
    """A process that receives calls, reports when they are ready, and times them on request."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        context = multiprocessing.get_context("spawn")
        self._pipe, other = context.Pipe()
        self._process = context.Process(target=answer, args=(other,), daemon=True)
        self._process.start()
        other.close()

    def send(self, what: Any) -> None:
        with contextlib.suppress(OSError):
            self._pipe.send(what)

    def receive(self) -> Any:
        """Return the worker's message; `None` if it ended or sends nothing for too long."""
        try:
            return self._pipe.recv() if self._pipe.poll(_PATIENCE) else None
        except (EOFError, OSError):
            return None

    def renewed(self) -> "_Worker":
        self.stop()
        return _Worker(self._answer)

    def stop(self) -> None:
        self._pipe.close()
        self._process.join(5)
        if self._process.is_alive():
            self._process.kill()


def answering(pipe: Connection) -> None:
    """Prepare and time calls from a pipe until it ends; first report how many calls are ready."""
    from ullage_lab.calls import unpacked

    bench = _Bench()
    with contextlib.suppress(EOFError):
        while True:
            given = pipe.recv()
            end = time.monotonic() + _PREPARING
            ready: list[_Ready] = []
            while len(ready) < len(given) and (not ready or time.monotonic() < end):
                ready.append(bench.ready(unpacked(given[len(ready)])))
            torch.cuda.synchronize()
            pipe.send(len(ready))
            pipe.recv()
            pipe.send([bench.timed(one) for one in ready])
            del ready
            bench.renew()


class _Bench:
    """Graphs of calls, and the memory that they share until the next round."""

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream()
        self.renew()
        gc.freeze()

    def renew(self) -> None:
        gc.collect()
        torch.cuda.empty_cache()

    def ready(self, call: dict[str, Any]) -> _Ready:
        row = _row(call)
        try:
            with rounding(call):
                count = argument_sets(call)
                sets = [prepared(call, "cuda") for _ in range(count)]
                loop(sets, count)
                torch.cuda.synchronize()
                guess = max(_SHORTEST, _USUAL * work_of(call).least_time(measured_gpu()))
                calls = max(1, min(_MOST_CAPTURED, round(_GRAPH / guess / count))) * count
                row |= {"sets": count, "bytes": bytes_of([call["args"], call["kwargs"]])}
                if not waits(call):
                    with contextlib.suppress(RuntimeError):
                        graph = captured(self._stream, torch.cuda.graph_pool_handle(), sets, calls)
                        return _Ready(row | {"how": "graph"}, partial(_replay, graph, sets), calls)
                return _Ready(row | {"how": "loop"}, lambda: loop(sets, calls), calls)
        except (RuntimeError, AttributeError, TypeError, IndexError, ValueError, NotImplementedError) as error:
            if not still_works():
                raise
            return _Ready(row | {"failed": error_text(error)})

    def timed(self, one: _Ready) -> Row:
        if one.run is None:
            return one.row
        one.run()
        events = [torch.cuda.Event(enable_timing=True) for _ in range(_REPEATS + 1)]
        events[0].record()
        for event in events[1:]:
            one.run()
            event.record()
        events[-1].synchronize()
        times = [before.elapsed_time(after) for before, after in zip(events, events[1:], strict=False)]
        return one.row | {"gpu_us": round(1e3 * statistics.median(times) / one.calls, 3)}


def _replay(graph: Any, sets: Sequence[Any]) -> None:
    graph.replay()  # the graph reads the tensors of these sets
