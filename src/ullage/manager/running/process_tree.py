"""Process trees and cgroups: signals, written bytes, and ends. Uses only the standard library and /proc, for the
supervisor."""

import contextlib
import json
import os
import signal
from collections.abc import Callable, Iterable
from typing import Any

from ullage.sandbox.process_identity import descendants, stat_field

_SHELLS = ("sh", "bash", "dash", "zsh", "ksh", "fish", "ash")
_LARGEST_RECORD = 1 << 16  # bytes


def listeners(tree: dict[int, int], number: int) -> list[int]:
    """Return the outermost processes of a tree that handle a signal. Forked workers inherit the handler and must not
    save again. Shells only count if nothing else does, since a shell with any trap handles every signal."""
    hearing = {pid for pid in tree if _handles(pid, number)}
    hearing = {pid for pid in hearing if _name(pid) not in _SHELLS} or hearing

    def below_another(pid: int) -> bool:
        parent = tree.get(pid)
        return parent is not None and (parent in hearing or below_another(parent))

    return [pid for pid in tree if pid in hearing and not below_another(pid)]


def _handles(pid: int, number: int) -> bool:
    try:
        with open(f"/proc/{pid}/status", "rb") as lines:
            caught = next(int(line.split()[1], 16) for line in lines if line.startswith(b"SigCgt:"))
    except (OSError, ValueError, StopIteration):
        return False
    return bool(caught >> (number - 1) & 1)


def _name(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/comm") as file:
            return file.read().strip()
    except (OSError, UnicodeDecodeError):
        return ""


def signal_in(tree: dict[int, int], pid: int, number: int) -> bool:
    """Send a signal to a process of a tree; return whether it was sent."""
    return signal_if(pid, number, lambda: stat_field(pid, 1) == str(tree.get(pid)))


def signal_if(pid: int, number: int, is_same: Callable[[], bool]) -> bool:
    """Send a signal to a process, unless another one has its pid by now; return whether it was sent."""
    try:
        descriptor = os.pidfd_open(pid)
    except OSError:
        return False
    try:
        if not is_same():  # checked after opening the descriptor, which refers to one process only
            return False
        signal.pidfd_send_signal(descriptor, signal.Signals(number))
        return True
    except OSError:
        return False
    finally:
        os.close(descriptor)


def read_record(file: str | os.PathLike[str]) -> dict[str, Any] | None:
    try:
        with open(file, "rb") as source:
            record: dict[str, Any] = json.loads(source.read(_LARGEST_RECORD))
            return record
    except (OSError, ValueError):
        return None


def written(pids: Iterable[int]) -> int:
    """Return the bytes that processes have written so far, without those of unreadable processes."""
    total = 0
    for pid in pids:
        with contextlib.suppress(OSError, ValueError, IndexError), open(f"/proc/{pid}/io", "rb") as lines:
            fields = dict(line.split(b":") for line in lines)
            total += max(int(fields[b"wchar"]), int(fields[b"write_bytes"]))
    return total


def kill_tree(root: int) -> None:
    for pid in descendants(root):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)


def cgroup_members(folder: str) -> list[int]:
    members = []
    for place, _, _ in os.walk(folder):
        with contextlib.suppress(OSError, ValueError), open(os.path.join(place, "cgroup.procs")) as file:
            members += [int(line) for line in file]
    return [pid for pid in members if stat_field(pid, 0) not in (None, "Z", "X")]


def kill_cgroup(folder: str) -> int:
    members = cgroup_members(folder)
    if not members:
        return 0
    try:
        with open(os.path.join(folder, "cgroup.kill"), "w") as file:
            file.write("1")
    except OSError:  # Linux before 5.14
        for pid in members:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
    return len(members)


def remove_cgroup(folder: str) -> None:
    for place, _, _ in os.walk(folder, topdown=False):
        with contextlib.suppress(OSError):
            os.rmdir(place)
