"""What the monitor sees, as placement needs it: slots as they are now, and which job holds how much on which."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path

from ullage.isolation.process_identity import Process, start_of
from ullage.manager.running.supervisor import TOKEN
from ullage.monitor import Monitor
from ullage.monitor.readings import Device
from ullage.placement import Activity, Slot

_MARK = f"{TOKEN}=".encode()


class Watching:
    """Reads a monitor. A process belongs to an attempt by the token in its environment, whoever started it."""

    def __init__(self, monitor: Monitor) -> None:
        self.monitor = monitor
        self._tokens: dict[Process, str | None] = {}

    def devices(self) -> list[Device]:
        """What jobs can be placed on: GPUs, MIG instances, virtual cards."""
        return [device for device in self.monitor.devices() if device.takes_jobs]

    def look(self, drained: Mapping[str, str]) -> tuple[list[Slot], dict[str, dict[str, int]]]:
        """The slots now, and bytes held by token and slot."""
        held: dict[str, dict[str, int]] = {}
        slots = [self._slot(device, device.id in drained, held) for device in self.devices()]
        self._forget()
        return slots, held

    def _slot(self, device: Device, drained: bool, held: dict[str, dict[str, int]]) -> Slot:
        lost = self.monitor.lost(device.id) is not None
        latest, window = self.monitor.latest(device.id), self.monitor.window(device.id)
        foreign = 0
        for pid, taken in (self.monitor.processes(device.id) or {}).items():
            owner = self._owner(pid)
            if owner is None:
                continue  # a process that cannot be seen from here (another container's) may be anybody's
            if not owner:
                foreign += taken or 0
            elif taken is not None:
                of_job = held.setdefault(owner, {})
                of_job[device.id] = of_job.get(device.id, 0) + taken
        return Slot(
            id=device.id, index=device.index, name=device.name, total=device.total or 0,
            used=latest.memory_used if latest else None, mig=device.mig, drained=drained, lost=lost, foreign=foreign,
            activity=Activity(
                gract=window.mean("gract"), smact=window.mean("smact"), smocc=window.mean("smocc"),
                drama=window.mean("drama"), age=window.age("smact"),
            ),
        )  # fmt: skip

    def _owner(self, pid: int) -> str | None:
        """The token of a process, "" for one that has none, `None` for one that cannot be seen."""
        start = start_of(pid)
        if start is None:
            return None
        process = Process(pid, start)
        if process not in self._tokens:
            self._tokens[process] = _token_of(pid)
        return self._tokens[process]

    def _forget(self) -> None:
        if len(self._tokens) > 4096:
            self._tokens = {process: token for process, token in self._tokens.items() if start_of(process.pid)}


def _token_of(pid: int) -> str | None:
    with contextlib.suppress(OSError):
        for variable in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
            if variable.startswith(_MARK):
                return variable.removeprefix(_MARK).decode(errors="replace")
        return ""
    return None
