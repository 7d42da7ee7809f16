"""The monitor over sources that a test makes good, bad, slow and lost."""

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest

from ullage.errors import DeviceLost, InvalidValue, UnknownName
from ullage.manager.monitor.host import HostWatch
from ullage.manager.monitor.readings import Device, GPUReading
from ullage.manager.monitor.sampling import Monitor, snapshot


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Told:
    """A source whose readings a test tells, one after another; an exception among them is raised."""

    tell: dict[str, Iterator[GPUReading | Exception]]
    held: dict[str, dict[int, int | None] | None] = field(default_factory=dict)
    name: str = "told"
    hint: str | None = None
    rates: dict[str, float] = field(default_factory=dict)
    closed: bool = False
    reads: int = 0

    def devices(self) -> list[Device]:
        return [Device(id, number, "a GPU", 1 << 30) for number, id in enumerate(self.tell)]

    def read(self, device_id: str) -> GPUReading:
        self.reads += 1
        found = next(self.tell[device_id])
        if isinstance(found, Exception):
            raise found
        return found

    def processes(self, device_id: str) -> dict[int, int | None] | None:
        return self.held.get(device_id, {})

    def close(self) -> None:
        self.closed = True


def readings(*shares: float | None) -> list[GPUReading | Exception]:
    return [GPUReading(0.0, smact=share) for share in shares]


def test_the_window_slides_and_its_mean_skips_unknown_values() -> None:
    clock = Clock()
    monitor = Monitor(Told({"a": iter(readings(0.9, 0.1, None, 0.3, 0.5))}), interval=1, window=3, clock=clock)
    for second in range(5):
        clock.now = float(second)
        monitor.look()
    window = monitor.window("a")
    assert (len(window), window.count("smact"), window.mean("smact")) == (4, 3, pytest.approx(0.3))
    assert (window.mean("drama"), window.age("drama")) == (None, None)
    clock.now = 6.5
    assert (monitor.window("a").age("smact"), len(monitor.window("a"))) == (2.5, 1)
    clock.now = 60.0
    assert (len(monitor.window("a")), monitor.window("a").mean("smact")) == (0, None), "what is old is unknown"


def test_the_newest_known_value_may_be_older_than_the_reading() -> None:
    clock = Clock()
    monitor = Monitor(Told({"a": iter(readings(0.9, None))}), clock=clock)
    monitor.look()
    clock.now = 1.0
    monitor.look()
    clock.now = 1.25
    assert (monitor.window("a").age(), monitor.window("a").age("smact")) == (0.25, 1.25)


def test_a_repeated_value_counts_once_and_has_its_own_age() -> None:
    clock = Clock()
    told = [GPUReading(0.0, temperature_c=40), GPUReading(0.0, temperature_c=40, ages={"temperature_c": 1.0})]
    monitor = Monitor(Told({"a": iter([*told, GPUReading(0.0, temperature_c=50)])}), clock=clock)
    for second in range(3):
        clock.now = float(second)
        monitor.look()
        if second == 1:
            clock.now = 1.5
            assert monitor.window("a").age("temperature_c") == 1.5
    window = monitor.window("a")
    assert (len(window), window.count("temperature_c"), window.mean("temperature_c")) == (3, 2, 45.0)


def test_processes_are_listed_soon_after_memory_moved_or_rarely() -> None:
    clock = Clock()
    used = [10, 10, 10, 12, 12, 12, 12, 12, 12, 12]
    source = Told({"a": iter([GPUReading(0.0, memory_used=bytes) for bytes in used])}, held={"a": {7: 10}})
    source.rates = {"processes": 5.0, "processes moving": 2.0}
    monitor = Monitor(source, clock=clock)
    seen = []
    for second in range(10):
        clock.now = float(second)
        if second == 3:
            source.held["a"] = {7: 12}
        monitor.look()
        seen.append((monitor.processes_age("a"), (monitor.processes("a") or {})[7]))
    ages, memory = zip(*seen, strict=True)
    assert ages == (0, 1, 2, 0, 1, 2, 3, 4, 0, 1)
    assert memory == (10, 10, 10, 12, 12, 12, 12, 12, 12, 12)


def test_processes_are_always_listed_if_memory_is_unknown() -> None:
    clock = Clock()
    source = Told({"a": iter(readings(0.1, 0.1))}, held={"a": {7: 10}}, rates={"processes": 5.0})
    monitor = Monitor(source, clock=clock)
    monitor.look()
    clock.now, source.held["a"] = 1.0, {7: 11}
    monitor.look()
    assert monitor.processes("a") == {7: 11}


def test_a_failed_look_is_counted_and_the_next_one_comes() -> None:
    told = iter([*readings(0.1), RuntimeError("the driver hiccups"), *readings(0.3)])
    monitor = Monitor(Told({"a": told, "b": iter(readings(0.5, 0.5, 0.5))}))
    for _ in range(3):
        monitor.look()
    assert (monitor.failures, monitor.last_error) == (1, "RuntimeError: the driver hiccups")
    assert (len(monitor.window("a")), len(monitor.window("b"))) == (2, 3)


def test_lost_gpu_is_unknown_until_it_is_listed_and_read_again() -> None:
    clock = Clock()
    told = iter([*readings(0.1), DeviceLost("a", "GPU is lost"), *readings(0.7)])
    source = Told({"a": told}, held={"a": {42: 7}})
    monitor = Monitor(source, clock=clock)
    monitor.look()
    assert (monitor.lost("a"), monitor.processes("a")) == (None, {42: 7})
    clock.now = 1.0
    monitor.look()
    assert monitor.lost("a") == "GPU is lost"
    assert (monitor.latest("a"), monitor.processes("a"), len(monitor.window("a"))) == (None, None, 0)
    clock.now = 2.0
    monitor.look()
    assert source.reads == 2, "it is not asked again at every look"
    clock.now = 20.0
    monitor.look()
    assert monitor.lost("a") is None
    latest = monitor.latest("a")
    assert latest is not None and latest.smact == 0.7


def test_a_device_that_is_not_listed_any_more_is_lost() -> None:
    clock = Clock()
    source = Told({"a": iter(readings(0.1, 0.1)), "b": iter(readings(0.2, 0.2))})
    monitor = Monitor(source, clock=clock)
    monitor.look()
    del source.tell["b"]
    clock.now = 20.0
    monitor.look()
    assert "not listed" in str(monitor.lost("b"))
    assert [device.id for device in monitor.devices()] == ["a", "b"]


def test_the_thread_survives_failures_and_ends_on_request() -> None:
    enough = threading.Event()

    def endless() -> Iterator[GPUReading | Exception]:
        for number in range(10_000):
            if number == 5:
                enough.set()
            yield RuntimeError("every third") if number % 3 == 0 else GPUReading(0.0, smact=0.5)

    source = Told({"a": endless()})
    with Monitor(source, interval=0.05, window=10) as monitor:
        assert enough.wait(60)
        with pytest.raises(InvalidValue, match="already"):
            monitor.start()
    reads = source.reads
    assert monitor.failures >= 2
    assert monitor.window("a").mean("smact") == 0.5
    assert source.closed
    assert not [thread for thread in threading.enumerate() if thread.name == "ullage monitor"]
    assert source.reads == reads


def test_a_hanging_source_shows_its_age_and_blocks_no_exit() -> None:
    release, hanging = threading.Event(), threading.Event()

    def slow() -> Iterator[GPUReading | Exception]:
        yield GPUReading(0.0, smact=0.5)
        hanging.set()
        release.wait(60)
        yield GPUReading(0.0, smact=0.5)

    monitor = Monitor(Told({"a": slow()}), interval=0.05, window=10).start()
    assert hanging.wait(60)
    before = monitor.window("a").age()
    deadline = time.monotonic() + 60
    while before is not None and monitor.window("a").age() == before:
        assert time.monotonic() < deadline
    monitor.stop(patience=0.05)
    release.set()


def test_wrong_names_and_intervals_are_refused_with_valid_ones() -> None:
    monitor = Monitor(Told({"GPU-a": iter(readings(0.1))}))
    monitor.look()
    with pytest.raises(UnknownName, match="GPU-a"):
        monitor.latest("GPU-b")
    with pytest.raises(UnknownName, match="smact"):
        monitor.window("GPU-a").mean("smatc")
    with pytest.raises(InvalidValue, match="0.05 s"):
        Monitor(monitor.source, interval=0.001)


# Processes on the host.

BUSY_CHILD = "import os, sys\nif os.fork() == 0:\n    while True: pass\nprint('ready', flush=True)\nsys.stdin.read()\n"


@pytest.fixture
def parent_of_a_busy_child() -> Iterator[subprocess.Popen[bytes]]:
    job = subprocess.Popen(
        [sys.executable, "-c", BUSY_CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
    )
    assert job.stdout is not None and job.stdout.readline() == b"ready\n"
    yield job
    subprocess.run(["kill", "-9", "--", f"-{job.pid}"], check=True)
    job.wait()


def eventually(what: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not what():
        assert time.monotonic() < deadline, "it did not come in time"


def test_cpu_and_ram_are_of_the_whole_tree(parent_of_a_busy_child: subprocess.Popen[bytes]) -> None:
    pid = parent_of_a_busy_child.pid
    watch = HostWatch()
    first = watch.look([pid])[pid]
    assert (first.processes, first.cpu) == (2, None), "one look is no rate"
    assert first.ram is not None and first.ram > 1 << 20
    assert first.command is not None and "os.fork" in first.command
    eventually(lambda: (watch.look([pid])[pid].cpu or 0.0) > 0.05)


def test_a_process_that_is_not_there_is_left_out() -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    assert HostWatch().look([ended.pid]) == {}


def test_the_monitor_reads_watched_processes_and_those_on_gpus(
    parent_of_a_busy_child: subprocess.Popen[bytes],
) -> None:
    pid, clock = parent_of_a_busy_child.pid, Clock()
    other = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        source = Told({"a": iter(readings(0.1, 0.1))}, held={"a": {pid: 1, 999_999_999: 2}})
        monitor = Monitor(source, clock=clock, host_interval=1.0)
        monitor.follow([other.pid])
        monitor.look()
        seen = [monitor.host(one) for one in (pid, other.pid, 999_999_999)]
        assert [reading and reading.processes for reading in seen] == [2, 1, None]
        assert [each["pid"] for each in snapshot(monitor)["gpus"][0]["processes"]] == [999_999_999, pid]
    finally:
        other.communicate(b"\n")
