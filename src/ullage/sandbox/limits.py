"""What a child may take of this machine: time, memory and the length of its answer."""

from __future__ import annotations

import contextlib
import os
import resource
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ullage.errors import MissingPackage
from ullage.sandbox.process_identity import stat_fields
from ullage.sandbox.protocol import Exceeded
from ullage.units import GIB, format_bytes, format_duration

_EVERY = 0.1  # seconds between two looks at the memory
_PAGE = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits of one child; `None` is no limit.

    `seconds` counts from when it is waited for. `memory` (bytes) is what it and all processes that it started may have
    resident, and `left_free` the share of the machine's memory that must stay available to everybody else. `answer` is
    the longest answer in bytes. `processes` is how many it and those that it started may be at once, and `written` how
    many bytes it may write in a private world (which has a limit also without one: `MOST_WRITTEN`).
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
    """Looks whether a process is within its limits.

    >>> Watch(os.getpid(), Limits(memory=1)).exceeded().message
    "took more than 1 B of this machine's memory"
    """

    def __init__(self, pid: int, limits: Limits) -> None:
        self._pid, self._limits = pid, limits
        self._began = time.monotonic()
        self._next = self._began

    def exceeded(self, pending: int = 0) -> Exceeded | None:
        """The limit that the process has passed, if any; `pending` bytes of its answer have come so far."""
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
        if limits.left_free and is_memory_short(limits.left_free):
            left = f"less than {limits.left_free:.0%} of this machine's memory"
            return Exceeded("memory", f"took {format_bytes(resident(self._pid))} and left {left} to others")
        return None


def resident(pid: int) -> int:
    """Bytes of memory that a process and all that it started have resident; 0 when it is gone.

    >>> resident(os.getpid()) > 1000000
    True
    """
    return sum(family(pid).values())


def family(pid: int) -> dict[int, int]:
    """A process and all that it started, and what they started, with the memory that each has resident.

    >>> os.getpid() in family(os.getpid())
    True
    """
    if not Path("/proc/self/stat").exists():
        return _family_without_proc(pid)
    parents, sizes = {}, {}
    for name in os.listdir("/proc"):
        if name.isdigit() and (fields := stat_fields(int(name))):
            parents[int(name)], sizes[int(name)] = int(fields[1]), int(fields[21])
    members = {pid} & parents.keys()
    found = members
    while found:
        found = {child for child, parent in parents.items() if parent in found} - members
        members |= found
    return {member: sizes[member] * _PAGE for member in members}


def _family_without_proc(pid: int) -> dict[int, int]:
    psutil = _psutil()
    found = {}
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(pid)
        for member in [process, *process.children(recursive=True)]:
            with contextlib.suppress(psutil.Error):
                found[member.pid] = int(member.memory_info().rss)
    return found


def machine_memory() -> tuple[int, int]:
    """Bytes of memory that this machine can still give, and that it has.

    >>> available, total = machine_memory()
    >>> 0 < available < total
    True
    """
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        sizes = {name: int(rest.split()[0]) << 10 for name, _, rest in (line.partition(":") for line in lines)}
        return sizes["MemAvailable"], sizes["MemTotal"]
    except (OSError, KeyError):
        memory = _psutil().virtual_memory()
        return int(memory.available), int(memory.total)


def room_for(memory: int) -> int:
    """How many processes at once this machine has cores for, and so many bytes of memory each; at least one.

    >>> room_for(1 << 60)
    1
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(cores, machine_memory()[1] // memory))


def _psutil() -> Any:
    """Needed where there is no /proc."""
    try:
        import psutil
    except ImportError:
        raise MissingPackage("psutil", "limits of memory") from None
    return psutil


def is_memory_short(share: float) -> bool:
    """Whether less than a share of the machine's memory is available."""
    available, total = machine_memory()
    return available < share * total


def limit_address_space(more: int) -> None:
    """Let this process map so many bytes more than now, so that one too large allocation fails by itself."""
    with contextlib.suppress(OSError, ValueError):
        mapped = int(Path("/proc/self/statm").read_text().split()[0]) * _PAGE
        resource.setrlimit(resource.RLIMIT_AS, (mapped + more, mapped + more))
