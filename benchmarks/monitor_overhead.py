"""What the monitor costs: CPU time of a process that samples 8 GPUs, in percent of one core. The goal is under 1 %.

    python benchmarks/monitor_overhead.py [--seconds 30] [--interval 1] [--gpus 8] [--stand-in]

Where NVML answers, its GPUs are read; if there are fewer than 8, they are read several times a second by as many
sources with counters of their own, so the driver is called as often as for 8. Elsewhere a stand-in for NVML is read
(tests/monitor/fake_nvml.py), which has no driver below it: then the figure is what our own code costs, and says so.
"""

from __future__ import annotations

import argparse
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent / "src"), str(HERE.parent / "tests" / "monitor")]

from ullage.monitor.nvml_library import pynvml  # noqa: E402
from ullage.monitor.nvml_source import NvmlSource  # noqa: E402
from ullage.monitor.readings import Device, Reading, Source  # noqa: E402
from ullage.monitor.sampling import Monitor  # noqa: E402

GOAL = 1.0  # percent of one core


class Several:
    """Sources side by side, each with its own counters: one GPU read as often as many would be."""

    name, hint = "several", None

    def __init__(self, sources: list[Source]) -> None:
        self._sources = sources
        self._places: dict[str, tuple[Source, str]] = {}

    def devices(self) -> list[Device]:
        found = []
        for number, source in enumerate(self._sources):
            for device in source.devices():
                place = f"{number}:{device.id}"
                self._places[place] = (source, device.id)
                found.append(Device(place, len(found), device.name, device.total))
        return found

    def read(self, device_id: str) -> Reading:
        source, id = self._places[device_id]
        return source.read(id)

    def processes(self, device_id: str) -> dict[int, int | None] | None:
        source, id = self._places[device_id]
        return source.processes(id)

    def close(self) -> None:
        for source in self._sources:
            source.close()


def real_source(wanted: int) -> tuple[Source, str] | None:
    nvml = pynvml()
    try:
        nvml.nvmlInit()
        count = nvml.nvmlDeviceGetCount()
    except Exception:
        return None
    if count >= wanted:
        return NvmlSource(), f"NVML, {count} GPUs"
    times = -(-wanted // count)
    return Several(
        [NvmlSource() for _ in range(times)]
    ), f"NVML, {count} GPU(s) read {times} times: {times * count} GPUs"


def stand_in(wanted: int, processes: int) -> tuple[Source, str]:
    from fake_nvml import BUSY, GIB, FakeGpu, FakeNvml

    pids = [process.pid for process in psutil.process_iter()][-wanted * processes :]
    gpus = [
        FakeGpu(uuid=f"GPU-{number}", busy=dict(BUSY), compute={pid: GIB for pid in pids[number::wanted]})
        for number in range(wanted)
    ]
    nvml: Any = FakeNvml(gpus)
    return NvmlSource(nvml), f"a stand-in for NVML with {wanted} GPUs and no driver: what our own code costs, no more"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--interval", type=float, default=1.0)
    parser.add_argument("--gpus", type=int, default=8)
    parser.add_argument("--processes", type=int, default=2, help="on each GPU of the stand-in")
    parser.add_argument("--stand-in", action="store_true", help="also where there is a GPU")
    options = parser.parse_args()
    real = None if options.stand_in else real_source(options.gpus)
    source, about = real or stand_in(options.gpus, options.processes)
    monitor = Monitor(source, options.interval).start()
    time.sleep(options.interval)  # the first looks pay for imports and caches
    before, began, looks = (
        time.process_time(),
        time.perf_counter(),
        sum(len(monitor.window(d.id)) for d in monitor.devices()),
    )
    threading.Event().wait(options.seconds)
    used, elapsed = time.process_time() - before, time.perf_counter() - began
    looks = sum(len(monitor.window(device.id)) for device in monitor.devices()) - looks
    percent = 100 * used / elapsed
    print(f"source: {about}")
    print(f"{looks} readings in {elapsed:.1f} s, every {options.interval:g} s, windows of {monitor.seconds:g} s; "
          f"{len(psutil.pids())} processes on this machine, {os.cpu_count()} cores")  # fmt: skip
    print(
        f"CPU: {used * 1000:.0f} ms, {percent:.2f} % of one core (goal: under {GOAL:g} %); "
        f"failed looks: {monitor.failures}"
    )
    monitor.look()
    began = time.process_time()
    for _ in range(50):
        for device in monitor.devices():
            monitor.source.read(device.id)
            monitor.source.processes(device.id)
    each = (time.process_time() - began) / 50
    began = time.process_time()
    for device in monitor.devices():
        monitor.window(device.id).to_dict()
    print(f"one look at the {len(monitor.devices())} GPUs: {each * 1000:.2f} ms; "
          f"all windows with mean, percentiles and ages: {(time.process_time() - began) * 1000:.1f} ms")  # fmt: skip
    monitor.stop()
    sys.exit(0 if percent < GOAL else 1)


if __name__ == "__main__":
    main()
