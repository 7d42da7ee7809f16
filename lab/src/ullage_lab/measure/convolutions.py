"""Measures on a real GPU what convolution calls ask of PyTorch's caching allocator.

    ullage lab measure convolutions tasks.json.gz --out measured.jsonl.gz --stop-after 8m --workers 12

Several processes share the GPU, since most of a first call is cuDNN's choice and building of a plan on
the CPU. Each process records the allocator's history (`torch.cuda.memory._record_memory_history`) for a
few hundred calls and reads it once; an allocation of a size of its own before each call tells the calls
apart. A line of the result has the form of the ground truth: `[[operator, arguments, keyword arguments],
sizes requested in order, sizes of the outputs, number of requests]`. A call during which memory ran out
is left out: PyTorch then tries cuDNN's next plan (Conv_v8.cpp, `try_configs`).
"""

from __future__ import annotations

import gzip
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import connection
from pathlib import Path
from typing import Any

import torch

from ullage_lab.draw.layers import (
    BACKWARD,
    LAYOUTS,
    TYPES,
    ConvolutionLayer,
    ConvolutionTask,
    describe,
    elements,
    layout_strides,
    read_tasks,
    tensor_bytes,
)

_DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
_MARK = 600_001  # bytes; odd and in the small pool, where a marker costs next to nothing
_CHUNK = 256
_ALIGNMENT = 512
_PLANS_KEPT = 64  # each is used once


@dataclass(frozen=True, slots=True)
class MeasuringOptions:
    """How to measure."""

    tasks: Path
    out: Path
    seconds: float
    workers: int
    limit: int | None  # how many tasks; none: all
    tensor_limit: int  # bytes of input, output and filter
    device: str


class Arena:
    """One block of zeros that holds the arguments of every call, so that only the call itself allocates."""

    def __init__(self, size: int, device: str) -> None:
        self._bytes = torch.zeros(size, dtype=torch.uint8, device=device)
        self._used = 0

    def clear(self) -> None:
        """Forget what was handed out."""
        self._used = 0

    def tensor(self, shape: Sequence[int], kind: str, layout: str) -> torch.Tensor:
        """A tensor of zeros over the next free bytes."""
        dtype = _DTYPES[kind]
        end = self._used + elements(shape) * dtype.itemsize
        part = self._bytes[self._used : end].view(dtype)
        self._used = -(-end // _ALIGNMENT) * _ALIGNMENT
        return part.as_strided(tuple(shape), layout_strides(shape, layout))


@dataclass(frozen=True, slots=True)
class PreparedCall:
    """One call ready to run, and its description."""

    operator: Any
    arguments: tuple[Any, ...]
    name: list[Any]


def prepare(layer: ConvolutionLayer, task: ConvolutionTask, arena: Arena) -> PreparedCall:
    """The operator and arguments of a task."""
    kind, layout = TYPES[task.type], LAYOUTS[task.layout]
    arena.clear()
    source = arena.tensor((task.batch, *layer.input), kind, layout)
    weight = arena.tensor(layer.weight, kind, layout)
    settings = (list(layer.stride), list(layer.padding), list(layer.dilation))
    rest = (layer.transposed, list(layer.output_padding), layer.groups)
    out = layer.output()
    if task.direction == BACKWARD:
        grad = arena.tensor((task.batch, *out), kind, layout)
        sizes = [out[0]] if layer.bias else None
        arguments: tuple[Any, ...] = (grad, source, weight, sizes, *settings, *rest, [True, True, layer.bias])
        operator, name = torch.ops.aten.convolution_backward.default, "aten.convolution_backward.default"
    else:
        bias = arena.tensor((out[0],), kind, "c") if layer.bias else None
        arguments = (source, weight, bias, *settings, *rest)
        operator, name = torch.ops.aten.convolution.default, "aten.convolution.default"
    return PreparedCall(operator, arguments, [name, [_described(value, kind) for value in arguments], {}])


def _described(value: Any, kind: str) -> Any:
    return describe(value.shape, value.stride(), kind) if isinstance(value, torch.Tensor) else value


def start_recording() -> None:
    """Begin an empty allocator history without stack traces."""
    torch.cuda.memory._record_memory_history(enabled=None)
    torch.cuda.memory._record_memory_history(enabled="all", context=None, stacks="python")


def recorded() -> list[dict[str, Any]]:
    """The allocator's history since `start_recording`."""
    trace: list[dict[str, Any]] = torch.cuda.memory._snapshot()["device_traces"][torch.cuda.current_device()]
    return trace


def split_at_marks(trace: Iterable[dict[str, Any]], marks: Sequence[int]) -> list[list[int] | None]:
    """The sizes requested after each mark, in order; `None` where memory ran out.

    >>> rows = [("alloc", 5), ("alloc", 64), ("free_requested", 64), ("alloc", 7), ("oom", 1)]
    >>> split_at_marks([{"action": action, "size": size} for action, size in rows], [5, 7])
    [[64], None]
    """
    calls: list[list[int] | None] = []
    for entry in trace:
        if entry["action"] == "alloc":
            if len(calls) < len(marks) and entry["size"] == marks[len(calls)]:
                calls.append([])
            elif calls and calls[-1] is not None:
                calls[-1].append(entry["size"])
        elif entry["action"] == "oom" and calls:
            calls[-1] = None
    return calls


def run_call(call: PreparedCall) -> list[int] | None:
    """Run one call; the sizes of its outputs, or `None` if it failed."""
    try:
        outputs = call.operator(*call.arguments)
    except RuntimeError:  # OutOfMemoryError too; an error that stays shows at the end of the chunk
        return None
    several = outputs if isinstance(outputs, (tuple, list)) else (outputs,)
    return [out.untyped_storage().nbytes() for out in several if out is not None]


def measure(
    layers: Sequence[ConvolutionLayer], tasks: Sequence[ConvolutionTask], arena: Arena, device: str
) -> Iterator[str]:
    """Run the tasks and give a line of the result for each one that worked."""
    calls: list[PreparedCall] = []
    outputs: list[list[int] | None] = []
    marks = [_MARK + 2 * place for place in range(len(tasks))]
    start_recording()
    for task, mark in zip(tasks, marks, strict=True):
        call = prepare(layers[task.layer], task, arena)
        torch.empty(mark, dtype=torch.uint8, device=device)
        calls.append(call)
        outputs.append(run_call(call))
    torch.cuda.synchronize()
    requests = split_at_marks(recorded(), marks)
    if len(requests) != len(tasks):
        raise RuntimeError(f"the allocator's history shows {len(requests)} calls of {len(tasks)}")
    for call, sizes, asked in zip(calls, outputs, requests, strict=True):
        if sizes is not None and asked is not None:
            yield json.dumps([call.name, asked[:60], sizes, len(asked)], separators=(",", ":"))


def work(options: MeasuringOptions, next_chunk: Any, deadline: float, pipe: Any) -> None:
    """One process: take the next chunk until there is none or the time is over."""
    torch.set_num_threads(1)
    torch.cuda.set_per_process_memory_fraction(0.82 / options.workers)
    layers, tasks = read_tasks(options.tasks)
    tasks = [task for task in tasks[: options.limit] if _fits(layers, task, options.tensor_limit)]
    arena = Arena(options.tensor_limit + (1 << 20), options.device)
    with torch.no_grad():
        list(measure(layers, tasks[:1], arena, options.device))  # the libraries start here
        while time.monotonic() < deadline:
            with next_chunk.get_lock():
                start = next_chunk.value
                next_chunk.value = start + _CHUNK
            chunk = tasks[start : start + _CHUNK]
            if not chunk:
                break
            pipe.send((len(chunk), list(measure(layers, chunk, arena, options.device))))
    pipe.close()


def _fits(layers: Sequence[ConvolutionLayer], task: ConvolutionTask, limit: int) -> bool:
    return tensor_bytes(layers[task.layer], task.batch, TYPES[task.type]) <= limit


class MeasuringProcesses:
    """The processes; one that dies is replaced, and the chunk it had is lost."""

    def __init__(self, options: MeasuringOptions) -> None:
        self._options = options
        self._context = multiprocessing.get_context("spawn")
        self._next = self._context.Value("q", 0)
        self._deadline = time.monotonic() + options.seconds
        self._processes: dict[Any, Any] = {}
        self.deaths = 0
        for _ in range(options.workers):
            self._start()

    def _start(self) -> None:
        ours, theirs = self._context.Pipe(duplex=False)
        process = self._context.Process(
            target=work, args=(self._options, self._next, self._deadline, theirs), daemon=True
        )
        process.start()
        theirs.close()
        self._processes[ours] = process

    def results(self) -> Iterator[tuple[int, list[str]]]:
        """Calls tried and lines measured, as they come."""
        while self._processes and time.monotonic() < self._deadline + 45:
            ready: Any
            for ready in connection.wait(list(self._processes), timeout=1):
                try:
                    yield ready.recv()
                except EOFError:
                    self._ended(ready)
        for process in self._processes.values():
            process.terminate()

    def _ended(self, pipe: Any) -> None:
        process = self._processes.pop(pipe)
        process.join(10)
        if process.exitcode:
            self.deaths += 1
            if self.deaths <= 4 * self._options.workers and time.monotonic() < self._deadline - 20:
                self._start()


def measure_list(options: MeasuringOptions) -> None:
    """Measure, write the lines as they come and say on stderr how far it is."""
    os.environ.setdefault("TORCH_CUDNN_V8_API_LRU_CACHE_LIMIT", str(_PLANS_KEPT))  # for the processes that are started
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    started, tried, written, shown = time.monotonic(), 0, 0, 0.0
    crew = MeasuringProcesses(options)
    with gzip.open(options.out, "wt", compresslevel=6) as file:
        for count, lines in crew.results():
            tried, written = tried + count, written + len(lines)
            for line in lines:
                file.write(line + "\n")
            elapsed = time.monotonic() - started
            if elapsed - shown > 10:
                shown = elapsed
                file.flush()
                _say(f"{elapsed:5.0f} s  {tried} calls tried, {written} measured")
    elapsed = time.monotonic() - started
    _say(f"{elapsed:.0f} s: {tried} tried, {written} measured, {crew.deaths} processes died")


def _say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)
