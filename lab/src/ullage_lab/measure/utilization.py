"""Measure utilisation in a child: train while no other process works on the GPU, warm up, then count over a period.

Children make a first step, which loads kernels and allocates memory, at the same time; then each pauses until its turn.
A child uses CUDA only with leave to run: the next models are built on the CPU while one is read. Weights are random,
because power depends on their values.

A child may measure several runs, one after the other (`renew`). What PyTorch's allocator does is then the same as in a
fresh process; what NVML and the operating system say of the process is not, and is left out.

After the stretch some steps are made one by one, each begun when the GPU has nothing left to do: the time until all of
a step's kernels are launched is what the host needs for it. When the backward pass begins and ends is noted.

A run may be read several times, after a pause each. The reading with the middle step counts, and the host's time is
that of the reading with the middle one. Counters lag, and short readings miss some of it: what the GPU does for a step
does not change, so shares of time are those of the middle reading of share times step, and power is the mean of all.
"""

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ullage.errors import UllageError
from ullage.jobs import Model, train
from ullage.jobs.sources.build import prepare
from ullage.jobs.training import low_precision
from ullage.manager.monitor.host import LoadSince
from ullage.measuring.single_run import ProcessMemory
from ullage_lab.clean.schema import quartiles
from ullage_lab.measure.activity import ActivityBetween, activity_between
from ullage_lab.measure.memory import EnoughSteps, cheap_start, emptied, on_gpu, out_of_memory

LEAST_WARMING_TIME, MOST_WARMING = 0.15, 0.3  # seconds; the GPU's counters lag by a tenth
LEAST_WARMING = 3  # steps
WARMING_AGAIN = 0.1  # seconds, for a process that was read before
STEADY = 0.05  # two stretches of steps that differ by less are steady
LEAST_READ, LEAST_READ_AGAIN = 4, 3  # steps of one reading, and of each of several, unless they take longer together
MOST_READING = 4.0  # seconds
HOST_STEPS = 15
MOST_HOST = 0.3  # seconds, from the third of them on; readings share it
ENDLESS = 10**9
_OF_THE_PROCESS = ("nvml_ctx", "nvml_end", "ram_bytes")
_is_renewed = False
_HOST = ("host_s", "host_forward_s", "host_backward_s")
_SHARES = ("gract", "smact", "smocc", "drama", "tensor")
_OF_EACH = ("step_s", "host_s", *_SHARES, "power_w")


@dataclass
class PreparedUtilizationRun:
    """The model on the CPU, and the time to read."""

    configuration: Model
    made: Any
    seconds: float
    log: bool = False
    readings: int = 1


def prepare_utilization(order: dict[str, Any]) -> PreparedUtilizationRun:
    configuration = Model.from_row(order)
    with cheap_start():
        made = prepare(configuration)
    return PreparedUtilizationRun(
        configuration, made, float(order.get("seconds", 1.0)), bool(order.get("raw")), int(order.get("readings", 1))
    )


class Reading:
    """A reading, called after every step: it warms up, counts for some seconds, times the host, and ends the loop."""

    def __init__(
        self, seconds: float, uuid: str, pause: Callable[[], None], log: bool = False, readings: int = 1
    ) -> None:
        self.seconds, self.uuid, self.pause, self.log, self.readings = seconds, uuid, pause, log, readings
        self.warm_steps = 0
        self.stack = contextlib.ExitStack()
        self.began = self.last = self.first = time.perf_counter()
        self._done: list[dict[str, Any]] = []  # finished readings
        self._last_backward = 0.0
        self._clear()

    def _clear(self) -> None:
        self.activity: ActivityBetween | None = None
        self._times: list[float] = []  # of warm steps
        self._ends: list[float] = []  # of steps that count
        self._hosts: list[tuple[float, float, float]] = []  # a step, until its last backward pass, backward passes
        self._waited = self._backward = 0.0
        self._cpu, self._load = 0.0, LoadSince()
        self.host_busy: float | None = None
        self.host_stolen: float | None = None
        self.ended: float | None = None
        self.ram: int | None = None
        self.cpu_percent: float | None = None

    def __call__(self) -> None:
        now = time.perf_counter()
        if self.log:
            print(f"{'warming' if self.activity is None else 'reading'} {now:.6f}")
        if self.activity is None:
            self._warm(now)
        elif self.ended is None:
            self._ends.append(now)
            taken = now - self.began
            least = LEAST_READ if self.readings == 1 else LEAST_READ_AGAIN
            if taken >= self.seconds and (len(self._ends) >= least or taken > MOST_READING):
                self._end()
        else:
            self._time_host(now)

    def _time_host(self, now: float) -> None:
        until = max(0.0, self._last_backward - self.last - self._backward)
        self._hosts.append((now - self.last - self._waited, until, self._backward))
        torch.cuda.synchronize()
        taken = time.perf_counter() - self.ended  # type: ignore[operator]
        enough = len(self._hosts) >= 3 and taken > MOST_HOST / self.readings
        if not enough and len(self._hosts) < HOST_STEPS:
            self._begin_host_step()
            return
        self._done.append(self._read())
        if len(self._done) == self.readings:
            raise EnoughSteps
        self._clear()
        self.warm_steps = 1
        self._begin_turn()

    def _begin_turn(self) -> None:
        self.pause()
        self.first = self.last = time.perf_counter()

    def _begin_host_step(self) -> None:
        self._waited = self._backward = 0.0
        self.last = self._last_backward = time.perf_counter()

    def note_backward(self, began: float, ended: float) -> None:
        """Note a backward pass, which ends when its kernels are launched."""
        self._backward += ended - began
        self._last_backward = ended

    def wait_for_gpu(self) -> None:
        """Record a wait of a step for the GPU: that time is not the host's."""
        if self.ended is not None:
            begin = time.perf_counter()
            torch.cuda.synchronize()
            self._waited += time.perf_counter() - begin

    def _warm(self, now: float) -> None:
        """Count a warm-up step, and begin to measure when steps are steady; each waits for the step before."""
        self.warm_steps += 1
        if self.warm_steps == 1:  # the first one loads kernels and chooses algorithms
            torch.cuda.synchronize()
            self._begin_turn()
            return
        self._times.append(now - self.last)
        self.last = now
        most = WARMING_AGAIN if self._done else MOST_WARMING
        if self.warm_steps >= LEAST_WARMING and (self._steady() or now - self.first > most):
            torch.cuda.synchronize()
            self.activity = self.stack.enter_context(activity_between(self.uuid))
            self._cpu, self._load = time.process_time(), LoadSince()
            self.began = time.perf_counter()

    def _steady(self) -> bool:
        half = len(self._times) // 2
        if half < 5:
            return False
        before, after = sum(self._times[-2 * half : -half]), sum(self._times[-half:])
        return sum(self._times) > LEAST_WARMING_TIME and abs(after - before) <= STEADY * before

    def _end(self) -> None:
        import psutil

        torch.cuda.synchronize()
        self.ended = time.perf_counter()
        self.host_busy, self.host_stolen = self._load.read()
        self.cpu_percent = 100 * (time.process_time() - self._cpu) / (self.ended - self.began)
        self.stack.close()
        self.ram = int(psutil.Process().memory_info().rss)
        self._begin_host_step()

    def figures(self) -> dict[str, Any]:
        """Return the figures of the reading; `None` is unknown."""
        if not self._done and self.ended is not None:
            self._done.append(self._read())
        return of_readings(self._done) if self._done else {}

    def _read(self) -> dict[str, Any]:
        if self.activity is None or self.ended is None:
            return {}
        activity, taken, steps = self.activity, self.ended - self.began, len(self._ends)
        between = [end - begin for begin, end in zip([self.began, *self._ends], self._ends, strict=False)]
        energy = activity.energy_j
        return {
            "step_s": round(taken / steps, 6),
            "steps": steps,
            **dict(zip(("step_q1", "step_median", "step_q3"), quartiles(between), strict=True)),
            **self._host_figures(),
            "warm_steps": self.warm_steps,
            "read_s": round(taken, 3),
            **{name: _rounded(getattr(activity, name)) for name in ("gract", "smact", "smocc", "drama", "tensor")},
            "power_w": _rounded(activity.power_w, 1),
            "energy_step_j": None if energy is None else round(energy / steps, 6),
            "clock_mhz": _rounded(activity.clock_mhz, 0),
            "pcie_rx": _rounded(activity.pcie_rx_bps, 0),
            "pcie_tx": _rounded(activity.pcie_tx_bps, 0),
            "cpu_percent": _rounded(self.cpu_percent, 1),
            "host_busy": _rounded(self.host_busy, 2),
            "host_stolen": _rounded(self.host_stolen),
            "ram_bytes": self.ram,
            **({"unknown_because": activity.unknown_because} if activity.unknown_because else {}),
        }

    def _host_figures(self) -> dict[str, Any]:
        """Return the host's time for a step, with its parts for the forward and the backward pass."""
        if not self._hosts:
            return {"host_s": None}
        parts = zip(*self._hosts, strict=True)
        return {name: quartiles(several)[1] for name, several in zip(_HOST, parts, strict=True)}


def of_readings(several: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the figures of a run that was read several times, and the most important ones of each reading.

    >>> each = [{"step_s": 3.0, "smact": 0.2}, {"step_s": 1.0, "smact": 0.6}, {"step_s": 2.0, "smact": 0.4}]
    >>> of_readings(each)
    {'step_s': 2.0, 'smact': 0.3, 'readings': {'step_s': [3.0, 1.0, 2.0], 'smact': [0.2, 0.6, 0.4]}}
    """
    merged = dict(_middle(several, "step_s"))
    if len(several) == 1:
        return merged
    by_host = _middle(several, "host_s")
    merged |= {name: by_host[name] for name in _HOST if name in by_host}
    for name in (*_SHARES, "power_w"):
        read = [one for one in several if one.get(name) is not None]
        if read and name == "power_w":
            merged[name] = round(statistics.fmean(one[name] for one in read), 1)
        elif read:
            merged[name] = round(statistics.median(one[name] * one["step_s"] for one in read) / merged["step_s"], 4)
    return merged | {"readings": {name: [one[name] for one in several] for name in _OF_EACH if name in several[0]}}


def _middle(several: Sequence[dict[str, Any]], name: str) -> dict[str, Any]:
    known = [one for one in several if one.get(name) is not None] or list(several)
    return sorted(known, key=lambda one: one.get(name) or 0.0)[(len(known) - 1) // 2]


@contextlib.contextmanager
def passes_noted(reading: Reading) -> Iterator[None]:
    """Notify the reading of backward passes, and before a GradScaler waits for the GPU.

    The scaler asks the GPU whether gradients are finite.
    """
    step, backward = torch.amp.GradScaler._maybe_opt_step, torch.Tensor.backward

    def stepping(self: torch.amp.GradScaler, *args: Any, **options: Any) -> float | None:
        reading.wait_for_gpu()
        return step(self, *args, **options)

    def going_back(self: torch.Tensor, *args: Any, **options: Any) -> None:
        began = time.perf_counter()
        backward(self, *args, **options)
        reading.note_backward(began, time.perf_counter())

    torch.amp.GradScaler._maybe_opt_step = stepping  # type: ignore[method-assign]
    torch.Tensor.backward = going_back  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.amp.GradScaler._maybe_opt_step = step  # type: ignore[method-assign]
        torch.Tensor.backward = backward  # type: ignore[method-assign]


def run_utilization(prepared: PreparedUtilizationRun, pause: Callable[[], None] = lambda: None) -> dict[str, Any]:
    """Train until the reading is finished; also read memory."""
    began = time.perf_counter()
    torch.cuda.synchronize()
    nvml = ProcessMemory(torch.cuda.get_device_properties(0).uuid)
    figures: dict[str, Any] = {"nvml_ctx": nvml.read()}
    reading = Reading(prepared.seconds, nvml.uuid, pause, prepared.log, prepared.readings)
    (model, task), prepared.made = prepared.made, None
    try:
        made = on_gpu(model, low_precision(prepared.configuration), drawn=True), task
        with passes_noted(reading):
            train(prepared.configuration, ENDLESS, after_iteration=reading, prepared=made)
    except EnoughSteps:
        pass
    except torch.OutOfMemoryError as error:
        figures |= out_of_memory(error)
    finally:
        reading.stack.close()
    figures |= reading.figures()
    if figures.get("gract", 0) is None:
        figures["gpu_percent"] = nvml.gpu_percent()
    statistics = torch.cuda.memory_stats()
    figures |= {
        "nvml_end": nvml.read(),
        "end_reserved": torch.cuda.memory_reserved(),
        "peak_alloc": statistics["allocated_bytes.all.peak"],
        "peak_reserved": statistics["reserved_bytes.all.peak"],
        "retries": statistics["num_alloc_retries"],
        "wall_s": round(time.perf_counter() - began, 3),
    }
    return {name: value for name, value in figures.items() if not (_is_renewed and name in _OF_THE_PROCESS)}


def renew() -> None:
    """Free the memory of a run, so that the next one in this process starts with an empty allocator."""
    global _is_renewed
    _is_renewed = True
    if not emptied():
        raise UllageError(f"{torch.cuda.memory_reserved()} bytes of an earlier run are still there")


def _rounded(value: float | None, digits: int = 4) -> float | None:
    return None if value is None else round(value, digits)
