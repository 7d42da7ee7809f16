"""Profiles of real training steps: `ullage lab measure steps`.

A row is the line of the configuration with

    step_s, steps   seconds of a step without the profiler, over so many steps
    profiled_s      seconds of the step that was profiled
    calls           operators below autograd, in order: name, shapes, begin, taken, thread (0 is that of the loop)
    kernels         what ran on the GPU, in order of launching: call (-1: none), name, launch, begin, taken, launched
    names, shapes, launches
                    what the numbers in `calls` and `kernels` stand for; a launch is grid, block, registers a thread and
                    shared memory

Times are nanoseconds; `begin` and `launched` count from the entry before.
"""

import bisect
import contextlib
import functools
import gc
import itertools
import json
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from ullage.jobs import Model, train
from ullage.jobs.sources.build import prepare
from ullage.jobs.training import low_precision
from ullage.sandbox.protocol import error_text
from ullage_lab.measure.memory import EnoughSteps, cheap_start, on_gpu

_WARM_STEPS, _WARM_SECONDS = 4, 0.15
_TIMED_STEPS, _TIMED_SECONDS, _MOST_TIMED = 6, 0.12, 60
_ENDLESS = 10**9
_STEP = "ullage step"
_ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")
_LAUNCHING = ("cuda_runtime", "cuda_driver")
_WHOLE = ("aten::where", "aten::_fused_rms_norm")  # operators with their own kernels on GPUs


class _ProfiledSteps:
    """Called after each step: warms up, times steps, profiles two, ends the loop."""

    def __init__(self) -> None:
        self.steps = 0
        self.figures: dict[str, Any] = {}
        self.profiler: Any = None
        self._label: Any = None
        self._began = time.perf_counter()
        self._timed = 0

    def __call__(self) -> None:
        now = time.perf_counter()
        self.steps += 1
        if self.profiler is not None:
            self._next_profiled()
        elif self._timed:
            self._next_timed()
        elif self.steps >= _WARM_STEPS and now - self._began > _WARM_SECONDS or self.steps > 200:
            torch.cuda.synchronize()
            self._began, self._timed = time.perf_counter(), 1
            self._count = 0

    def _next_timed(self) -> None:
        self._count += 1
        taken = time.perf_counter() - self._began
        if self._count >= _TIMED_STEPS and taken > _TIMED_SECONDS or self._count >= _MOST_TIMED or taken > 1.5:
            torch.cuda.synchronize()
            taken = time.perf_counter() - self._began
            self.figures = {"step_s": round(taken / self._count, 7), "steps": self._count}
            activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
            self.profiler = torch.profiler.profile(activities=activities, record_shapes=True)
            self.profiler.start()
            self._profiled = 0
            self._open()

    def _next_profiled(self) -> None:
        self._profiled += 1
        self._label.__exit__(None, None, None)
        if self._profiled == 2:
            torch.cuda.synchronize()
            self.profiler.stop()
            raise EnoughSteps
        self._open()

    def _open(self) -> None:
        self._label = torch.profiler.record_function(_STEP)
        self._label.__enter__()


def profiled(row: dict[str, Any]) -> dict[str, Any]:
    """Train a configuration for some steps and profile the last."""
    configuration = Model.from_row(row)
    with cheap_start():
        model, task = prepare(configuration)
    made = on_gpu(model, low_precision(configuration), drawn=True), task
    steps = _ProfiledSteps()
    with contextlib.suppress(EnoughSteps):
        train(configuration, _ENDLESS, after_iteration=steps, prepared=made)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        steps.profiler.export_chrome_trace(str(path))
        trace = json.loads(path.read_text())
    return {**row, **steps.figures, **condensed(trace["traceEvents"])}


def condensed(events: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the last step of a trace, as arrays of numbers."""
    label = max(
        (event for event in events if event.get("name") == _STEP and event.get("cat") == "user_annotation"),
        key=lambda event: event["ts"],
    )
    begin, end = label["ts"], label["ts"] + label["dur"]
    inside = [event for event in events if event.get("ph") == "X" and begin <= event["ts"] <= end]
    calls, place_of = _calls([event for event in inside if event.get("cat") == "cpu_op"])
    launches = {
        event["args"]["correlation"]: event
        for event in inside
        if event.get("cat") in _LAUNCHING and "correlation" in event.get("args", {})
    }
    on_gpu = [
        event
        for event in events
        if event.get("cat") in _ON_GPU and event.get("args", {}).get("correlation") in launches
    ]
    names, shapes, configurations = (defaultdict[str, int](itertools.count().__next__) for _ in range(3))
    thread = label["tid"]
    called: dict[str, list[int]] = {key: [] for key in ("name", "shapes", "begin", "taken", "thread")}
    for event in calls:
        called["name"].append(names[event["name"]])
        arguments = event.get("args", {})
        called["shapes"].append(shapes[json.dumps([arguments.get("Input Dims"), arguments.get("Input type")])])
        called["begin"].append(_nanoseconds(event["ts"] - begin))
        called["taken"].append(_nanoseconds(event["dur"]))
        called["thread"].append(int(event["tid"] != thread))
    ran: dict[str, list[int]] = {key: [] for key in ("call", "name", "launch", "begin", "taken", "launched")}
    for event in sorted(on_gpu, key=lambda one: launches[one["args"]["correlation"]]["ts"]):
        launch = launches[event["args"]["correlation"]]
        given = event["args"]
        shape = [given.get(key) for key in ("grid", "block", "registers per thread", "shared memory", "bytes")]
        ran["call"].append(place_of(launch, given.get("External id")))
        ran["name"].append(names[event["name"]])
        ran["launch"].append(configurations[json.dumps(shape)])
        ran["begin"].append(_nanoseconds(event["ts"] - begin))
        ran["taken"].append(_nanoseconds(event["dur"]))
        ran["launched"].append(_nanoseconds(launch["ts"] - begin))
    waiting = [event for event in inside if event.get("cat") in _LAUNCHING and "Synchronize" in event["name"]]
    for column in (called["begin"], ran["begin"], ran["launched"]):
        column[:] = [now - before for before, now in zip([0, *column], column, strict=False)]
    return {
        "profiled_s": round(label["dur"] * 1e-6, 7),
        "waited_s": round(sum(event["dur"] for event in waiting) * 1e-6, 7),
        "launched": sum("Launch" in event["name"] for event in launches.values()),
        "calls": called,
        "kernels": ran,
        "names": list(names),
        "shapes": [json.loads(text) for text in shapes],
        "launches": [json.loads(text) for text in configurations],
    }


def _nanoseconds(micro: float) -> int:
    return round(micro * 1000)


def _calls(events: Sequence[dict[str, Any]]) -> tuple[list[dict[str, Any]], Any]:
    """Return the outermost operators with their own kernels, in order, and a locator of a launch among them."""
    calls: list[dict[str, Any]] = []
    outer: dict[Any, dict[str, Any]] = {}  # by the number of an event: the one of `found` that it is inside of
    by_thread: dict[Any, list[dict[str, Any]]] = {}
    for event in events:
        by_thread.setdefault(event["tid"], []).append(event)
    for several in by_thread.values():
        several.sort(key=lambda event: (event["ts"], -event["dur"]))
        until = -1.0
        for number, event in enumerate(several):
            if event["ts"] >= until:
                if not _has_kernels(event["name"]) or _is_around_itself(several, number):
                    continue
                calls.append(event)
                until = event["ts"] + event["dur"]
            outer[event.get("args", {}).get("External id")] = calls[-1]
    calls.sort(key=lambda event: event["ts"])
    numbers = {id(event): place for place, event in enumerate(calls)}
    tracks: dict[Any, tuple[list[float], list[int]]] = {}
    for place, event in enumerate(calls):
        begins, places = tracks.setdefault(event["tid"], ([], []))
        begins.append(event["ts"])
        places.append(place)

    def place_of(launch: dict[str, Any], inside_of: Any) -> int:
        if inside_of in outer:
            return numbers[id(outer[inside_of])]
        begins, places = tracks.get(launch["tid"], ([], []))
        index = bisect.bisect_right(begins, launch["ts"]) - 1
        if index < 0:
            return -1
        event = calls[places[index]]
        return places[index] if launch["ts"] <= event["ts"] + event["dur"] else -1

    return calls, place_of


def _is_around_itself(events: Sequence[dict[str, Any]], number: int) -> bool:
    """Whether an operator first casts its arguments, as autocast does, and is then called again."""
    event = events[number]
    for place in range(number + 1, len(events)):
        if events[place]["ts"] >= event["ts"] + event["dur"]:
            return False
        if events[place]["name"] == event["name"]:
            return True
    return False


def _has_kernels(name: str) -> bool:
    """Whether an operator is one that PyTorch does not decompose above autograd."""
    if "::" not in name or name.startswith(("autograd::", "torch::autograd::")):
        return False
    return not _is_composite(name)


@functools.cache
def _is_composite(name: str) -> bool:
    space, _, word = name.partition("::")
    packet = getattr(getattr(torch.ops, space), word, None)
    if packet is None or name in _WHOLE:
        return False
    names = [overload for overload in packet.overloads() if "name" not in overload.lower() and "out" not in overload]
    return any(map(_of_many, [packet.default] if "default" in names else [getattr(packet, name) for name in names]))


def _of_many(operator: Any) -> bool:
    try:
        return bool(torch._C._dispatch_has_kernel_for_dispatch_key(operator.name(), "CompositeImplicitAutograd"))
    except RuntimeError:  # an operator of TorchScript alone
        return False


def profiles(rows: Sequence[dict[str, Any]], seconds: float | None = None) -> Iterator[dict[str, Any]]:
    """Yield a row for each configuration; one that does not run has `failed`. Stop after the given seconds."""
    end = None if seconds is None else time.monotonic() + seconds
    for row in rows:
        if end is not None and time.monotonic() > end:
            return
        begin = time.perf_counter()
        try:
            profile = profiled(row)
        except Exception as error:
            profile = {**row, "failed": error_text(error)}
        gc.collect()
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()
        yield {**profile, "wall_s": round(time.perf_counter() - begin, 3)}
