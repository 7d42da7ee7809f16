"""The monitor: a thread that reads every GPU regularly, and the window of its latest readings."""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from types import TracebackType
from typing import Any

from ullage.errors import DeviceLost, InvalidValue, UnknownName
from ullage.manager.monitor.host import HostReading, HostWatch
from ullage.manager.monitor.readings import FIELDS, RATES, Device, GPUReading, Source, due


class Window:
    """The readings of a sliding window: means and ages by field, `None` if unknown.

    `looks` are pairs of a time and a reading, oldest first, and `now` is a time of the same clock. A mean leaves out
    unknown values; `count` is the number of values in it. Late readings count as much as punctual ones. A repeated
    value counts once, in the reading that measured it.

    >>> readings = [GPUReading(0.0, smact=0.2), GPUReading(1.0, smact=0.6), GPUReading(2.0)]
    >>> window = Window([(reading.time, reading) for reading in readings], now=3.0)
    >>> window.mean("smact"), window.count("smact"), window.age("smact"), window.mean("drama")
    (0.4, 2, 2.0, None)
    """

    def __init__(self, looks: Sequence[tuple[float, GPUReading]], now: float) -> None:
        self._looks, self._now = looks, now

    def __len__(self) -> int:
        return len(self._looks)

    def values(self, field: str) -> list[float]:
        """Return the known values of a field, oldest first."""
        if field not in FIELDS:
            raise UnknownName("field of a reading", field, FIELDS)
        values = (getattr(reading, field) for _, reading in self._looks if field not in reading.ages)
        return [value for value in values if value is not None]

    def count(self, field: str) -> int:
        return len(self.values(field))

    def mean(self, field: str) -> float | None:
        values = self.values(field)
        return sum(values) / len(values) if values else None

    def age(self, field: str | None = None) -> float | None:
        """Return the seconds since the newest reading, or since the newest known value of `field`."""
        for moment, reading in reversed(self._looks):
            if field is None or getattr(reading, field) is not None:
                return max(0.0, self._now - moment) + (reading.ages.get(field, 0.0) if field else 0.0)
        return None


@dataclass(frozen=True)
class _Held:
    """The processes of a GPU at a time, and its used memory then."""

    moment: float
    used: int | None
    by_pid: dict[int, int | None] | None


class Monitor:
    """Samples a source at an interval over a sliding window, in its own thread.

        with Monitor(best_source(), interval=1.0, window=90.0) as monitor:
            ...
            monitor.window(gpu).mean("smact"), monitor.processes(gpu), monitor.host(pid)

    No error of a source stops the monitor: it counts failures (`failures`, `last_error`), keeps its interval after late
    readings, and calls a GPU that does not answer `lost` until it is listed and read again. Its values are then
    unknown. Every `host_interval` seconds, it reads CPU and RAM of processes on GPUs and those in `follow`.
    """

    def __init__(
        self,
        source: Source,
        interval: float = 1.0,
        window: float = 90.0,
        host_interval: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if not 0.05 <= interval <= window:
            raise InvalidValue(f"interval must be from 0.05 s to the window's {window:g} s, got {interval:g} s")
        self.source, self.interval, self.seconds = source, interval, window
        self.failures = 0
        self.last_error: str | None = None
        self._host_interval, self._clock = host_interval, clock
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._devices: dict[str, Device] = {}
        self._looks: dict[str, deque[tuple[float, GPUReading]]] = {}
        self._held: dict[str, _Held] = {}
        self._lost: dict[str, str] = {}
        self._watch = HostWatch(clock)
        self._hosts: dict[int, HostReading] = {}
        self._followed: set[int] = set()
        self._listed: float | None = None
        self._next_host = clock()

    # The latest readings.

    def devices(self) -> list[Device]:
        """Return all devices ever listed, cards before their MIG instances."""
        with self._lock:
            return list(self._devices.values())

    def lost(self, device_id: str) -> str | None:
        """Return why a device is lost; `None` if it answers."""
        with self._lock:
            self._check(device_id)
            return self._lost.get(device_id)

    def latest(self, device_id: str) -> GPUReading | None:
        """Return the newest reading; `None` before the first one and for a lost device."""
        with self._lock:
            looks = self._known_looks(device_id)
            return looks[-1][1] if looks else None

    def window(self, device_id: str, seconds: float | None = None) -> Window:
        """Return the readings of the last `seconds`, by default of the monitor's window."""
        with self._lock:
            now = self._clock()
            looks = self._known_looks(device_id)
            oldest = now - min(self.seconds, seconds or self.seconds)
            return Window([look for look in looks if look[0] >= oldest], now)

    def processes(self, device_id: str) -> dict[int, int | None] | None:
        """Return bytes by pid when they were last listed; `None` if unknown."""
        with self._lock:
            self._check(device_id)
            held = self._held.get(device_id)
            return None if held is None or held.by_pid is None else dict(held.by_pid)

    def processes_age(self, device_id: str) -> float | None:
        """Return the seconds since the processes were listed; `None` if unknown."""
        with self._lock:
            self._check(device_id)
            held = self._held.get(device_id)
            return None if held is None or held.by_pid is None else max(0.0, self._clock() - held.moment)

    def host(self, pid: int) -> HostReading | None:
        """Return CPU and RAM of a process and its descendants; `None` if the last reading missed it."""
        with self._lock:
            return self._hosts.get(pid)

    def follow(self, pids: Iterable[int]) -> None:
        """Set the processes whose CPU and RAM are read in addition to those on GPUs."""
        with self._lock:
            self._followed = set(pids)

    # The sampling thread.

    def start(self) -> "Monitor":
        """List the devices, read them once, and continue in a thread."""
        if self._thread is not None:
            raise InvalidValue("the monitor is already running")
        self._list()
        self.look()
        self._stop.clear()
        self._thread = threading.Thread(target=self._run, name="ullage monitor", daemon=True)
        self._thread.start()
        return self

    def stop(self, patience: float = 5.0) -> None:
        """End the thread and close the source, unless it hangs longer than `patience` seconds."""
        self._stop.set()
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join(patience)
            if thread.is_alive():
                return
        self.source.close()

    def look(self) -> None:
        """Read everything that is due, as the thread does."""
        now = self._clock()
        rate = self.source.rates.get("devices", RATES["devices"])
        if due(rate, None if self._listed is None else now - self._listed):
            self._guarded(self._list)
        for device in self.devices():
            self._guarded(partial(self._look_at, device))
        if now >= self._next_host:
            self._next_host = now + self._host_interval
            self._guarded(self._look_at_hosts)

    def __enter__(self) -> "Monitor":
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _run(self) -> None:
        due = self._clock() + self.interval
        while not self._stop.wait(max(0.0, due - self._clock())):
            self.look()
            missed = max(0, int((self._clock() - due) / self.interval))
            due += self.interval * (missed + 1)

    def _guarded(self, step: Callable[[], None]) -> None:
        try:
            step()
        except Exception as error:  # whatever a driver or a library raises, the thread goes on
            with self._lock:
                self.failures += 1
                self.last_error = f"{type(error).__name__}: {error}"

    def _list(self) -> None:
        self._listed = self._clock()
        listed = {device.id: device for device in self.source.devices()}
        with self._lock:
            for id in self._devices:
                if id not in listed:
                    self._lose(id, "it is not listed any more")
            for id in listed:
                self._lost.pop(id, None)
            self._devices = {**listed, **{id: old for id, old in self._devices.items() if id not in listed}}

    def _look_at(self, device: Device) -> None:
        with self._lock:
            if device.id in self._lost:
                return
        try:
            reading = self.source.read(device.id)
            moment = self._clock()
            held = self._held_now(device.id, reading.memory_used, moment)
        except DeviceLost as lost:
            with self._lock:
                self._lose(device.id, lost.reason)
            return
        with self._lock:
            looks = self._looks.setdefault(device.id, deque())
            looks.append((moment, reading))
            while looks[0][0] < moment - self.seconds:
                looks.popleft()
            self._held[device.id] = held

    def _held_now(self, device_id: str, used: int | None, moment: float) -> _Held:
        """Return the processes, read again if due; they are due sooner after a change of used memory."""
        old, rates = self._held.get(device_id), self.source.rates
        if old is not None and used is not None:
            rate = rates.get("processes" if used == old.used else "processes moving", 0.0)
            if not due(rate, moment - old.moment):
                return old
        return _Held(moment, used, self.source.processes(device_id))

    def _lose(self, device_id: str, reason: str) -> None:
        self._lost.setdefault(device_id, reason)
        self._looks.pop(device_id, None)
        self._held.pop(device_id, None)

    def _look_at_hosts(self) -> None:
        with self._lock:
            pids = self._followed.union(*(held.by_pid for held in self._held.values() if held.by_pid))
        readings = self._watch.look(sorted(pids))
        with self._lock:
            self._hosts = readings

    def _known_looks(self, device_id: str) -> deque[tuple[float, GPUReading]]:
        self._check(device_id)
        return self._looks.get(device_id) or deque()

    def _check(self, device_id: str) -> None:
        if device_id not in self._devices:
            raise UnknownName("GPU", device_id, self._devices)


def snapshot(monitor: Monitor) -> dict[str, Any]:
    """Return the newest readings of every device with its processes, ready for JSON.

    Keys: `time`, `source`, `hint`, `failures` and `gpus`. A GPU has the fields of `Device` and `GPUReading`, `lost`
    (why, or `None`), `age` in seconds, `ages` of repeated values, `processes` (or `None`) and `processes_age`.
    """
    return {
        "time": time.time(),
        "source": monitor.source.name,
        "hint": monitor.source.hint,
        "failures": monitor.failures,
        "gpus": [_gpu(monitor, device) for device in monitor.devices()],
    }


def _gpu(monitor: Monitor, device: Device) -> dict[str, Any]:
    values = asdict(monitor.latest(device.id) or GPUReading(time=0.0))
    del values["time"]
    window = monitor.window(device.id)
    ages = {field: window.age(field) for field in values.pop("ages")}
    total = values.pop("memory_total")
    shown = ("id", "index", "name", "mig", "parent", "divided")
    return {
        **{name: getattr(device, name) for name in shown},
        "lost": monitor.lost(device.id),
        "age": window.age(),
        "ages": ages,
        **values,
        "memory_total": device.total if total is None else total,
        "processes": _processes(monitor, device.id),
        "processes_age": monitor.processes_age(device.id),
    }


def _processes(monitor: Monitor, device_id: str) -> list[dict[str, Any]] | None:
    """Return the processes, most memory first; `None` if unknown."""
    held = monitor.processes(device_id)
    rows = []
    for pid, memory in sorted((held or {}).items(), key=lambda item: -(item[1] or 0)):
        host = monitor.host(pid)
        about = {name: getattr(host, name, None) for name in ("user", "cpu", "ram", "command")}
        rows.append({"pid": pid, "memory": memory, **about})
    return None if held is None else rows
