"""Identity of processes: a pid with a start time, whether it lives, and its descendants."""

import functools
import os
import signal
from collections.abc import Mapping
from typing import NamedTuple


def stat_fields(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat after the name: 0 is the state, 1 the parent, 19 the start in ticks since
    boot.

    The list is empty if there is no such process, or this one may not see it.
    """
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].decode().split()
    except OSError:
        return []


def stat_field(pid: int, field: int) -> str | None:
    """Return one of these fields, or `None` if there is no such process."""
    fields = stat_fields(pid)
    return fields[field] if fields else None


class Process(NamedTuple):
    """A process; its pid may be reused later, but not with the same start time."""

    pid: int
    start: int  # on Linux clock ticks since the machine's start, elsewhere hundredths of a second


def this_process() -> Process:
    return _this()


@functools.cache
def _this() -> Process:
    start = start_of(os.getpid())
    return Process(os.getpid(), 0 if start is None else start)


os.register_at_fork(after_in_child=_this.cache_clear)


def is_alive(process: Process) -> bool:
    """Return whether a process lives; an ended one that was not waited for (a zombie) does not."""
    start = start_of(process.pid)
    return start is not None and start in (process.start, 0)


def start_of(pid: int) -> int | None:
    """Return the start time of a process: `None` if there is none, 0 if it lives and nothing else is known."""
    fields = stat_fields(pid)
    if fields:
        return None if fields[0] in ("Z", "X", "x") else int(fields[19])
    is_hidden = _may_signal(pid) is False  # /proc may hide the processes of other users
    return None if os.path.exists("/proc/self/stat") and not is_hidden else _start_without_proc(pid)


def _may_signal(pid: int) -> bool | None:
    """Return whether this process may send signals to that one; `None` if there is none."""
    try:
        os.kill(pid, 0)
    except PermissionError:
        return False
    except (OSError, OverflowError):
        return None
    return True


def _start_without_proc(pid: int) -> int | None:
    if os.path.exists("/proc/self/stat"):
        return 0
    try:
        import psutil
    except ImportError:
        return None if _may_signal(pid) is None else 0
    try:
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else round(process.create_time() * 100)
    except psutil.AccessDenied:
        return 0
    except psutil.Error:
        return None


def children() -> dict[int, list[int]]:
    """Return the living children of each process that has some."""
    below: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        fields = stat_fields(int(name)) if name.isdigit() else []
        if fields and fields[0] not in ("Z", "X"):
            below.setdefault(int(fields[1]), []).append(int(name))
    return below


def descendants(root: int, below: Mapping[int, list[int]] | None = None) -> dict[int, int]:
    """Return all living descendants of a process, each with its parent; parents come first."""
    below = children() if below is None else below
    parents: dict[int, int] = {}
    layer = [root]
    while layer:
        fresh = {child: parent for parent in layer for child in below.get(parent, ()) if child not in parents}
        parents |= fresh
        layer = list(fresh)
    return parents


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
