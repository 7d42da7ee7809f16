"""Limits of a child: time, memory, processes, written bytes, and the length of its answer."""

import contextlib
import os
import resource
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ullage.errors import MissingPackage
from ullage.sandbox.process_identity import descendants, stat_fields
from ullage.sandbox.protocol import Exceeded
from ullage.units import GIB, format_bytes, format_duration

_EVERY = 0.1  # seconds between checks of the memory
_PAGE = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The limits of one child; `None` is no limit.

    `seconds` counts from the start of the wait. `memory` is the resident memory of the child and its descendants, in
    bytes, and `left_free` the share of the machine's memory that must stay available. `answer` and `written` are bytes
    (a sandbox always has a limit for the latter: `MOST_WRITTEN`), and `processes` counts the child and its descendants.
    """

    seconds: float | None = None
    memory: int | None = None
    left_free: float = 0.0
    answer: int = GIB
    processes: int | None = None
    written: int | None = None


NO_LIMITS = Limits()
MOST_WRITTEN = 4 * GIB


class Watch:
    """Checks whether a process is within its limits."""

    def __init__(self, pid: int, limits: Limits) -> None:
        self._pid, self._limits = pid, limits
        self._began = time.monotonic()
        self._next = self._began

    def exceeded(self, pending: int = 0) -> Exceeded | None:
        """Return the limit that the process has exceeded, if any; `pending` bytes of its answer have arrived."""
        limits, now = self._limits, time.monotonic()
        if limits.seconds is not None and now - self._began > limits.seconds:
            return Exceeded("time", f"took longer than {format_duration(limits.seconds)}")
        if pending > limits.answer:
            return Exceeded("answer", f"gave an answer longer than {format_bytes(limits.answer)}")
        if now < self._next:
            return None
        self._next = now + _EVERY
        if limits.memory is not None and resident(self._pid) > limits.memory:
            return Exceeded("memory", f"took more than {format_bytes(limits.memory)} of this machine's memory")
        if limits.processes is not None and len(family(self._pid)) > limits.processes:
            return Exceeded("processes", f"started more than {limits.processes} processes")
        available, total = machine_memory() if limits.left_free else (0, 0)
        if available < limits.left_free * total:
            left = f"less than {limits.left_free:.0%} of this machine's memory"
            return Exceeded("memory", f"took {format_bytes(resident(self._pid))} and left {left} to others")
        return None


def resident(pid: int) -> int:
    """Return the resident memory of a process and its descendants; 0 when it is gone."""
    return sum(family(pid).values())


def family(pid: int) -> dict[int, int]:
    """Return a process and its descendants, each with its resident memory."""
    if not Path("/proc/self/stat").exists():
        psutil = _psutil()
        sizes = {}
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(pid)
            for member in [process, *process.children(recursive=True)]:
                with contextlib.suppress(psutil.Error):
                    sizes[member.pid] = int(member.memory_info().rss)
        return sizes
    fields = {member: stat_fields(member) for member in (pid, *descendants(pid))}
    return {member: int(stat[21]) * _PAGE for member, stat in fields.items() if stat}


def machine_memory() -> tuple[int, int]:
    """Return the available and the total memory of this machine."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        sizes = {name: int(rest.split()[0]) << 10 for name, _, rest in (line.partition(":") for line in lines)}
        return sizes["MemAvailable"], sizes["MemTotal"]
    except (OSError, KeyError):
        memory = _psutil().virtual_memory()
        return int(memory.available), int(memory.total)


def room_for(memory: int) -> int:
    """Return the number of processes of `memory` bytes for which this machine has cores and memory; at least 1."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(cores, machine_memory()[1] // memory))


def _psutil() -> Any:
    """Import psutil, for systems without /proc."""
    try:
        import psutil
    except ImportError:
        raise MissingPackage("psutil", "limits of memory") from None
    return psutil


def limit_address_space(more: int) -> None:
    """Let this process map at most `more` further bytes, so that an allocation that is too large fails by itself."""
    with contextlib.suppress(OSError, ValueError):
        mapped = int(Path("/proc/self/statm").read_text().split()[0]) * _PAGE
        resource.setrlimit(resource.RLIMIT_AS, (mapped + more, mapped + more))
