"""Measures operator calls on a real GPU: `ullage lab measure calls`.

A row has `id`, `operator`, and of the call

    gpu_us      what the GPU takes, one call after the other without gaps
    host_us     what the host takes to make the call
    how         "graph": calls captured in a CUDA graph, "loop": calls one by one, "view": nothing runs on the GPU
    sets, bytes how many sets of arguments take turns, and the bytes of one: of large ones, more than the cache holds
    steady_us   the same over a tenth of a second, in rows with `activity`: SMACT, SMOCC, DRAMA, tensor; with `clock`,
                the SMs' MHz, and `power_w` at its end
    failed      why there is none of this

Timing needs the GPU alone.
"""

import contextlib
import gc
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from ullage.errors import InvalidValue
from ullage.hardware.local import pynvml
from ullage.measuring.single_run import ProcessMemory
from ullage.performance.step import runs_kernels
from ullage.sandbox.protocol import error_text
from ullage_lab.calls import bytes_of, identity, packed, prepared, tensors_of
from ullage_lab.measure.activity import activity_between

_CACHE = 160_000_000  # bytes; sets of arguments that take turns are more than any L2 cache together, if they are large
_MOST_SETS, _LEAST_SETS = 8, 2
_GRAPH = 1e-3  # seconds of work in a graph, about
_MOST_CAPTURED = 400  # calls
_LEAST_TIME, _MOST_TIME = 4e-3, 0.15  # seconds of one measurement
_REPEATS = 7
EVERY = 4  # one in this many calls is read with the counters
_HOST_CALLS = 20
_WINDOW = 0.105  # seconds for the GPU's counters
_LAG = 0.12  # seconds: the counters may be as much behind, so the call is repeated before they are read
_MOST_KEPT = 40_000_000_000  # bytes
_ACTIVITY = ("gract", "smact", "smocc", "drama", "tensor")
MOST_BYTES = 12_000_000_000  # of the arguments of a call
# Operators that wait for the GPU, or copy between it and the host: no graph can hold them.
_WAITS = (
    "_local_scalar_dense",
    "nonzero",
    "masked_select",
    "unique",
    "_unique",
    "repeat_interleave",
    "equal",
    "_ctc_loss",
    "bincount",
    "linalg",
    "_linalg",
)


class CallTimer:
    """Times calls on the current GPU, one after the other."""

    def __init__(self, device: str = "cuda") -> None:
        self.device = device
        self._stream = torch.cuda.Stream()
        self._keeper: Any = None
        self.renew()
        self._uuid = ProcessMemory(torch.cuda.get_device_properties(0).uuid).uuid
        self._nvml = pynvml()
        with contextlib.suppress(Exception):
            self._nvml.nvmlInit()  # stays, so that each stretch begins at once

    def renew(self) -> None:
        """Free all memory. Graphs share a pool, which is held by a graph that is never replayed."""
        self._keeper = None
        gc.collect()
        torch.cuda.empty_cache()
        self._pool = torch.cuda.graph_pool_handle()
        addition: Any = torch.ops.aten.add.Scalar, [torch.zeros(1, device=self.device), 1], {}
        self._keeper = captured(self._stream, self._pool, [addition], 1)

    def measure(self, call: dict[str, Any], with_activity: bool = False) -> dict[str, Any]:
        with rounding(call):
            return self._measure(call, with_activity)

    def _measure(self, call: dict[str, Any], with_activity: bool) -> dict[str, Any]:
        size = bytes_of([call["args"], call["kwargs"]])
        if size > MOST_BYTES:
            return {"failed": "arguments too large"}
        count = argument_sets(call)
        sets = [prepared(call, self.device) for _ in range(count)]
        for operator, args, kwargs in sets:
            operator(*args, **kwargs)
        torch.cuda.synchronize()
        figures: dict[str, Any] = {"sets": count, "bytes": size, "host_us": _micro(self._host(sets))}
        if not runs_kernels(call):
            return figures | {"how": "view"}
        guess = self._guess(sets)
        graph, calls = None, max(1, min(_MOST_CAPTURED, round(_GRAPH / guess / count))) * count
        if not waits(call):
            with contextlib.suppress(RuntimeError):
                graph = captured(self._stream, self._pool, sets, calls)
        run = graph.replay if graph is not None else lambda: loop(sets, calls)
        seconds = self._timed(run, calls, guess)
        figures |= {"how": "graph" if graph is not None else "loop", "gpu_us": _micro(seconds)}
        if with_activity and seconds > 3e-6:
            figures |= self._activity(run, calls, seconds)
        if graph is not None:
            graph.reset()
        return figures

    def _host(self, sets: Sequence[Any]) -> float:
        """Return the host's seconds for a call; the GPU lags by less than its queue holds."""
        best = float("inf")
        for _ in range(3):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            loop(sets, _HOST_CALLS)
            best = min(best, (time.perf_counter() - begin) / _HOST_CALLS)
            if best > 2e-3:
                break
        return best

    def _guess(self, sets: Sequence[Any]) -> float:
        """Return the approximate seconds of a call on the GPU."""
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        begin.record()
        loop(sets, len(sets))
        end.record()
        end.synchronize()
        return max(1e-6, float(begin.elapsed_time(end)) * 1e-3 / len(sets))

    def _timed(self, run: Callable[[], Any], calls: int, guess: float) -> float:
        run()
        torch.cuda.synchronize()
        repeats = max(_REPEATS, round(_LEAST_TIME / (guess * calls)))
        repeats = max(2, min(repeats, 100, int(_MOST_TIME / (guess * calls))))
        events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
        events[0].record()
        for event in events[1:]:
            run()
            event.record()
        events[-1].synchronize()
        times: list[float] = [before.elapsed_time(after) for before, after in zip(events, events[1:], strict=False)]
        return statistics.median(times) * 1e-3 / calls

    def _activity(self, run: Callable[[], Any], calls: int, seconds: float) -> dict[str, Any]:
        """Return the GPU's counters while the call is repeated."""
        _repeat(run, seconds * calls, _LAG)
        with activity_between(self._uuid) as activity:
            begin = time.perf_counter()
            done = _repeat(run, seconds * calls, _WINDOW)
            taken = time.perf_counter() - begin
            clock, power = self._clock(), self._power()
        counters = {name: getattr(activity, name) for name in _ACTIVITY}
        return {
            "steady_us": _micro(taken / done / calls),
            "activity": {name: round(value, 4) for name, value in counters.items() if value is not None},
            "clock": clock,
            "power_w": power,
        }

    def _power(self) -> float | None:
        """Return the present power in watts. The energy counter is updated too rarely for such short times."""
        try:
            handle = self._nvml.nvmlDeviceGetHandleByUUID(self._uuid)
            field = self._nvml.nvmlDeviceGetFieldValues(handle, [self._nvml.NVML_FI_DEV_POWER_INSTANT])[0]
            return float(field.value.uiVal) / 1000 if field.nvmlReturn == self._nvml.NVML_SUCCESS else None
        except Exception:  # no NVML, or a GPU that does not say
            return None

    def _clock(self) -> int | None:
        try:
            handle = self._nvml.nvmlDeviceGetHandleByUUID(self._uuid)
            return int(self._nvml.nvmlDeviceGetClockInfo(handle, self._nvml.NVML_CLOCK_SM))
        except Exception:  # no NVML, or a GPU that does not say
            return None


@contextlib.contextmanager
def rounding(call: dict[str, Any]) -> Iterator[None]:
    """Set TF32 as it was for the call, inside the `with`."""
    if "tf32" not in call:
        yield
        return
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = call["tf32"]
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


def _repeat(run: Callable[[], Any], taken: float, seconds: float) -> int:
    """Repeat a call of known duration for at least the given seconds, and return the number of repetitions."""
    torch.cuda.synchronize()
    begin, done = time.perf_counter(), 0
    while done <= round(seconds / taken) or time.perf_counter() - begin < seconds:
        run()
        done += 1
        if done % 16 == 0:
            torch.cuda.current_stream().synchronize()
    torch.cuda.synchronize()
    return done


def argument_sets(call: dict[str, Any]) -> int:
    if not runs_kernels(call):
        return 1
    whole = max(1, bytes_of([call["args"], call["kwargs"], call["outputs"]]))
    return max(1, min(max(_LEAST_SETS, min(_MOST_SETS, -(-_CACHE // whole))), MOST_BYTES // whole))


def captured(stream: Any, pool: Any, sets: Sequence[Any], calls: int) -> Any:
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        try:
            loop(sets, calls)
        finally:
            graph.capture_end()
    torch.cuda.synchronize()
    return graph


def loop(sets: Sequence[Any], calls: int) -> None:
    count = len(sets)
    for number in range(calls):
        operator, args, kwargs = sets[number % count]
        operator(*args, **kwargs)


def waits(call: dict[str, Any]) -> bool:
    """Whether the host waits for the GPU in a call, or copies to or from it."""
    name = call["operator"].split(".")[1]
    if name.startswith(_WAITS) and name != "linalg_vector_norm":
        return True
    indices = tensors_of(call["args"][1:2]) if name in ("index", "index_put_") else ()
    if any(index["dtype"] in ("bool", "uint8") for index in indices):
        return True
    if "attention_backward" in name and any(isinstance(value, float) and value > 0 for value in call["args"]):
        return True  # a graph takes the state of dropout, which is on the host, for one on the GPU
    large = [value for value in tensors_of(call["args"]) if value.get("cpu") and value["shape"]]
    return bool(large) or any(value.get("cpu") for value in call["outputs"] if isinstance(value, dict))


def _micro(seconds: float) -> float:
    return round(seconds * 1e6, 3)


def died_in(started: Path) -> dict[str, Any] | None:
    """Return the row of the call during which the last process died, named in the file `started` of `measured`.

    An empty file means that its writer was killed. Any other content raises `InvalidValue`.
    """
    if not started.exists() or not (text := started.read_text()):
        return None
    try:
        row = json.loads(text)
        return {"id": row["id"], "operator": row["operator"], "failed": "the process ended in this call"}
    except (ValueError, TypeError, KeyError):
        raise InvalidValue(f"{started} is needed to note the call at work, and holds something else: move it") from None


def measured(
    calls: Sequence[dict[str, Any]], every: int = EVERY, seconds: float | None = None, started: Path | None = None
) -> Iterator[dict[str, Any]]:
    """Yield a row for each call, with the GPU's counters for every Nth (0: none); stop after the given seconds.

    `started` is a file that names the call at work, until all are measured: a call may end the process.
    """
    timer = CallTimer()
    end = None if seconds is None else time.monotonic() + seconds
    gc.collect()
    gc.freeze()  # a graph must not be captured in the middle of a collection, which may free memory
    for number, call in enumerate(calls):
        if end is not None and time.monotonic() > end:
            break
        row: dict[str, Any] = {"id": identity(call), "operator": call["operator"]}
        if started is not None:
            started.write_text(json.dumps(row))
        try:
            row |= timer.measure(call, with_activity=every > 0 and number % every == 0)
        except (RuntimeError, AttributeError, TypeError, IndexError, ValueError, NotImplementedError) as error:
            row["failed"] = error_text(error)
            if not still_works():
                yield {**row, "call": packed(call)}
                raise
        if torch.cuda.memory_reserved() > _MOST_KEPT:
            timer.renew()
        yield {**row, "call": packed(call)}
    if started is not None:
        started.unlink(missing_ok=True)


def still_works() -> bool:
    try:
        torch.cuda.synchronize()
        return float(torch.ones(2, device="cuda").sum()) == 2.0
    except RuntimeError:
        return False
