"""Run this on a machine with a GPU: one reading of every source, and whether the figures are plausible under a load.

    PYTHONPATH=src python benchmarks/gpu/monitor_check.py [--seconds 3] [--no-load]

Needs pynvml (nvidia-ml-py), psutil and, for the loads, PyTorch with CUDA. Each check prints ok, FAILED or unknown; the
exit code is 1 if one failed, 2 if there is no GPU. The last line is all figures as JSON. Other work on the GPU spoils
the checks of the loads.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

from ullage.errors import UllageError
from ullage.manager.monitor.dcgm import DcgmSource, dcgm_installed
from ullage.manager.monitor.host import HostWatch
from ullage.manager.monitor.nvml import NvmlSource
from ullage.manager.monitor.readings import Device, GPUReading, Source
from ullage.manager.monitor.sampling import Monitor
from ullage_lab.measure.activity import ActivityBetween, activity_between

results: dict[str, Any] = {"checks": {}}


def check(name: str, value: Any, holds: Callable[[Any], bool], unknown_is_fine: bool = False) -> None:
    """Print the line of a check; an unknown value (`None`) fails unless it is allowed."""
    verdict = ("unknown" if unknown_is_fine else "FAILED") if value is None else "ok" if holds(value) else "FAILED"
    results["checks"][name] = {"value": value, "verdict": verdict}
    print(f"  {verdict:8} {name}: {value if not isinstance(value, float) else round(value, 4)}")


def show(title: str, reading: GPUReading | ActivityBetween) -> None:
    values = {key: value for key, value in asdict(reading).items() if value is not None}
    unknown = [key for key, value in asdict(reading).items() if value is None]
    print(f"{title}: {json.dumps(values)}")
    print(f"  unknown: {', '.join(unknown) or 'nothing'}")


def look_at(source: Source, seconds: float) -> list[Device]:
    """Read each device of a source, over some seconds."""
    devices = source.devices()
    print(f"\nsource {source.name}: {len(devices)} device(s); hint: {source.hint}")
    for device in devices:
        source.read(device.id)
    time.sleep(seconds)
    for device in devices:
        print(device)
        reading = source.read(device.id)
        show(f"  {source.name} reading", reading)
        print(f"  processes: {source.processes(device.id)}")
        results.setdefault("readings", []).append({"source": source.name, **asdict(device), **asdict(reading)})
        if device.mig:
            continue
        check(f"{source.name} {device.index} memory used, GiB", _gib(reading.memory_used), lambda value: value >= 0)
        total = reading.memory_total
        check(f"{source.name} {device.index} memory total, GiB", _gib(total), lambda value: 1 < value < 1000)
        if reading.memory_used is not None and total is not None:
            check(f"{source.name} {device.index} used is within total", reading.memory_used <= total, bool)
        check(f"{source.name} {device.index} power, W", reading.power_w, lambda value: 3 < value < 2000, True)
        check(f"{source.name} {device.index} temperature", reading.temperature_c, lambda value: 5 < value < 110, True)
        for name in ("gract", "smact", "smocc", "drama", "tensor"):
            check(f"{source.name} {device.index} {name}", getattr(reading, name), lambda value: 0 <= value <= 1, True)
    return devices


@contextmanager
def measured(title: str, device: Device, seconds: float) -> Iterator[ActivityBetween]:
    """Measure the activity of a load, and compare it with a monitor that samples meanwhile."""
    with (
        Monitor(NvmlSource(), interval=0.25, window=max(90.0, seconds)) as monitor,
        activity_between(device.id) as activity,
    ):
        yield activity
        window = monitor.window(device.id)
        sampled = {name: window.mean(name) for name in ("gract", "smact", "smocc", "drama", "power_w")}
    show(f"\n{title}", activity)
    print(f"  the monitor's means over {len(window)} looks: {json.dumps(sampled)}")
    results[title] = {"between": asdict(activity), "monitor": sampled, "looks": len(window)}


def loads(device: Device, seconds: float) -> None:
    """Run three loads with roughly known figures."""
    import torch

    idle = NvmlSource().read(device.id).power_w
    uuids = [str(torch.cuda.get_device_properties(number).uuid) for number in range(torch.cuda.device_count())]
    gpu = next((number for number, uuid in enumerate(uuids) if uuid in device.id), 0)
    torch.cuda.set_device(gpu)
    products(torch, device, seconds, idle)
    one_thread(torch, device, seconds)
    copies(torch, device, seconds)


def products(torch: Any, device: Device, seconds: float, idle: float | None) -> None:
    """Large matrix products in bfloat16 keep SMs and tensor cores busy."""
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    for _ in range(20):
        a @ a
    torch.cuda.synchronize()
    watch = HostWatch()
    watch.look([os.getpid()])
    with measured("matrix products", device, seconds) as activity:
        ends = time.monotonic() + seconds
        while time.monotonic() < ends:
            for _ in range(20):
                a @ a
            torch.cuda.synchronize()
        held = NvmlSource().processes(device.id)
        host = watch.look([os.getpid()])[os.getpid()]
    check("products: GRACT", activity.gract, lambda value: value > 0.8, True)
    check("products: SMACT", activity.smact, lambda value: value > 0.6, True)
    check("products: SMOCC under SMACT", activity.smocc, lambda value: 0 < value <= (activity.smact or 1), True)
    check("products: tensor", activity.tensor, lambda value: value > 0.3, True)
    check("products: DRAMA", activity.drama, lambda value: 0 < value < 1, True)
    check("products: power over idle, W", (activity.power_w or 0) - (idle or 0), lambda value: value > 20)
    sampled = results["matrix products"]["monitor"]
    if activity.smact is not None and sampled["smact"] is not None:
        check("products: SMACT sampled - between", sampled["smact"] - activity.smact, lambda value: abs(value) < 0.1)
    if activity.power_w is not None and sampled["power_w"] is not None:
        ratio = sampled["power_w"] / activity.power_w
        check("products: power sampled / by energy", ratio, lambda value: 0.7 < value < 1.3)
    mine = (held or {}).get(os.getpid())
    print(f"  processes: {held}; this one is {os.getpid()} (in a container NVML may give other pids)")
    reserved = torch.cuda.memory_reserved()
    check(
        "products: GPU memory of this process over PyTorch's, GiB",
        None if mine is None else _gib(mine - reserved),
        lambda value: 0.1 < value < 3,
        True,
    )
    print(f"  host: {host}")
    check("products: CPU of this process, cores", host.cpu, lambda value: 0 < value < 64)


def one_thread(torch: Any, device: Device, seconds: float) -> None:
    """A kernel of one thread: GRACT takes the GPU for busy, SMACT and SMOCC do not."""
    torch.cuda._sleep(1000)
    torch.cuda.synchronize()
    with measured("one thread", device, seconds) as activity:
        ends = time.monotonic() + seconds
        while time.monotonic() < ends:
            torch.cuda._sleep(200_000_000)
            torch.cuda.synchronize()
    check("one thread: GRACT", activity.gract, lambda value: value > 0.8, True)
    check("one thread: SMACT", activity.smact, lambda value: value < 0.05, True)
    check("one thread: SMOCC", activity.smocc, lambda value: value < 0.01, True)


def copies(torch: Any, device: Device, seconds: float) -> None:
    """Copies to the GPU: PCIe's figure has to agree with the bytes that were sent."""
    host = torch.empty(256 << 20, dtype=torch.uint8, pin_memory=True)
    there = torch.empty_like(host, device="cuda")
    there.copy_(host, non_blocking=True)
    torch.cuda.synchronize()
    sent = 0
    with measured("copies to the GPU", device, seconds) as activity:
        ends = time.monotonic() + seconds
        while time.monotonic() < ends:
            for _ in range(4):
                there.copy_(host, non_blocking=True)
                sent += host.numel()
            torch.cuda.synchronize()
    rate = sent / (activity.seconds or seconds)
    print(f"  sent by us: {rate / 1e9:.2f} GB/s")
    check(
        "copies: PCIe received / sent by us",
        activity.pcie_rx_bps and activity.pcie_rx_bps / rate,
        lambda value: 0.8 < value < 1.5,
        True,
    )
    check("copies: SMACT", activity.smact, lambda value: value < 0.1, True)


def _gib(size: int | None) -> float | None:
    return None if size is None else size / (1 << 30)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=3.0, help="of each load")
    parser.add_argument("--no-load", action="store_true", help="only read")
    options = parser.parse_args()
    try:
        source = NvmlSource()
        devices = look_at(source, 1.5)
        if dcgm_installed():
            dcgm = DcgmSource(NvmlSource())
            look_at(dcgm, 3.5)
            dcgm.close()
        else:
            print("\nsource dcgm: the program dcgmi is not installed")
    except UllageError as error:
        print(f"monitor_check: {error}", file=sys.stderr)
        sys.exit(2)
    whole = [device for device in devices if device.takes_jobs and not device.mig]
    if not options.no_load and whole:
        loads(whole[0], options.seconds)
    source.close()
    failed = [name for name, what in results["checks"].items() if what["verdict"] == "FAILED"]
    print(f"\n{len(results['checks'])} checks, {len(failed)} failed{': ' if failed else ''}{'; '.join(failed)}")
    print(json.dumps(results))
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
