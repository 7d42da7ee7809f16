"""What the monitor costs: CPU time of a process that samples 8 GPUs, in percent of one core. The goal is under 1%.

    python benchmarks/speed/monitor_overhead.py [--seconds 30] [--stand-in]

It prints what each call of NVML took in that time, and then what each call takes alone, those among them that could
take another's place.

Where NVML answers, its GPUs are read; if there are fewer than 8, they are read several times a second by as many
sources with counters of their own, so the driver is called as often as for 8. Elsewhere a stand-in for NVML is read
(tests/manager/monitor/fake_nvml.py), without a driver below it: then the figure is the cost of Ullage's own code, and
the output says so.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1] / "src"), str(HERE.parents[1] / "tests" / "manager" / "monitor")]

from ullage.hardware.local import pynvml  # noqa: E402
from ullage.manager.monitor.nvml import NvmlSource  # noqa: E402
from ullage.manager.monitor.readings import FIELDS, Device, GPUReading, Source  # noqa: E402
from ullage.manager.monitor.sampling import Monitor  # noqa: E402

GOAL = 1.0  # percent of one core
GPUS, PROCESSES, INTERVAL = 8, 2, 1.0  # processes on each GPU of the stand-in; seconds between readings
CALLS: dict[str, tuple[int, float]] = {}  # how often each function of NVML was called, and its processor time


class Timed:
    """A module whose functions' processor time is added up."""

    def __init__(self, module: Any) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._module, name)
        if not name.startswith("nvml") or not callable(value) or isinstance(value, type):
            return value

        def timed(*args: Any) -> Any:
            began = time.thread_time()
            try:
                return value(*args)
            finally:
                count, seconds = CALLS.get(name, (0, 0.0))
                CALLS[name] = (count + 1, seconds + time.thread_time() - began)

        setattr(self, name, timed)
        return timed


class Several:
    """Sources side by side, each with its own counters: one GPU read as often as many would be."""

    name, hint = "several", None

    def __init__(self, sources: list[Source]) -> None:
        self._sources, self.rates = sources, sources[0].rates
        self._places: dict[str, tuple[Source, str]] = {}

    def devices(self) -> list[Device]:
        devices = []
        for number, source in enumerate(self._sources):
            for device in source.devices():
                place = f"{number}:{device.id}"
                self._places[place] = (source, device.id)
                devices.append(Device(place, len(devices), device.name, device.total))
        return devices

    def read(self, device_id: str) -> GPUReading:
        source, id = self._places[device_id]
        return source.read(id)

    def processes(self, device_id: str) -> dict[int, int | None] | None:
        source, id = self._places[device_id]
        return source.processes(id)

    def close(self) -> None:
        for source in self._sources:
            source.close()


def real_source() -> tuple[Source, str] | None:
    nvml = pynvml()
    try:
        nvml.nvmlInit()
        count = nvml.nvmlDeviceGetCount()
    except Exception:
        return None
    if count >= GPUS:
        return NvmlSource(Timed(nvml)), f"NVML, {count} GPUs"
    times = -(-GPUS // count)
    about = f"NVML, {count} GPU(s) read {times} times: {times * count} GPUs"
    return Several([NvmlSource(Timed(nvml)) for _ in range(times)]), about


def stand_in() -> tuple[Source, str]:
    from fake_nvml import BUSY, GIB, FakeGpu, FakeNvml

    pids = psutil.pids()[-GPUS * PROCESSES :]
    gpus = [
        FakeGpu(uuid=f"GPU-{number}", busy=dict(BUSY), compute=dict.fromkeys(pids[number::GPUS], GIB))
        for number in range(GPUS)
    ]

    class Metered(FakeNvml):
        def nvmlDeviceGetTotalEnergyConsumption(self, gpu: FakeGpu) -> int:
            return super().nvmlDeviceGetTotalEnergyConsumption(gpu) + int(gpu.power_mw * time.monotonic())

    nvml: Any = Metered(gpus)
    about = f"a stand-in for NVML with {GPUS} GPUs and no driver: what our own code costs, no more"
    return NvmlSource(Timed(nvml)), about


def alone(times: int = 20) -> None:
    """What each call takes by itself on the first GPU: what is read, and what could be read instead."""
    nvml = pynvml()
    nvml.nvmlInit()
    gpu = nvml.nvmlDeviceGetHandleByIndex(0)
    samples = [nvml.nvmlGpmSampleAlloc() for _ in range(2)]
    request = nvml.c_nvmlGpmMetricsGet_t()
    request.version, request.numMetrics = nvml.NVML_GPM_METRICS_GET_VERSION, 7
    for place, metric in enumerate((1, 2, 3, 5, 10, 20, 21)):
        request.metrics[place].metricId = metric
    fields = {
        "energy": nvml.NVML_FI_DEV_TOTAL_ENERGY_CONSUMPTION,
        "power": nvml.NVML_FI_DEV_POWER_INSTANT,
        "PCIe in": nvml.NVML_FI_DEV_PCIE_COUNT_RX_BYTES,
        "PCIe out": nvml.NVML_FI_DEV_PCIE_COUNT_TX_BYTES,
    }

    def metrics(count: int = 7) -> None:
        request.sample1, request.sample2 = samples
        request.numMetrics = count
        nvml.nvmlGpmMetricsGet(request)

    print(f"each call alone, {times} times (processor time, and by the clock):")
    with contextlib.suppress(nvml.NVMLError):  # before Hopper
        nvml.nvmlGpmSampleGet(gpu, samples[0])
        time.sleep(0.2)
    for name, call in {
        "MemoryInfo": lambda: nvml.nvmlDeviceGetMemoryInfo(gpu),
        "MemoryInfo, second version": lambda: nvml.nvmlDeviceGetMemoryInfo(gpu, nvml.nvmlMemory_v2),
        "GpmSampleGet": lambda: nvml.nvmlGpmSampleGet(gpu, samples[1]),
        "GpmMetricsGet": metrics,
        "GpmMetricsGet, one metric": lambda: metrics(1),
        "TotalEnergyConsumption": lambda: nvml.nvmlDeviceGetTotalEnergyConsumption(gpu),
        "PowerUsage": lambda: nvml.nvmlDeviceGetPowerUsage(gpu),
        **{
            f"FieldValues: {', '.join(names)}": lambda names=names: nvml.nvmlDeviceGetFieldValues(
                gpu, [fields[name] for name in names]
            )
            for names in (["energy"], ["power"], ["energy", "power"], ["PCIe in", "PCIe out"], list(fields))
        },
        "Temperature": lambda: nvml.nvmlDeviceGetTemperature(gpu, nvml.NVML_TEMPERATURE_GPU),
        "ClockInfo": lambda: nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_SM),
        "UtilizationRates": lambda: nvml.nvmlDeviceGetUtilizationRates(gpu),
        "ComputeRunningProcesses": lambda: nvml.nvmlDeviceGetComputeRunningProcesses(gpu),
        "MPSComputeRunningProcesses": lambda: nvml.nvmlDeviceGetMPSComputeRunningProcesses(gpu),
        "GraphicsRunningProcesses": lambda: nvml.nvmlDeviceGetGraphicsRunningProcesses(gpu),
        "RunningProcessDetailList": lambda: nvml.nvmlDeviceGetRunningProcessDetailList(
            gpu, nvml.nvmlProcessDetailList_v1, 0
        ),
        "PcieThroughput": lambda: nvml.nvmlDeviceGetPcieThroughput(gpu, nvml.NVML_PCIE_UTIL_RX_BYTES),
        "HandleByIndex": lambda: nvml.nvmlDeviceGetHandleByIndex(0),
        "UUID": lambda: nvml.nvmlDeviceGetUUID(gpu),
        "MigMode": lambda: nvml.nvmlDeviceGetMigMode(gpu),
    }.items():
        try:
            call()
            used, began = time.thread_time(), time.perf_counter()
            for _ in range(times):
                call()
            used, elapsed = time.thread_time() - used, time.perf_counter() - began
            print(f"  {name:42} {1000 * used / times:7.3f} ms, {1000 * elapsed / times:7.3f} ms")
        except (nvml.NVMLError, AttributeError, TypeError) as error:
            print(f"  {name:42} {error}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--stand-in", action="store_true", help="also where there is a GPU")
    options = parser.parse_args()
    real = None if options.stand_in else real_source()
    source, about = real or stand_in()
    monitor = Monitor(source, INTERVAL).start()
    time.sleep(INTERVAL)  # the first looks pay for imports and caches
    CALLS.clear()
    before, began = time.process_time(), time.perf_counter()
    looks = sum(len(monitor.window(device.id)) for device in monitor.devices())
    threading.Event().wait(options.seconds)
    used, elapsed = time.process_time() - before, time.perf_counter() - began
    looks = sum(len(monitor.window(device.id)) for device in monitor.devices()) - looks
    percent = 100 * used / elapsed
    print(f"source: {about}")
    print(
        f"{looks} readings in {elapsed:.1f} s, every {INTERVAL:g} s, windows of {monitor.seconds:g} s; "
        f"{len(psutil.pids())} processes on this machine, {os.cpu_count()} cores"
    )
    print(
        f"CPU: {used * 1000:.0f} ms, {percent:.2f}% of one core (goal: under {GOAL:g}%); "
        f"failed looks: {monitor.failures}"
    )
    began = time.process_time()
    for device in monitor.devices():
        window = monitor.window(device.id)
        [(window.mean(field), window.age(field)) for field in FIELDS]
    print(f"all windows with means and ages: {(time.process_time() - began) * 1000:.1f} ms")
    calls = sum(seconds for _, seconds in CALLS.values())
    print(f"in NVML's calls: {100 * calls / elapsed:.2f}% of one core, of which")
    for name, (count, seconds) in sorted(CALLS.items(), key=lambda item: -item[1][1]):
        print(
            f"  {name:42} {count / elapsed:6.1f} a second, {1000 * seconds / count:7.3f} ms each, "
            f"{100 * seconds / elapsed:6.3f}% of one core"
        )
    monitor.stop()
    if real is not None:
        alone()
    sys.exit(0 if percent < GOAL else 1)


if __name__ == "__main__":
    main()
