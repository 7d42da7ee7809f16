"""One run on the real GPU, inside the child process that `measure_apart` starts.

The answer has the form of the measured files: peaks, figures after each iteration, NVML's figures. A run that runs out
of memory is an answer too (`"oom"`: PyTorch's message), and so is a script that failed after it had trained
(`"broke_off"`): its figures until then. Only a run that could not be tried at all is an error.
"""

import os
import runpy
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from ullage.hardware.local import driver_version, pynvml
from ullage.jobs import Model, train

# Reads this process's memory on one GPU from NVML; `None` if NVML does not report it.


class ProcessMemory:
    """NVML, started once in a process; it is not shared over a fork."""

    def __init__(self, uuid: Any) -> None:
        text = str(uuid)
        self.uuid = text if text.startswith(("GPU-", "MIG-")) else f"GPU-{text}"
        self.driver: str | None = None
        self._nvml: Any = None
        self._handle: Any = None
        nvml = pynvml()
        if nvml is None:
            return
        try:
            nvml.nvmlInit()
            self._handle = nvml.nvmlDeviceGetHandleByUUID(self.uuid)
        except nvml.NVMLError:
            return
        self._nvml, self.driver = nvml, driver_version(nvml)

    def read(self) -> int | None:
        if self._nvml is None:
            return None
        try:
            for process in self._nvml.nvmlDeviceGetComputeRunningProcesses(self._handle):
                if process.pid == os.getpid() and process.usedGpuMemory:
                    return int(process.usedGpuMemory)
        except self._nvml.NVMLError:
            return None
        return None

    def gpu_percent(self) -> int | None:
        """Return NVML's share of the last second in which any kernel ran, for GPUs without finer counters."""
        if self._nvml is None:
            return None
        try:
            return int(self._nvml.nvmlDeviceGetUtilizationRates(self._handle).gpu)
        except self._nvml.NVMLError:
            return None


_ACTIONS = {"alloc": 0, "free_requested": 1, "free_completed": 2, "segment_alloc": 3, "segment_free": 4}
_MOST_EVENTS = 10_000_000


def process_memory() -> int | None:
    """Return this process's GPU memory as NVML reports it; `None` if NVML does not know it."""
    return ProcessMemory(torch.cuda.get_device_properties(0).uuid).read()


def _save_history(file: Path) -> int:
    events = torch.cuda.memory._snapshot()["device_traces"][0]
    events = [event for event in events if event["action"] in _ACTIONS]
    base = min((event["addr"] for event in events if event["action"] == "segment_alloc"), default=0)
    file.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(
        file,
        action=np.array([_ACTIONS[event["action"]] for event in events], dtype=np.uint8),
        addr=np.array([event["addr"] - base for event in events], dtype=np.int64),
        size=np.array([event["size"] for event in events], dtype=np.int64),
    )
    return len(events)


def _train(row: dict[str, Any], iterations: int, answer: dict[str, Any]) -> None:
    configuration = Model.from_row(row)
    after: list[list[int]] = []
    ends: list[list[int]] = []  # while model, batch and loss are still alive
    outside: list[int | None] = []
    times = [time.perf_counter()]

    def note() -> None:
        torch.cuda.synchronize()
        times.append(time.perf_counter())
        after.append([torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()])
        taken = process_memory()
        outside.append(None if taken is None else taken - torch.cuda.memory_reserved())
        ends.append([torch.cuda.memory_allocated(), torch.cuda.memory_reserved()])

    try:
        train(configuration, iterations, after_iteration=note)
    finally:
        steps = sorted(end - begin for begin, end in zip(times[1:], times[2:], strict=False))
        answer |= {"per_iter": after, "outside_per_iter": outside}
        if steps:
            answer["step_s"] = steps[len(steps) // 2]
        if ends:
            answer["end_alloc"], answer["end_reserved"] = ends[-1]


class _TimeOver(BaseException):
    """The script's time is over; not an `Exception`, so that the script does not catch it."""


@contextmanager
def _at_most(seconds: float | None) -> Iterator[dict[str, bool]]:
    """End the code inside `with` after this many seconds, and report that it was ended."""
    outcome: dict[str, bool] = {}
    if not seconds:
        yield outcome
        return

    def over(*_: object) -> None:
        raise _TimeOver

    before = signal.signal(signal.SIGALRM, over)
    signal.setitimer(signal.ITIMER_REAL, seconds, 2.0)  # again, in case a destructor or a bare `except` caught it
    try:
        yield outcome
    except _TimeOver:
        outcome["stopped"] = True
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _run_script(path: str, args: list[str], module: bool) -> None:
    sys.argv = [path, *args]
    sys.path.insert(0, os.getcwd() if module else str(Path(path).resolve().parent))
    try:
        if module:
            runpy.run_module(path, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(path, run_name="__main__")
    except SystemExit as error:
        if error.code not in (None, 0):
            raise RuntimeError(f"the script ended with exit code {error.code}") from None


class _Peaks:
    """The peaks of a whole run, even if the script resets PyTorch's own in between."""

    def __init__(self) -> None:
        self._most = {"allocated": 0, "reserved": 0}
        self._reset = torch.cuda.memory.reset_peak_memory_stats
        self._reset()
        self._set(self._note_and_reset)

    def _set(self, function: Callable[..., None]) -> None:
        modules: list[Any] = [torch.cuda, torch.cuda.memory]
        for module in modules:
            module.reset_peak_memory_stats = function

    def _note_and_reset(self, device: Any = None) -> None:
        self._note()
        self._reset(device)

    def _note(self) -> None:
        statistics = torch.cuda.memory_stats()
        for kind, most in self._most.items():
            self._most[kind] = max(most, statistics[f"{kind}_bytes.all.peak"])

    def close(self) -> dict[str, int]:
        """Restore PyTorch's function and return the peaks."""
        self._set(self._reset)
        self._note()
        return {"peak_alloc": self._most["allocated"], "peak_reserved": self._most["reserved"]}


class _MostMemory:
    """Polls NVML for this process's memory, because a script may free memory before it ends."""

    def __init__(self, memory: ProcessMemory, every_s: float = 0.02) -> None:
        self._memory, self._every_s = memory, every_s
        self._most = 0
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._ask, daemon=True)
        self._thread.start()

    def _ask(self) -> None:
        while not self._end.wait(self._every_s):
            self._most = max(self._most, self._memory.read() or 0)

    def close(self) -> int | None:
        """Return the most memory seen; `None` if NVML does not report it."""
        self._end.set()
        self._thread.join()
        return self._most or None


def measure_here(request: dict[str, Any]) -> dict[str, Any]:
    """Measure the run of a request; see `ullage.measuring.runs.RunRequest`."""
    begin = time.perf_counter()
    torch.cuda.synchronize()  # creates the context, and leaves the allocator untouched
    answer: dict[str, Any] = {"nvml_ctx": process_memory()}
    peaks = _Peaks()
    most = _MostMemory(ProcessMemory(torch.cuda.get_device_properties(0).uuid)) if request.get("script") else None
    history = request.get("history")
    if history:
        torch.cuda.memory._record_memory_history("all", context=None, stacks="python", max_entries=_MOST_EVENTS)
    if request.get("cap"):
        answer["cap"] = request["cap"]
        total = torch.cuda.get_device_properties(0).total_memory  # PyTorch multiplies the fraction out: a little more
        torch.cuda.set_per_process_memory_fraction(min(1.0, (request["cap"] + 512) / total))
    steps: list[Any] = []
    hook = register_optimizer_step_post_hook(lambda optimizer, args, kwargs: steps.append(None))
    try:
        if request.get("script"):
            with _at_most(request.get("stop_after")) as outcome:
                _run_script(request["script"], request.get("args", []), bool(request.get("module")))
            answer |= outcome
        else:
            _train(request["row"], request.get("iterations", 5), answer)
    except torch.OutOfMemoryError as error:
        answer["oom"] = str(error).split(" If reserved")[0]
    except Exception as error:
        if not request.get("script") or not steps:
            raise
        answer["broke_off"] = f"after {len(steps)} steps: {type(error).__name__}: {error}"[:300]
    finally:
        hook.remove()
    torch.cuda.synchronize()
    statistics = torch.cuda.memory_stats()
    current = {
        "end_alloc": statistics["allocated_bytes.all.current"],
        "end_reserved": statistics["reserved_bytes.all.current"],
    }
    answer = {
        **current,
        **answer,
        **peaks.close(),
        "nvml_end": process_memory(),
        **({"nvml_peak": most.close()} if most else {}),
        "retries": statistics["num_alloc_retries"],
        "segments": statistics["segment.all.peak"],
    }
    if history:
        answer["event_count"] = _save_history(Path(history))
    answer["wall_s"] = round(time.perf_counter() - begin, 2)
    return answer
