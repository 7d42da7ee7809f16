"""All that a monitor knows at one moment, as plain data: what `ullage top` draws, prints as JSON and records."""

from __future__ import annotations

import time
from typing import Any

from ullage.manager.monitor.readings import Device, GPUReading
from ullage.manager.monitor.sampling import Monitor


def snapshot(monitor: Monitor) -> dict[str, Any]:
    """The newest readings of every device with the processes on it, ready for JSON.

        snapshot(monitor)["gpus"][0]["smact"]

    Keys: `time`, `source`, `hint`, `failures` and `gpus`. A GPU has what `Device` and `GPUReading` have, `lost` (why,
    or `None`), `age` (seconds since the reading), `ages` (of values that were read before it), `processes`: a list, or
    `None` where they are unknown, and `processes_age`.
    """
    return {
        "time": time.time(),
        "source": monitor.source.name,
        "hint": monitor.source.hint,
        "failures": monitor.failures,
        "gpus": [_gpu(monitor, device) for device in monitor.devices()],
    }


def _gpu(monitor: Monitor, device: Device) -> dict[str, Any]:
    reading = monitor.latest(device.id)
    values = (reading or GPUReading(time=0.0)).to_dict()
    del values["time"]
    window = monitor.window(device.id)
    ages = {field: window.age(field) for field in values.pop("ages")}
    known = monitor.processes(device.id) is not None
    return {
        "id": device.id,
        "index": device.index,
        "name": device.name,
        "mig": device.mig,
        "parent": device.parent,
        "divided": device.divided,
        "lost": monitor.lost(device.id),
        "age": window.age(),
        "ages": ages,
        **values,
        "memory_total": values["memory_total"] if values["memory_total"] is not None else device.total,
        "processes": _processes(monitor, device.id) if known else None,
        "processes_age": monitor.processes_age(device.id),
    }


def _processes(monitor: Monitor, device_id: str) -> list[dict[str, Any]]:
    found = []
    for process in monitor.process_readings(device_id):
        host = monitor.host(process.pid)
        found.append(
            {
                "pid": process.pid,
                "memory": process.memory,
                "user": host.user if host else None,
                "cpu": host.cpu if host else None,
                "ram": host.ram if host else None,
                "command": host.command if host else None,
            }
        )
    return found
